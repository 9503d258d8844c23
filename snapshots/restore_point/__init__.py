"""Restore points: cuts by themselves, for fleets whose nodes have physical backups. They archive events and no rows.

Imports `fleet`, `fleet.nodes`, `fleet.read_only`, `fleet.tables`, `snapshots.base_copy`, `snapshots.create`,
`snapshots.operations`, `snapshots.records`, `storage`, `wal.drain`, `wal.segments` and `wal.slots`.
"""
