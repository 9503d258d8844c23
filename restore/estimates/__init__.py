"""The amount of work of a restore, its expected duration and its progress.

The *volume* of a shard is its size according to the commits. An *estimate* is the duration in seconds, by step. A
*tally* queries the progress of nodes while a step runs.
"""
