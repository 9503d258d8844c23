"""What keeps a restore from its targets: each obstacle with its own hint, all of them reported at once.

An *obstacle* is an error that a check found before anything was changed. Checks here create nothing on a target, and
read no object of the store.

Imports `fleet`, `fleet.nodes`, `snapshots.ddl`, `snapshots.records` and `storage`.
"""
