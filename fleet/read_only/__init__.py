"""Read only: databases that accept no writes after a terminal snapshot, and how they accept writes again.

What undoes the change is kept on the node itself, written in the transaction that makes the change.

Imports `fleet`, `fleet.nodes`, `fleet.tables` and `storage`.
"""
