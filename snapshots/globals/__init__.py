"""Globals: what a server has besides its databases, read once per create, and stored if it has changed.

Imports `fleet`, `fleet.nodes`, `snapshots.operations`, `snapshots.records`, `storage` and `wal.segments`.
"""
