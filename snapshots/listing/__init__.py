"""Listing: the contents of a store, read from its commits and outcomes alone, as lists and as figures over time.

Also names that are made or found by template.

Imports `fleet`, `snapshots.activity`, `snapshots.operations`, `snapshots.records`, `storage`, `wal.cut` and
`wal.slots`.
"""
