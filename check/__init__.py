"""Check: reads a chain back and proves it complete, or names what is damaged. It can't pass on nothing.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.tables`, `snapshots.base_copy`, `snapshots.ddl`,
`snapshots.executors`, `snapshots.fold`, `snapshots.globals`, `snapshots.operations`,
`snapshots.records`, `snapshots.tasks`, `storage`, `wal.cut` and `wal.segments`.
"""
