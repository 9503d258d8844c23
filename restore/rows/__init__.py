"""Load the rows and large objects of a restore: the tasks of its Spark jobs, and the ledger that they keep.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.tables`, `restore.ddl`, `restore.estimates`, `restore.parts`,
`restore.routing`, `snapshots.base_copy`, `snapshots.ddl`, `snapshots.fold`, `snapshots.records`, `snapshots.tasks`,
`storage` and `wal.segments`.
"""
