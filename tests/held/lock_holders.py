"""Find the sessions that hold a node's lock, and end one."""

from __future__ import annotations

from typing import Any

import psycopg

from cutline.fleet.config import Fleet
from tests.integration.refusing import execute

# The sessions that hold an advisory lock in this database.
HOLDERS_QUERY = """
SELECT a.pid, to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), host(a.client_addr)
  FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()
"""


def read_lock_holders(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(HOLDERS_QUERY).fetchall()


def end_holder(fleet: Fleet, node: str) -> None:
    """End the session that holds a node's lock, as an administrator would."""
    dsn = fleet.node(node).dsn
    ((session, *_),) = read_lock_holders(dsn)
    execute(dsn, f"SELECT pg_terminate_backend({session}, 5000)")
    assert read_lock_holders(dsn) == []
