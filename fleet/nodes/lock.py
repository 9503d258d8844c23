"""The lock that lets one operation at a time change a fleet: advisory locks on its primaries.

They are held by the operation's own sessions, so they end with its process, however that ends. What those sessions
are called (application_name) tells whoever is refused whose they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from fleet.config import Node
from fleet.label import read_label
from fleet.nodes.connections import raising_unreachable, shut_down_after
from fleet.nodes.sessions import Sessions, in_parallel
from storage.errors import BusyError, UnreachableError

UNLOCK_SECONDS_MAX = 5.0
# How long a session of ours that the server has not missed yet may take to end.
FORMER_MILLISECONDS_MAX = 5000
LOCKED = """
      FROM pg_locks l
     WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
       AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND (l.classid::bigint << 32 | l.objid::bigint) = %(key)s
"""
HELD_QUERY = f"SELECT EXISTS (SELECT {LOCKED} AND l.pid = pg_backend_pid())"
HOLDER_QUERY = f"""
SELECT a.pid, a.application_name, to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
       coalesce(host(a.client_addr), 'local socket')
  FROM pg_stat_activity a WHERE a.pid IN (SELECT l.pid {LOCKED})
"""


class FleetBusyError(BusyError):
    """Another operation is running on the fleet."""


class FleetLockLostError(UnreachableError):
    """The session that held a node's lock was ended meanwhile, so another operation may have begun."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The session that holds a lock: its process on the server, its name, since when it runs and from where."""

    session: int
    label: str
    since: str
    address: str

    def text(self) -> str:
        """Who holds it, for a message."""
        found = read_label(self.label)
        who = (
            " ".join(word for word in (found.command, found.subject) if word)
            + f" by {found.user}@{found.host} (process {found.process})"
            if found
            else f"session {self.session} of {self.label or 'an unnamed application'}"
        )
        return f"{who}, since {self.since}, from {self.address}"

    def details(self) -> dict[str, object]:
        """The same, field by field."""
        found = read_label(self.label)
        named = {
            "command": found.command if found else None,
            "snapshot": (found.subject or None) if found else None,
            "user": found.user if found else None,
            "host": found.host if found else None,
            "process": found.process if found else None,
        }
        return {**named, "since": self.since, "from": self.address, "session": self.session}


@dataclass(slots=True)
class FleetLock:
    """The lock on every primary, while `sessions` hold it. `retaken` once a lost session's lock was taken again."""

    sessions: Sessions
    key: int
    label: str
    retaken: bool = False
    _taken_by: dict[str, int] = field(default_factory=dict)

    @property
    def granted(self) -> list[str]:
        """The primaries whose lock is held."""
        return sorted(self._taken_by)

    def take(self, node: Node) -> None:
        """Take the lock of one primary by its session; raise FleetBusyError, NodeUnreachableError."""
        connection = self.sessions.connections[node.id]
        with raising_unreachable(node):
            take_lock(node, connection, self.key, self.label, former=self._taken_by.get(node.id))
        self._taken_by[node.id] = connection.info.backend_pid

    def renew(self) -> None:
        """See that every primary is there, and is the one it was; open lost sessions anew and take their lock again.

        Where that is granted, no other operation of this fleet runs now. Raises NodeUnreachableError,
        BaselineChangedError, FleetBusyError, FleetLockLostError.
        """
        in_parallel(self._renew, [node for node in self.sessions.nodes if node.backup_of is None])

    def _renew(self, node: Node) -> None:
        with suppress(psycopg.OperationalError):
            if not _is_held(self.sessions.connections[node.id], self.key):
                raise _lock_lost_error(node, "it is not held any more")
            return
        self.sessions.renew(node)
        self.take(node)
        self.retaken = True

    def check_held(self) -> None:
        """Raise FleetLockLostError unless every primary's session lives and holds its lock."""

        def check(node: Node) -> None:
            try:
                if _is_held(self.sessions.connections[node.id], self.key):
                    return
            except psycopg.OperationalError as error:
                raise _lock_lost_error(node, "the session that held it was ended") from error
            raise _lock_lost_error(node, "it is not held any more")

        in_parallel(check, [node for node in self.sessions.nodes if node.backup_of is None])

    def release(self) -> None:
        """Give back what is held; a session that was lost holds nothing."""
        for node in self.granted:
            connection = self.sessions.connections[node]
            # A lock that can't be given back in time ends with its session.
            with suppress(psycopg.OperationalError), shut_down_after(connection, UNLOCK_SECONDS_MAX):
                connection.execute("SELECT pg_advisory_unlock(%s)", (self.key,))


@contextmanager
def locked_fleet(sessions: Sessions, name: str, label: str = "cutline") -> Iterator[FleetLock]:
    """Hold the fleet for one operation: an advisory lock on every primary, gone with its session.

    The locks are taken in the order of the nodes' ids, so two operations can't each get half. `label` is what the
    holder is called (fleet.label). Raises FleetBusyError naming the node and who holds it.
    """
    lock = FleetLock(sessions, lock_key(name), label)
    try:
        for node in sorted(sessions.nodes, key=lambda found: found.id):
            if node.backup_of is None:
                lock.take(node)
        yield lock
    finally:
        lock.release()


def lock_key(name: str) -> int:
    """The advisory lock's 64-bit number for what is called `name`."""
    return int.from_bytes(hashlib.sha256(f"cutline {name}".encode()).digest()[:8], "big", signed=True)


def take_lock(
    node: Node, connection: psycopg.Connection[Any], key: int, label: str, *, former: int | None = None
) -> None:
    """Take the advisory lock `key` by a session that is called `label` from now on; raise FleetBusyError.

    `former` is the server process of the session that held it for us before: where the server has not noticed yet
    that it is gone, it is ended.
    """
    connection.execute("SELECT set_config('application_name', %s, false)", (label,))
    if _try(connection, key):
        return
    holder = _holder(connection, key)
    if holder and (holder.session, holder.label) == (former, label):
        connection.execute("SELECT pg_terminate_backend(%s, %s)", (former, FORMER_MILLISECONDS_MAX))
        if _try(connection, key):
            return
        holder = _holder(connection, key)
    raise FleetBusyError(
        f"node {node.id}: another operation is running: {holder.text() if holder else 'it has just ended'}",
        hint="wait until it is done; if its process is gone, its session ends by itself within a minute"
        + (f", or at once by: SELECT pg_terminate_backend({holder.session})" if holder else ""),
        details={"node": node.id, **(holder.details() if holder else {})},
    )


def _try(connection: psycopg.Connection[Any], key: int) -> bool:
    (locked,) = connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone() or (False,)
    return bool(locked)


def _is_held(connection: psycopg.Connection[Any], key: int) -> bool:
    (held,) = connection.execute(HELD_QUERY, {"key": key}).fetchone() or (False,)
    return bool(held)


def _holder(connection: psycopg.Connection[Any], key: int) -> Holder | None:
    row = connection.execute(HOLDER_QUERY, {"key": key}).fetchone()
    return Holder(row[0], row[1] or "", row[2] or "an unknown time", row[3]) if row else None


def _lock_lost_error(node: Node, what: str) -> FleetLockLostError:
    return FleetLockLostError(
        f"node {node.id}: the fleet's lock was lost, {what}; another operation may have begun, so nothing is committed",
        hint="see the server's log for what ended the session, then repeat; a pooler must keep sessions whole",
        details={"node": node.id},
    )
