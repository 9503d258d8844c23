"""Fleet: fleet.toml, and plain values for all higher packages.

A *fleet* is the shards that fleet.toml lists. A *shard* is one primary and any number of standbys (`backup_of` in
fleet.toml); each server is a *node*. A *group* is one table on all shards.
"""
