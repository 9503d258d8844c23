"""Demo: the whole story on an embedded fleet, and an embedded fleet to try the commands on.

Imports `cli.folders`, `check`, `cli.output`, `cli.spark`, `embedded`, `fleet`, `fleet.programs`, `restore`,
`snapshots.create`, `snapshots.records`, `storage` and `wal.segments`.
"""
