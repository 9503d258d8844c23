"""Operations: one run of a command that changes something, from its intent to its outcome.

An operation stores an *intent* before it changes anything, and an *outcome* at the end. An operation without an outcome
is *open*. The next operation that holds the fleet's lock *settles* it, and *decides* for good whether it has committed.
A *lease* protects a snapshot from deletion while a restore reads it. A *sign of life* says how far an operation is. An
*object list* holds what a commit of a large copy does not list itself.

Imports `fleet`, `fleet.nodes`, `fleet.read_only`, `snapshots.records`, `storage`, `wal.segments` and `wal.slots`.
"""
