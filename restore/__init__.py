"""Restore: plan, load, swap; or fill tables that exist (`--data-only`).

No database gets its real name until all databases are loaded and checked.

Imports `fleet`, `fleet.nodes`, `fleet.tables`, `restore.copies`, `restore.data_only`, `restore.ddl`,
`restore.estimates`, `restore.obstacles`, `restore.parts`, `restore.routing`, `restore.rows`, `restore.targets`,
`restore.topology`, `snapshots.ddl`, `snapshots.executors`, `snapshots.globals`, `snapshots.listing`,
`snapshots.operations`, `snapshots.records`, `snapshots.tasks`, `storage` and `wal.segments`.
"""
