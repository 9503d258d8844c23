"""Restores of rows alone: they *fill* tables that exist and are empty, in databases that others use meanwhile.

What such a restore needs of a database, what it keeps in it until it has ended, how it is undone, and the foreign keys
that nothing has checked while rows were loaded.

Imports `fleet`, `fleet.nodes`, `fleet.tables`, `restore.ddl`, `restore.obstacles`, `restore.rows`,
`snapshots.ddl`, `snapshots.records` and `storage`.
"""
