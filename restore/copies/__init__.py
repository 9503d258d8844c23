"""Copies: which objects of a chain are missing or altered, and from which node's copy the rows of a table are taken.

A table's rows come from one copy as a whole, its base objects and its whole archive: so they are the rows of the cut,
whichever copy it is.

Imports `fleet`, `fleet.tables`, `snapshots.operations`, `snapshots.records`, `snapshots.tasks`, `storage` and
`wal.segments`.
"""
