"""What a chain needs between its increments: WAL that is archived ahead, and an end when another chain takes its place.

Imports `fleet`, `fleet.nodes`, `snapshots.create`, `snapshots.ddl`, `snapshots.operations`, `snapshots.records`,
`snapshots.tasks`, `storage`, `wal.cut`, `wal.decoding`, `wal.drain` and `wal.slots`.
"""
