"""DDL at a restore: the statements of a shard, however they are stored, run in sections on the target.

A snapshot has an archive of pg_dump, or the scripts that earlier versions stored. A role that is not a superuser runs
them in a form that is adapted to it. A section is what runs before the rows, after them, or at the end.

Imports `fleet`, `fleet.nodes`, `fleet.programs`, `fleet.tables`, `restore.parts`, `snapshots.ddl`,
`snapshots.records`, `storage` and `wal.segments`.
"""
