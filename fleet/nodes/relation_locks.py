"""Waiting for the lock of a table, view or sequence: it is bounded, and whoever holds it is named.

What only reads a relation waits for one who has it for himself alone (ALTER TABLE, TRUNCATE, VACUUM FULL, REFRESH
MATERIALIZED VIEW and the like, also of a prepared transaction), and for one who himself still waits for that
(PostgreSQL manual, "Explicit Locking").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import connect
from fleet.nodes.encodings import readable
from storage.errors import RefusedError

LOCK_SECONDS_MAX = 60.0
POLL_SECONDS = 1.0
# A standby holds by its startup process what a transaction of its primary has locked.
HOLDERS_QUERY = f"""
SELECT DISTINCT format('%%s (%%s)', l.relation::regclass, CASE
         WHEN l.pid IS NULL THEN 'a prepared transaction'
         WHEN a.backend_type = 'startup' THEN 'a transaction of its primary'
         ELSE concat('session ', l.pid, ' of ' || {readable("a.usename::text")},
                     CASE WHEN NOT l.granted THEN ', which waits itself' END)
       END)
  FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.mode = ANY (%s)
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (%s::text[] IS NULL OR l.relation = ANY (%s::text[]::regclass[]))
 ORDER BY 1
"""
# What keeps whoever reads from it, and what keeps whoever puts a table into a publication.
READING = ("AccessExclusiveLock",)
PUBLISHING = ("ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
AWAITED_QUERY = """
SELECT DISTINCT l.relation::regclass::text
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND NOT l.granted AND a.application_name = %s
   AND l.waitstart < clock_timestamp() - make_interval(secs => %s)
"""


class RelationLockedError(RefusedError):
    """A table, view or sequence is kept locked by somebody else."""


def bound_lock_waits(connection: psycopg.Connection[Any], seconds: float | None = None) -> None:
    """Let statements of the transaction wait no longer for a lock: they end with LockNotAvailable."""
    connection.execute(f"SET LOCAL lock_timeout = {int((seconds or LOCK_SECONDS_MAX) * 1000)}")


def locked_error(
    node: Node,
    what: str,
    relations: Iterable[str] | None,
    seconds: float | None = None,
    *,
    modes: Iterable[str] = READING,
) -> RelationLockedError:
    """The error for a wait that `what` gave up: who holds a relation, named as SQL writes it, in one of the modes.

    With None for the `relations`, of all that there are.
    """
    names = None if relations is None else list(relations)
    with connect(node) as connection:
        holders = [row[0] for row in connection.execute(HOLDERS_QUERY, (list(modes), names, names))]
    return RelationLockedError(
        f"node {node.id}: {what} waited {seconds or LOCK_SECONDS_MAX:.0f} s for a lock;"
        f" locked now: {', '.join(holders) or 'nothing any more'}",
        hint="end that transaction, or repeat the command once it is over",
        details={"node": node.id, "holders": holders},
    )


@contextmanager
def raising_locked(
    node: Node, what: str, relations: Iterable[str], *, modes: Iterable[str] = READING
) -> Iterator[None]:
    """Raise RelationLockedError where a bounded wait for one of the `relations` ends: of `what`, the block."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise locked_error(node, what, relations, modes=modes) from error


class LockWatch:
    """Looks whether a program's session waits too long for a lock: pg_dump forbids it to be bounded there.

    `found` are the relations that it waited for when it was ended.
    """

    def __init__(self, connection: psycopg.Connection[Any], application: str) -> None:
        self.found: list[str] = []
        self._connection, self._application = connection, application

    @contextmanager
    def ending(self, act: Callable[[], object]) -> Iterator[None]:
        """While the block runs, call `act` once the session has waited for LOCK_SECONDS_MAX."""
        done = threading.Event()
        # A session that is lost asks no more: that ends the program too.
        thread = threading.Thread(target=self._poll, args=(act, done), name="watch locks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _poll(self, act: Callable[[], object], done: threading.Event) -> None:
        try:
            while not done.wait(min(POLL_SECONDS, LOCK_SECONDS_MAX / 4)):
                rows = self._connection.execute(AWAITED_QUERY, (self._application, LOCK_SECONDS_MAX)).fetchall()
                if rows:
                    self.found = [row[0] for row in rows]
                    act()
                    return
        except psycopg.Error:
            return
