"""Metrics: what Prometheus is told of a fleet, its store and its commands (docs/monitoring.md).

A *metric* has a name and a meaning, a *sample* is one value of it. All are gauges, because the processes that report
them are short: what they count lies within a window of time. What is not known has no sample, rather than the value 0.

Imports `fleet`, `snapshots.activity`, `snapshots.listing`, `snapshots.operations`, `snapshots.records`, `storage` and
`wal.slots`.
"""
