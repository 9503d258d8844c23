"""Monitoring: the metrics that a command leaves behind when it has ended, and how far the nodes are.

Imports `cli.folders`, `cli.output`, `fleet`, `fleet.nodes`, `snapshots.metrics`, `snapshots.operations`, `storage`
and `wal.slots`.
"""
