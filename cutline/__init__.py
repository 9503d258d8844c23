"""Consistent snapshots of a fleet of PostgreSQL shards. Each folder here links to one at the top of the repository."""
