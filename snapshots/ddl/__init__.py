"""DDL: a database's schema objects, how they are dumped, and how its tables changed between two commits.

A *fingerprint* identifies a state of the catalogs. An *attempt* is void if the fingerprint changes while it runs; it is
then retried.

Imports `snapshots.records`, `wal.segments`, `fleet` and `storage`.
"""
