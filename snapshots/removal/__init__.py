"""Removal: deleting snapshots, pruning increments, and collecting garbage. All three are permanent.

A *mark* is stored before the first object is deleted, and is never removed. So an interrupted removal can be resumed,
and the name of a deleted snapshot is never used again.

Imports `fleet`, `fleet.nodes`, `fleet.tables`, `snapshots.activity`, `snapshots.operations`, `snapshots.records`,
`storage`, `wal.segments` and `wal.slots`.
"""
