"""Prevent other sessions from altering the tables being filled, and wait for concurrent writers.

The lock blocks DDL but not reads or writes. However, if a session is waiting to alter a table, everyone else waits
behind it, even the load. Transactions that wrote to the tables, or to tables connected by foreign keys, may end after
the rows are loaded, and their changes become visible only then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.progress import Progress
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.connections import connect
from cutline.nodes.groups import Group, qualify
from cutline.restore.rows.filled_tables import TablesUnfitError, oids_of
from cutline.restore.rows.jobs import find_roots
from cutline.restore.rows.load import TablesInUseError
from cutline.restore.rows.references import LOCK_SECONDS_MAX, find_connected
from cutline.storage.errors import SnapshotError

WRITERS_SECONDS_MAX = 60
# Give waiting sessions this much time, because they may give up on their own, such as a migration with a lock_timeout.
WAITING_SECONDS_MAX = 10
LOCKED_AT_ONCE = 100
POLL_SECONDS = 0.2
LOOK_SECONDS, STOP_SECONDS_MAX = 1.0, 2.0
# The transactions that have written to the tables; prepared transactions have no session.
WRITERS_QUERY = """
SELECT DISTINCT virtualtransaction, coalesce(pid, 0) FROM pg_locks
 WHERE locktype = 'relation' AND relation = ANY (%s) AND granted AND pid IS DISTINCT FROM pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
# The sessions that wait for this session and make writers wait.
WAITING_QUERY = """
SELECT DISTINCT pid FROM pg_locks
 WHERE locktype = 'relation' AND NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))
   AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
# Other sessions that block our loading sessions, for example because they inserted the same key.
BLOCKING_QUERY = """
WITH ours AS (
    SELECT pid, wait_event_type FROM pg_stat_activity
     WHERE datname = current_database() AND usename = current_user AND starts_with(application_name, 'cutline'))
SELECT DISTINCT blocker FROM ours CROSS JOIN LATERAL unnest(pg_blocking_pids(pid)) AS blocker
 WHERE wait_event_type = 'Lock' AND blocker NOT IN (SELECT pid FROM ours)
"""
# Cancelling a Spark task doesn't end the server's work for it.
END_WAITING_QUERY = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND usename = current_user AND starts_with(application_name, 'cutline')
   AND starts_with(query, 'COPY ') AND wait_event_type = 'Lock'
"""
ALTERING = "waited to alter them, and everyone else waited behind"
BLOCKING = f"blocked the load for {LOCK_SECONDS_MAX} s with open transactions"
WAITS = ((WAITING_QUERY, ALTERING), (BLOCKING_QUERY, BLOCKING))
SECONDS_MAX = {ALTERING: WAITING_SECONDS_MAX, BLOCKING: LOCK_SECONDS_MAX}


def hold_tables(node: Node, connection: psycopg.Connection[Any], groups: Sequence[Group]) -> None:
    """Begin a transaction that keeps others from altering the tables and the roots through which they are loaded.

    Raises TablesInUseError, TablesUnfitError.
    """
    names = [*map(qualify, groups), *sorted(set(find_roots(connection, groups).values()))]
    connection.execute("BEGIN")
    connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'")
    try:
        # Lock in batches, because a statement with thousands of names would be too long.
        for start in range(0, len(names), LOCKED_AT_ONCE):
            some = ", ONLY ".join(names[start : start + LOCKED_AT_ONCE])
            connection.execute(f"LOCK TABLE ONLY {some} IN SHARE UPDATE EXCLUSIVE MODE".encode())
    except psycopg.errors.DeadlockDetected as error:
        raise in_use(node, connection.info.dbname, "other sessions are locking them in a different order") from error
    except psycopg.errors.LockNotAvailable as error:
        why = f"other sessions are altering them, or have held locks on them for {LOCK_SECONDS_MAX} s"
        raise in_use(node, connection.info.dbname, why) from error
    except psycopg.errors.OutOfMemory as error:
        raise TablesUnfitError(
            f"node {node.id}: the server's lock table is too small for locks on {len(names)} tables",
            hint="raise max_locks_per_transaction, or restore fewer tables at once with --group PATTERN",
            details={"node": node.id},
        ) from error


