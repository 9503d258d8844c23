"""The fleet: its description, its nodes, their connections and identities, and an embedded one to try.

A *fleet* is the shards named in fleet.toml; a *shard* is one primary *node* and any number of *backup*
nodes (physical standbys); a *group* is one table; the *baseline* is what identifies every node. Imports
only `storage`.
"""
