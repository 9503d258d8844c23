"""Monitoring: the metrics that a command leaves behind when it has ended.

Imports `cli.folders`, `cli.output`, `fleet`, `snapshots.metrics`, `snapshots.operations` and `storage`.
"""
