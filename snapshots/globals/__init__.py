"""What is read by SQL once per create, when its commit is built, and stored beside the DDL.

Globals are what a server has besides its databases, stored if they have changed. Rows of extensions' tables are stored
with every commit.

Imports `fleet`, `fleet.nodes`, `fleet.tables`, `snapshots.operations`, `snapshots.records`, `storage` and
`wal.segments`.
"""
