"""Bounded waits for a lock on a table, view or sequence; the error names the lock's holders.

A reader of a relation waits for sessions and prepared transactions that hold ACCESS EXCLUSIVE (ALTER TABLE, TRUNCATE,
VACUUM FULL, REFRESH MATERIALIZED VIEW and so on). A reader also waits behind sessions that are waiting for that lock
themselves (PostgreSQL manual, "Explicit Locking").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.messages import list_some
from cutline.nodes.connections import connect
from cutline.nodes.encodings import readable
from cutline.nodes.synchronous_standbys import AWAITS_STANDBYS, END_STANDBYS_WAIT, SYNC_REP
from cutline.storage.errors import RefusedError

LOCK_SECONDS_MAX = 60.0
HOLDERS_NAMED_MAX = 5
POLL_SECONDS = 1.0
# On a standby the startup process holds the locks of the primary's transactions.
HOLDERS_QUERY = f"""
SELECT DISTINCT format('%%s (%%s)', l.relation::regclass, CASE
         WHEN l.pid IS NULL THEN coalesce('prepared transaction ' || (
              SELECT quote_literal({readable("p.gid")}) FROM pg_prepared_xacts p
                JOIN pg_locks own ON own.locktype = 'transactionid' AND own.transactionid = p.transaction
               WHERE own.pid IS NULL AND own.virtualtransaction = l.virtualtransaction), 'a prepared transaction')
         WHEN a.backend_type = 'startup' THEN 'a transaction of its primary'
         ELSE concat('session ', l.pid, ' of ' || {readable("a.usename::text")},
                     CASE WHEN NOT l.granted THEN ', which is waiting itself'
                          WHEN a.wait_event = '{SYNC_REP}' THEN ', {AWAITS_STANDBYS}' END)
       END)
  FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.mode = ANY (%s)
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   -- A relation may have been dropped or renamed since.
   AND (%s::text[] IS NULL OR l.relation IN (SELECT to_regclass(name) FROM unnest(%s::text[]) AS of (name)))
 ORDER BY 1
"""
# The lock modes that block reading a table, and the modes that block adding it to a publication.
READING = ("AccessExclusiveLock",)
PUBLISHING = ("ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
# pg_dump holds a lock on every table: they are listed only if its session waits for one.
AWAITED_QUERY = """
SELECT DISTINCT awaited.relation::regclass::text
  FROM pg_stat_activity a CROSS JOIN LATERAL (
       SELECT l.relation FROM pg_locks l
        WHERE l.pid = a.pid AND l.locktype = 'relation' AND NOT l.granted
          AND l.waitstart < clock_timestamp() - make_interval(secs => %s)
       OFFSET 0) AS awaited
 WHERE a.application_name = %s AND a.wait_event_type = 'Lock'
"""


class RelationLockedError(RefusedError):
    """Another session or a prepared transaction kept a table, view or sequence locked."""


def bound_lock_waits(connection: psycopg.Connection[Any], seconds: float | None = None) -> None:
    """Limit how long the transaction's statements wait for a lock: LOCK_SECONDS_MAX by default.

    A statement that waits longer raises LockNotAvailable.
    """
    limit = LOCK_SECONDS_MAX if seconds is None else seconds
    # A limit of 0 would mean no limit.
    connection.execute(f"SET LOCAL lock_timeout = {max(int(limit * 1000), 1)}")


def locked_error(
    node: Node,
    what: str,
    relations: Iterable[str] | None,
    seconds: float | None = None,
    *,
    modes: Iterable[str] = READING,
) -> RelationLockedError:
    """Return the error for a lock wait by `what` that timed out, naming who now holds `relations` in `modes`.

    `relations` are names quoted for SQL; None means all relations in the database.
    """
    names = None if relations is None else list(relations)
    with connect(node) as connection:
        holders = [row[0] for row in connection.execute(HOLDERS_QUERY, (list(modes), names, names))]
    hint = (
        "wait until the transaction that holds the lock ends, or end it (a prepared one with COMMIT PREPARED if another"
        " node has committed its part, otherwise with ROLLBACK PREPARED); then repeat the command"
    )
    if any(AWAITS_STANDBYS in holder for holder in holders):
        hint = f"for sessions that wait for synchronous standbys: {END_STANDBYS_WAIT}; for others: {hint}"
    return RelationLockedError(
        f"node {node.id}: {what} waited {LOCK_SECONDS_MAX if seconds is None else seconds:.0f} s for a lock; "
        + (f"held now: {list_some(holders, HOLDERS_NAMED_MAX)}" if holders else "the lock has since been released"),
        hint=hint,
        details={"node": node.id, "holders": holders},
    )


@contextmanager
def raising_locked(
    node: Node, what: str, relations: Iterable[str], *, modes: Iterable[str] = READING
) -> Iterator[None]:
    """Raise RelationLockedError if the block, described by `what`, times out waiting for a lock on a relation."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise locked_error(node, what, relations, modes=modes) from error


class LockWatch:
    """Detects when a program's session waits too long for a lock; pg_dump disables lock_timeout in its session.

    `found` are the relations that the session was waiting for when the program was ended.
    """

    def __init__(self, connection: psycopg.Connection[Any], application: str) -> None:
        self.found: list[str] = []
        self._connection, self._application = connection, application

    @contextmanager
    def ending(self, act: Callable[[], object]) -> Iterator[None]:
        """While the block runs, call `act` when the session has waited for LOCK_SECONDS_MAX."""
        done = threading.Event()
        # The thread ends if its session is lost, because the program's session is then lost as well.
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
                # Within a transaction, pg_stat_activity is a snapshot from its first use.
                self._connection.execute("SELECT pg_stat_clear_snapshot()")
                rows = self._connection.execute(AWAITED_QUERY, (LOCK_SECONDS_MAX, self._application)).fetchall()
                if rows:
                    self.found = [row[0] for row in rows]
                    act()
                    return
        except psycopg.Error:
            return
