"""Listing: the contents of a store, read from its commits alone, and names that are made or found by template.

Imports `snapshots.operations`, `snapshots.records`, `wal.slots`, `fleet` and `storage`.
"""
