"""Read-only databases: after a terminal snapshot the fleet accepts no writes, until `resume`.

The node itself stores how to undo the change, written in the same transaction.

Imports `fleet`, `fleet.nodes`, `fleet.tables` and `storage`.
"""
