"""Merges: a base of every copy at the cut of an increment, made from the chain alone.

The chain is folded to the increment, and its rows are written to new objects, except for those objects of earlier base
copies in which no row has changed. Before the merge counts, its objects are read back and compared with the chain.
"""
