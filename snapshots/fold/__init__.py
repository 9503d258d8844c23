"""Fold: the rows of a copy at a cut, from base copies and segments, as one function over DataFrames.

State at cut N = base rows whose key did not change, and the last effective image of every changed key. An *image* is a
row as a change left it; a *partial* image lacks values that an UPDATE left unchanged.

Imports `snapshots.base_copy`, `snapshots.records`, `wal.segments`, `columns`, `fleet` and `storage`.
"""
