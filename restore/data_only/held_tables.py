"""Keep others from altering the tables that are filled, and wait for those who write to them.

The lock forbids DDL, and neither reading nor writing. Transactions that have written to the tables, or to those at the
other end of their foreign keys, may end after the rows are loaded: what they have done is seen only then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psycopg

from fleet.config import Node
from fleet.tables.groups import Group, qualify
from restore.data_only.filled_tables import oids_of
from restore.data_only.filling import LOCK_SECONDS_MAX, TablesInUseError
from restore.data_only.references import find_connected

LOCKED_AT_ONCE = 100
POLL_SECONDS = 0.2
# The transactions that have written to the tables; the prepared ones have no session.
WRITERS_QUERY = """
SELECT DISTINCT virtualtransaction, coalesce(pid, 0) FROM pg_locks
 WHERE locktype = 'relation' AND relation = ANY (%s) AND granted AND pid IS DISTINCT FROM pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""


def hold_tables(node: Node, connection: psycopg.Connection[Any], groups: Iterable[Group]) -> None:
    """Begin a transaction of the session that lets nobody alter the tables; raise TablesInUseError."""
    names = [f"ONLY {qualify(group)}" for group in groups]
    connection.execute("BEGIN")
    connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'")
    try:
        for start in range(0, len(names), LOCKED_AT_ONCE):
            some = ", ".join(names[start : start + LOCKED_AT_ONCE])
            connection.execute(f"LOCK TABLE {some} IN SHARE UPDATE EXCLUSIVE MODE".encode())
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        raise _in_use(
            node, connection, f"others alter them, or have had them locked for {LOCK_SECONDS_MAX} s"
        ) from error


def await_writers(node: Node, connection: psycopg.Connection[Any], groups: Iterable[Group]) -> None:
    """Wait until the transactions have ended that write to the tables now; raise TablesInUseError."""
    oids = find_connected(connection, oids_of(connection, groups))
    writers = set(connection.execute(WRITERS_QUERY, (oids,)).fetchall())
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while writers := writers & set(connection.execute(WRITERS_QUERY, (oids,)).fetchall()):
        if time.monotonic() > deadline:
            pids = sorted(pid for _, pid in writers if pid)
            who = f"sessions {', '.join(map(str, pids))}" if pids else "prepared transactions (see pg_prepared_xacts)"
            raise _in_use(node, connection, f"{who} have written to them, and are not at an end")
        time.sleep(POLL_SECONDS)


def _in_use(node: Node, connection: psycopg.Connection[Any], why: str) -> TablesInUseError:
    database = connection.info.dbname
    return TablesInUseError(
        f"node {node.id}: tables of database {database} are in use: {why}",
        hint="end the sessions that use them (see pg_locks), then repeat the command",
        details={"node": node.id, "database": database},
    )
