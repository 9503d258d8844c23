"""Undo: put old databases back after a restore that ended unfinished, and drop what restores have put aside.

Imports `fleet`, `fleet.nodes`, `restore`, `restore.data_only`, `snapshots.operations`, `snapshots.records` and
`storage`.
"""
