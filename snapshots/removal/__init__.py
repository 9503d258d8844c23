"""Removal: delete snapshots, prune increments, and collect garbage. All three are permanent.

A *mark* is stored before the first object is deleted, and is never removed. So an interrupted removal can be resumed,
and the name of a deleted snapshot is never used again.
"""
