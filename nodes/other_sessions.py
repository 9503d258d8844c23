"""End other clients' sessions on a database: a changed database setting applies only to new sessions.

A session reads the settings while it starts. It locks its database before that, and releases the lock only after
pg_stat_activity shows the session (postinit.c, InitPostgres). So sessions that are starting are found by their locks,
and no session is missed.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import psycopg
from msgspec import Struct

from cutline.fleet.config import Node
from cutline.fleet.messages import join_some
from cutline.fleet.progress import News, Progress
from cutline.fleet.wait_notes import NOTE_SECONDS
from cutline.nodes.encodings import readable
from cutline.storage.errors import RefusedError

POLL_SECONDS = 0.05
NAMED_MAX = 5
# Excluded: WAL senders write nothing, parallel workers end with their query, and autovacuum changes no rows.
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
    """Sessions of other clients are still open, or our role may not end them."""


class OtherSession(Struct, frozen=True):
    """Another client's session on the database."""

    node: str
    pid: int
    user: str
    application: str
    state: str
    address: str
    is_superuser: bool

    @property
    def process(self) -> str:
        """Describe the session, for a message that also names the node."""
        what = f"process {self.pid} ({self.application}, {self.state or 'no client'})"
        return f"{what} of {self.user or 'no user'} from {self.address}"

    def text(self) -> str:
        """Describe the session and its node, for a message."""
        return f"node {self.node}: {self.process}"

    def details(self) -> dict[str, object]:
        """Return the session's fields, for `--json`."""
        return {"node": self.node, "pid": self.pid, "user": self.user, "application": self.application}


class SessionFilter(Struct, frozen=True):
    """Selects sessions that started between `since` and `until` by the server's clock; None means no limit.

    `spares_ours` leaves out Cutline's own sessions, which set everything that they need themselves.
    """

    since: datetime | None = None
    until: datetime | None = None
    spares_ours: bool = False

    def parameters(self) -> dict[str, object]:
        """Return the parameters for the OTHERS query."""
        return {"since": self.since or "-infinity", "until": self.until or "infinity", "spared": self.spares_ours}


def other_sessions(node: str, connection: psycopg.Connection[Any], chosen: SessionFilter) -> list[OtherSession]:
    """Find the other sessions on the connection's database that the filter selects."""
    return [OtherSession(node, *row) for row in connection.execute(OTHERS, chosen.parameters())]


def server_time(connection: psycopg.Connection[Any]) -> datetime:
    """Read the server's clock."""
    (now,) = connection.execute("SELECT clock_timestamp()").fetchone() or (None,)
    if not isinstance(now, datetime):
        raise TypeError("the server returned no time")
    return now


def end_sessions(
    node: Node, connection: psycopg.Connection[Any], since: datetime | None, seconds_max: float, progress: Progress
) -> tuple[int, list[OtherSession]]:
    """End every other session that may have started before the new setting was committed.

    With `since`, end only sessions that started after it, but not Cutline's own, which don't depend on the setting.
    Sessions that our role may not end may end by themselves. Returns how many sessions ended, and those that remain
    after `seconds_max`.
    """
    chosen = SessionFilter(since, server_time(connection), spares_ours=since is not None)
    starting = _starting_pids(connection)
    seen: set[int] = set()
    forbidden: set[int] = set()
    began, is_noted = time.monotonic(), False
    while True:
        # Read the locks first: a starting session is visible before it releases its lock.
        starting &= _starting_pids(connection)
        left = other_sessions(node.id, connection, chosen)
        for session in left:
            seen.add(session.pid)
            if session.pid not in forbidden and not _terminate(connection, session.pid):
                forbidden.add(session.pid)
        waited = time.monotonic() - began
        if not (starting or left) or waited > seconds_max:
            return len(seen - {session.pid for session in left}), left
        if waited > NOTE_SECONDS and not is_noted and left:
            is_noted = True
            progress.note(News(f"these sessions are still open: {sessions_text(left)}"))
        time.sleep(POLL_SECONDS)


def _starting_pids(connection: psycopg.Connection[Any]) -> set[int]:
    return {pid for (pid,) in connection.execute(STARTING)}


def _terminate(connection: psycopg.Connection[Any], pid: int) -> bool:
    try:
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def sessions_text(sessions: list[OtherSession], *, names_node: bool = True) -> str:
    """Describe the first NAMED_MAX sessions, for a message; without `names_node` the message names their node."""
    return join_some((session.text() if names_node else session.process for session in sessions), NAMED_MAX)
