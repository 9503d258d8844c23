"""Load the rows and large objects of a restore: the tasks of its Spark jobs, and the ledger that they keep.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.tables`, `snapshots.base_copy`, `snapshots.ddl`, `snapshots.fold`,
`restore.routing`, `snapshots.operations`, `snapshots.records`, `storage` and `wal.segments`.
"""
