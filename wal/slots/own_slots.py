"""Which replication slots are Cutline's, and where a node is in its WAL: the parts that queries of slots share."""

from __future__ import annotations

from typing import Any

import psycopg

OWN_SLOTS = "slot_name ^@ 'cutline_'"
# Those in the session's database that retain WAL: a slot that the server has invalidated has no restart_lsn.
RETAINING_SLOTS = f"{OWN_SLOTS} AND database = current_database() AND restart_lsn IS NOT NULL"
# Where a primary writes, and a standby replays.
POSITION = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
NAMES_QUERY = f"""
SELECT slot_name FROM pg_replication_slots
 WHERE {OWN_SLOTS} AND datoid = coalesce(%s::oid, (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


def list_own_slots(connection: psycopg.Connection[Any], database: int | None = None) -> list[str]:
    """The names of Cutline's slots in the session's database, or in another one of the server, given by its oid."""
    return [name for (name,) in connection.execute(NAMES_QUERY, (database,))]
