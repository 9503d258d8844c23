"""Ending what other clients have open on a database: settings of a database reach only sessions that begin after them.

A session reads the settings while it starts. From before that until it is to be seen in pg_stat_activity it holds a
lock on its database (postinit.c, InitPostgres): one that starts meanwhile is found by its lock, and none slips through.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.encodings import readable
from fleet.progress import Progress
from storage.errors import RefusedError

POLL_SECONDS = 0.05
NOTE_SECONDS = 2.0
NAMED_MAX = 5
# Who streams WAL writes nothing; workers of a query end with it; autovacuum changes no row.
OTHERS = f"""
SELECT a.pid, coalesce({readable("a.usename::text")}, ''), coalesce(nullif(a.application_name, ''), a.backend_type, ''),
       coalesce(a.state, ''), coalesce(host(a.client_addr), 'local socket'), coalesce(r.rolsuper, true)
  FROM pg_stat_activity a LEFT JOIN pg_roles r ON r.oid = a.usesysid
 WHERE a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND a.pid <> pg_backend_pid()
   AND a.backend_type NOT IN ('walsender', 'autovacuum worker', 'parallel worker')
   AND a.backend_start BETWEEN %(since)s AND %(until)s
   AND NOT (%(spared)s AND (a.application_name = 'cutline' OR a.application_name LIKE 'cutline %%'))
"""
STARTING = """
SELECT l.pid FROM pg_locks l
 WHERE l.locktype = 'object' AND l.classid = 'pg_database'::regclass AND l.mode = 'RowExclusiveLock'
   AND l.objid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.pid <> pg_backend_pid()
"""


class SessionsLeftError(RefusedError):
    """Sessions of other clients did not end, or our role may not end them."""


@dataclass(frozen=True, slots=True)
class OtherSession:
    """Another client's session on the database."""

    node: str
    pid: int
    user: str
    application: str
    state: str
    address: str
    is_superuser: bool

    def text(self) -> str:
        """The session, for a message."""
        who = f"process {self.pid} ({self.application}, {self.state or 'no client'})"
        return f"node {self.node}: {who} of {self.user or 'no user'} from {self.address}"

    def details(self) -> dict[str, object]:
        """The same, field by field."""
        return {"node": self.node, "pid": self.pid, "user": self.user, "application": self.application}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which sessions: when they began, by the server's clock (None leaves that end open).

    Without our own, which set what they need themselves, if `spares_ours`.
    """

    since: datetime | None = None
    until: datetime | None = None
    spares_ours: bool = False

    def values(self) -> dict[str, object]:
        """As OTHERS takes them."""
        return {"since": self.since or "-infinity", "until": self.until or "infinity", "spared": self.spares_ours}


def other_sessions(node: str, connection: psycopg.Connection[Any], chosen: Chosen) -> list[OtherSession]:
    """The other sessions on the connection's database that are chosen."""
    return [OtherSession(node, *row) for row in connection.execute(OTHERS, chosen.values())]


def server_time(connection: psycopg.Connection[Any]) -> datetime:
    """The server's clock."""
    (now,) = connection.execute("SELECT clock_timestamp()").fetchone() or (None,)
    if not isinstance(now, datetime):
        raise TypeError("the server has no time")
    return now


def end_sessions(
    node: Node, connection: psycopg.Connection[Any], since: datetime | None, seconds_max: float, progress: Progress
) -> tuple[int, list[OtherSession]]:
    """End every other session that may not know what was just committed.

    With `since` only those that began after it, and no command of ours: those need not know.
    Returns how many were ended, and those that are left after `seconds_max` or may not be ended by our role.
    """
    chosen = Chosen(since, server_time(connection), spares_ours=since is not None)
    starting = _starting(connection)
    seen: set[int] = set()
    forbidden: set[int] = set()
    start, is_told = time.monotonic(), False
    while True:
        # The locks first: a session that starts is to be seen before it gives its lock back.
        starting &= _starting(connection)
        left = other_sessions(node.id, connection, chosen)
        for one in left:
            seen.add(one.pid)
            if one.pid not in forbidden and not _terminate(connection, one.pid):
                forbidden.add(one.pid)
        waited = time.monotonic() - start
        is_over = not starting and all(one.pid in forbidden for one in left)
        if is_over or waited > seconds_max:
            return len(seen - {one.pid for one in left}), left
        if waited > NOTE_SECONDS and not is_told and left:
            is_told = True
            progress.note(f"sessions have not ended yet: {sessions_text(left)}")
        time.sleep(POLL_SECONDS)


def _starting(connection: psycopg.Connection[Any]) -> set[int]:
    return {pid for (pid,) in connection.execute(STARTING)}


def _terminate(connection: psycopg.Connection[Any], pid: int) -> bool:
    """Ask a session to end; False if our role may not."""
    try:
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def sessions_text(found: list[OtherSession]) -> str:
    """The first few of them, for a message."""
    more = [f"and {len(found) - NAMED_MAX} more"] if len(found) > NAMED_MAX else []
    return "; ".join([*(one.text() for one in found[:NAMED_MAX]), *more])
