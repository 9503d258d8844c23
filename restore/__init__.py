"""Restore: plan, load, swap. No database gets its real name until all databases are loaded and checked.

Imports `fleet`, `fleet.nodes`, `fleet.tables`, `restore.ddl`, `restore.rows`, `restore.topology`, `snapshots.ddl`,
`snapshots.fold`, `snapshots.operations`, `snapshots.records` and `storage`.
"""
