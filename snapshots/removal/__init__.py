"""Removal: deleting snapshots, pruning increments, and collecting garbage, each for good.

A *mark* is stored before the first object goes and stays for ever. So a removal that died is resumed, and a name is
never used again.

Imports `snapshots.operations`, `snapshots.records`, `wal`, `fleet` and `storage`.
"""
