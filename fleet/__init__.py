"""Fleet: fleet.toml and the plain values that everything above it uses.

A *fleet* is the shards named in fleet.toml. A *shard* is one primary *node* and any number of *backup* nodes (physical
standbys). A *group* is one table.

The modules of this folder import only `storage`; its sub-packages import them.
"""
