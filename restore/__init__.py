"""Restore: plan, load, swap. No database gets its real name until all databases are loaded and checked.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.tables`, `restore.ddl`, `snapshots.base_copy`, `snapshots.ddl`,
`snapshots.fold`, `snapshots.operations`, `snapshots.records`, `storage` and `wal.segments`.
"""
