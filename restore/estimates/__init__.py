"""How much work a restore is, how long it will take, and how far it has progressed.

The *volume* of a shard is its size according to the commits. An *estimate* is the expected duration in seconds, by
step. A *tally* queries the nodes for their progress while a step runs.
"""