class _Waiting(NamedTuple):
    """A session that blocks the restore, and why."""

    node: str
    pid: int
    why: str


@contextmanager
def refusing_waiting(held: Sequence[tuple[Node, psycopg.Connection[Any]]], end: Callable[[], object]) -> Iterator[None]:
    """Run the block; call `end` and raise TablesInUseError if a session waits too long for locks that `held` holds.

    The same applies if other sessions block the load for too long.
    """
    errors: list[TablesInUseError] = []
    over = threading.Event()

    def look() -> None:
        since: dict[_Waiting, float] = {}
        while not over.wait(LOOK_SECONDS):
            now, waiting = monotonic(), set[_Waiting]()
            for node, connection in held:
                # If the session is lost, the caller will notice.
                with suppress(psycopg.Error):
                    # Within a transaction, pg_stat_activity is a snapshot from its first use.
                    connection.execute("SELECT pg_stat_clear_snapshot()")
                    for query, why in WAITS:
                        waiting |= {_Waiting(node.id, pid, why) for (pid,) in connection.execute(query)}
            since = {waiting_session: since.get(waiting_session, now) for waiting_session in waiting}
            late = [
                waiting_session
                for waiting_session, begun in since.items()
                if now - begun > SECONDS_MAX[waiting_session.why]
            ]
            for node, connection in held:
                for _, why in WAITS:
                    pids = [
                        waiting_session.pid
                        for waiting_session in late
                        if (waiting_session.node, waiting_session.why) == (node.id, why)
                    ]
                    if pids and not errors:
                        errors.append(in_use(node, connection.info.dbname, f"{_sessions(pids)} {why}"))
            if errors:
                end()
                _end_waiting(node for node, _ in held)

    thread = threading.Thread(target=look, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if errors:
            raise errors[0] from error
        raise
    finally:
        over.set()
        # Limit the wait, because the node may not answer.
        thread.join(STOP_SECONDS_MAX)


def _end_waiting(nodes: Iterable[Node]) -> None:
    for node in nodes:
        with suppress(psycopg.Error, SnapshotError), connect(node) as connection:
            connection.execute(END_WAITING_QUERY)


def await_writers(node: Node, connection: psycopg.Connection[Any], groups: Iterable[Group], progress: Progress) -> None:
    """Wait for the transactions that are now writing to the tables to end; raise TablesInUseError on timeout."""
    notes = WaitNotes(f"node {node.id}: the restore", progress)
    oids = find_connected(connection, oids_of(connection, groups))
    writers = set(connection.execute(WRITERS_QUERY, (oids,)).fetchall())
    deadline = monotonic() + WRITERS_SECONDS_MAX
    while writers := writers & set(connection.execute(WRITERS_QUERY, (oids,)).fetchall()):
        if monotonic() > deadline:
            raise in_use(node, connection.info.dbname, f"{_transactions(writers)} wrote to them")
        text = f"up to {WRITERS_SECONDS_MAX} s for {_transactions(writers)}, which wrote to its tables"
        notes.report(frozenset(writers), text)
        sleep(POLL_SECONDS)


def _transactions(writers: Iterable[tuple[Any, int]]) -> str:
    """Name open transactions by their sessions, the second of each pair; a prepared transaction has session 0."""
    if sessions := [pid for _, pid in writers if pid]:
        return f"open transactions of {_sessions(sessions)}"
    return "prepared transactions (see pg_prepared_xacts)"


def _sessions(pids: Collection[int]) -> str:
    return f"session{'s' if len(pids) > 1 else ''} {', '.join(map(str, sorted(pids)))}"


def in_use(node: Node, database: str, why: str) -> TablesInUseError:
    """Return the error for tables that other sessions use, with the reason."""
    return TablesInUseError(
        f"node {node.id}: tables of database {database} are in use: {why}",
        hint="end the sessions that use them (see pg_locks), then repeat the command",
        details={"node": node.id, "database": database},
    )
