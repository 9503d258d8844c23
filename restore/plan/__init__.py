"""Plan a restore: read and verify the chain once, and base all decisions on it.

The plan contains the targets, the copies that rows are taken from, the topology, the roles and the DDL that each target
can run. All rows in a table are taken from the base objects and archived WAL of a single copy, so any copy yields the
rows at the cut. If the targets are not the snapshot's shards, every source feeds every target.
"""
