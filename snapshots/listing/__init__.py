"""Listing: what a store holds, read from its commits alone, and names made or found by template.

Imports `snapshots.operations`, `snapshots.records`, `wal.slots`, `fleet` and `storage`.
"""
