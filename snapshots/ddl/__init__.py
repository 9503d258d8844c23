"""DDL: a database's schema objects, how they are dumped, and how its tables changed between two commits.

A *fingerprint* identifies a state of the catalogs. An *attempt* is invalid if the fingerprint changes while it runs;
it is then retried.

Imports `fleet`, `fleet.nodes`, `fleet.programs`, `fleet.read_only`, `fleet.tables`, `snapshots.records`, `storage`
and `wal.segments`.
"""
