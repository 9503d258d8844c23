"""Routing: which target each row of a restore goes to, where the targets are not those of the snapshot.

A *route* says by what the rows of some tables are divided among the targets, as `--route` gives it. A *table route* is
that of one table, resolved against its definition. Targets are numbered from 0, in the order of the target's file.

Imports `columns`, `fleet`, `fleet.tables` and `storage`.
"""
