"""Create: take a full snapshot or an increment, from the checks to the commit.

Every check runs before anything is changed. Nothing counts until the commit is stored: a create that ends earlier
leaves no snapshot.

Imports `columns`, `fleet`, `fleet.nodes`, `fleet.programs`, `fleet.read_only`, `fleet.tables`, `snapshots.base_copy`,
`snapshots.ddl`, `snapshots.executors`, `snapshots.globals`, `snapshots.operations`, `snapshots.records`,
`snapshots.tasks`, `storage`, `storage.encryption`, `wal.cut`, `wal.decoding`, `wal.drain`, `wal.segments` and
`wal.slots`.
"""
