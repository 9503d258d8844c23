"""DDL: what a database has besides rows, how it is dumped, and what became of its tables between two commits.

A *fingerprint* tells one state of the catalogs from another. An *attempt* is void if the fingerprint changes while it
runs, and is made again.

Imports `snapshots.records`, `wal.segments`, `fleet` and `storage`.
"""
