"""Causal chains: a workload in which every link refers to the previous one, across shards that each see only a part.

A *link* is a parent, and then a child with its twin on another shard; the *journal* has the answers that the clients
got for each transaction; a *state* is what an increment restores to. State and journal disagree if a cut tears a
transaction or loses one.
"""
