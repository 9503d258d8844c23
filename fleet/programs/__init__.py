"""Programs: PostgreSQL's own programs from the wheel (pg_dump, pg_restore, the server), and running them.

Imports `fleet.nodes` and `storage`.
"""
