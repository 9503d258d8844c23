"""Output: the arguments that commands share, results as text or JSON, progress, errors and exit codes.

Results go to stdout, everything else to stderr. With `--json` stdout is exactly one document, and progress JSON lines.

Imports `check`, `cli.background`, `cli.folders`, `fleet`, `fleet.nodes`, `fleet.tables`, `restore`, `restore.ddl`,
`restore.drill`, `restore.estimates`, `restore.obstacles`, `restore.parts`, `restore.targets`, `snapshots.activity`,
`snapshots.metrics`, `snapshots.operations`, `snapshots.records` and `storage`.
"""
