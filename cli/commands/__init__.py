"""Commands: one module per subcommand. Each reads its options, calls one function below `cli`, and renders its report.

Imports `check`, `cli.background`, `cli.monitoring`, `cli.output`, `cli.report`, `cli.spark`, `cli.views`,
`cli.watch`, `fleet`, `fleet.nodes`, `fleet.read_only`, `fleet.tables`, `restore`, `restore.ddl`, `restore.drill`,
`restore.parts`, `restore.targets`, `restore.undoing`, `snapshots.activity`, `snapshots.create`,
`snapshots.executors`, `snapshots.globals`, `snapshots.listing`, `snapshots.operations`, `snapshots.records`,
`snapshots.removal`, `snapshots.restore_point`, `storage` and `storage.encryption`.
"""
