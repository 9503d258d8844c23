"""Fold: compute the rows of a copy at a cut from base copies and segments, with Spark DataFrames.

The state at a cut consists of the base rows whose keys did not change and the last effective image of every changed
key. An *image* is a row as a change left it. A *partial* image lacks the values that an UPDATE left unchanged.
"""
