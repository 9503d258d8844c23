"""Listing: the contents of a store, read from its commits alone, and names that are made or found by template.

Imports `fleet`, `snapshots.activity`, `snapshots.operations`, `snapshots.records`, `storage`, `wal.cut` and
`wal.slots`.
"""
