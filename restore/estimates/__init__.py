"""How much a restore has to do, how long that takes, and how far it is.

The *volume* of a shard is its size according to the commits. An *estimate* is its seconds, by step. A *tally* asks the
nodes, while a step runs, how far they are.
"""
