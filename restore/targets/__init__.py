"""Where a restore goes: the targets, their locks and checks, and the databases that are made there, with their records.

Imports `fleet`, `fleet.nodes`, `fleet.tables`, `restore.ddl`, `restore.obstacles`, `restore.parts`,
`snapshots.ddl`, `snapshots.operations`, `snapshots.records`, `storage` and `wal.slots`.
"""
