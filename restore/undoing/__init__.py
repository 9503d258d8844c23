"""Undo: put old databases back after a restore that ended unfinished, and drop what restores have put aside.

Imports `fleet`, `fleet.nodes`, `restore`, `restore.data_only`, `restore.targets`, `snapshots.operations`,
`snapshots.records` and `storage`.
"""
