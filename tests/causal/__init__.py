"""Causal chains: a workload in which every link refers to the one before, on shards that no single one knows all of.

A *link* is a parent, and then a child with its twin on another shard; the *journal* is what clients were told of each
transaction; a *state* is what an increment restores to. State and journal disagree where a cut tears or loses.
"""
