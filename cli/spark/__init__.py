"""Spark: the only place that builds a Spark session, with the JVM and the settings that it needs.

Imports `check`, `cli.folders`, `columns`, `fleet`, `restore.rows`, `snapshots.base_copy`, `snapshots.executors`,
`storage` and `wal.drain`.
"""
