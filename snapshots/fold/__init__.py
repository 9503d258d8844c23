"""Fold: compute the rows of a copy at a cut from base copies and segments, with Spark DataFrames.

State at cut N = base rows whose key did not change, plus the last effective image of every changed key. An *image* is a
row as a change left it; a *partial* image lacks the values that an UPDATE left unchanged.
"""
