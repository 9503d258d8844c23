"""Base copy: the rows of tables as an exported snapshot of a node shows them, stored as Parquet objects.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.tables`, `snapshots.ddl`, `snapshots.operations`,
`snapshots.records`, `snapshots.tasks`, `storage`, `wal.segments` and `wal.slots`.
"""
