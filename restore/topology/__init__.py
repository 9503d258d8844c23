"""Topology: restores whose targets are not the shards of the snapshot. All sources feed all targets.

Which definitions the sources share, whether their keys are different, and what becomes of sequences and foreign keys.

Imports `columns`, `fleet`, `fleet.tables`, `restore.copies`, `restore.ddl`, `restore.routing`, `restore.rows`,
`snapshots.base_copy`, `snapshots.ddl`, `snapshots.fold`, `snapshots.records`, `snapshots.tasks`, `storage` and
`wal.segments`.
"""
