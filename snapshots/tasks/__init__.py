"""Tasks: one function over a list of plain values, as a Spark job or in threads of this process.

A *lane* is a Spark task, which may run many tasks in turn. A *share* is what a task counts for on its node.

Imports `columns`, `fleet`, `fleet.nodes`, `snapshots.executors`, `snapshots.operations` and `storage`.
"""
