"""Programs: find and run PostgreSQL's programs from the wheel (pg_dump, pg_restore, the server).

Imports `fleet`, `fleet.nodes` and `storage`.
"""
