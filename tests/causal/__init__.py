"""Causal chains: a workload in which every link refers to the previous link, across shards that each see only a part.

A *link* is a parent, and then a child with its twin on another shard. The *journal* records the answers that the
clients got for each transaction. A *state* is the restored content of an increment. State and journal disagree if a cut
tears or loses a transaction.
"""
