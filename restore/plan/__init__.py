"""Plan a restore: read the chain once, prove it once, and decide everything that follows from it.

The plan has the targets, the copies that rows are taken from, the topology, the roles and the DDL that each target can
run. A table's rows come from one copy as a whole, its base objects and its whole archive: so they are the rows of the
cut, whichever copy it is. Where the targets are not the snapshot's shards, all sources feed all targets.
"""
