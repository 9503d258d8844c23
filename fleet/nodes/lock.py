"""The fleet lock: advisory locks on all primaries, so that one operation at a time changes a fleet.

The operation's own sessions hold them, so they end with its process, however it ends. The application_name of these
sessions names the operation in the error of every other one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from fleet.config import Fleet, Node
from fleet.label import read_label
from fleet.nodes.connections import raising_unreachable
from fleet.nodes.sessions import Sessions, in_parallel
from fleet.nodes.shut_down import shut_down_after, shut_down_sessions
from storage.errors import BusyError, UnreachableError

UNLOCK_SECONDS_MAX, INTERRUPTED_SECONDS_MAX = 5.0, 2.0
# How long our former session, which the server has not noticed is gone, may take to end.
FORMER_MILLISECONDS_MAX = 5000
# A session that is ending is no longer shown before its locks are released.
ENDING_SECONDS_MAX, RETRY_SECONDS = 1.0, 0.02
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
    """The session that held a node's lock was lost, so another operation may have begun."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The session that holds a lock: its server process, application_name, start time and client address."""

    session: int
    label: str
    since: str
    address: str

    def text(self) -> str:
        """The holder, for a message."""
        label = read_label(self.label)
        who = (
            " ".join(word for word in (label.command, label.subject) if word)
            + f" by {label.user}@{label.host} (process {label.process})"
            if label
            else f"session {self.session} of {self.label or 'an unnamed application'}"
        )
        return f"{who}, since {self.since}, from {self.address}"

    def details(self) -> dict[str, object]:
        """The holder, for `--json`."""
        label = read_label(self.label)
        owner = {
            "command": label.command if label else None,
            "snapshot": (label.subject or None) if label else None,
            "user": label.user if label else None,
            "host": label.host if label else None,
            "process": label.process if label else None,
        }
        return {**owner, "since": self.since, "from": self.address, "session": self.session}


@dataclass(slots=True)
class FleetLock:
    """The lock on every primary, held by `sessions`. `retaken`: a lock was lost with its session and taken again."""

    sessions: Sessions
    key: int
    label: str
    retaken: bool = False
    _taken_by: dict[str, int] = field(default_factory=dict)
    # The nodes on which something is done now.
    _pending: dict[str, Node] = field(default_factory=dict)
    _is_interrupted: bool = False

    @property
    def granted(self) -> list[str]:
        """The primaries whose lock is held."""
        return sorted(self._taken_by)

    def take(self, node: Node) -> None:
        """Take the lock of one primary in its session; raise FleetBusyError, NodeUnreachableError."""
        connection = self.sessions.connections[node.id]
        with raising_unreachable(node):
            take_lock(node, connection, self.key, self.label, former=self._taken_by.get(node.id))
        self._taken_by[node.id] = connection.info.backend_pid

    def renew(self) -> None:
        """Check every primary's lock; replace lost sessions, check that the node is the same, and take its lock again.

        If all locks are granted, no other operation is running on this fleet. Raises NodeUnreachableError,
        BaselineChangedError, FleetBusyError, FleetLockLostError. An interrupt does not wait for a silent node.
        """
        self._on_all(self._renew, self._primaries)

    def _renew(self, node: Node) -> None:
        with suppress(psycopg.OperationalError):
            if not _is_held(self.sessions.connections[node.id], self.key):
                raise _lock_lost_error(node, "its session no longer holds it")
            return
        if self._is_interrupted:
            raise _lock_lost_error(node, "an interrupt has ended its session")
        connection = self.sessions.renew(node)
        if self._is_interrupted:
            # The one who waited for it has released the locks meanwhile.
            connection.close()
            raise _lock_lost_error(node, "an interrupt has ended its session")
        self.take(node)
        self.retaken = True

    def check_held(self) -> None:
        """Raise FleetLockLostError unless every primary's session is alive and holds its lock."""

        def check(node: Node) -> None:
            try:
                if _is_held(self.sessions.connections[node.id], self.key):
                    return
            except psycopg.OperationalError as error:
                raise _lock_lost_error(node, "the session that held it was ended") from error
            raise _lock_lost_error(node, "its session no longer holds it")

        self._on_all(check, self._primaries)

    def release(self) -> None:
        """Release all locks, on all nodes within UNLOCK_SECONDS_MAX; a lost session holds none."""

        def unlock(node: Node) -> None:
            connection = self.sessions.connections[node.id]
            # If the release takes too long, the session is shut down, which ends the lock.
            with suppress(psycopg.OperationalError), shut_down_after(connection, UNLOCK_SECONDS_MAX):
                connection.execute("SELECT pg_advisory_unlock(%s)", (self.key,))

        self._on_all(unlock, [node for node in self._primaries if node.id in self._taken_by])

    @property
    def _primaries(self) -> list[Node]:
        return [node for node in self.sessions.nodes if node.backup_of is None]

    def _on_all(self, work: Callable[[Node], None], nodes: Iterable[Node]) -> None:
        """Do `work` on all nodes at once; an interrupt ends our sessions on those that have not done it."""
        pending = self._pending = {node.id: node for node in nodes}

        def do(node: Node) -> None:
            try:
                work(node)
            finally:
                del pending[node.id]

        in_parallel(do, list(pending.values()), self.interrupt)

    def interrupt(self) -> None:
        """End our sessions on the nodes that are waited for, here or by another thread."""
        self._is_interrupted = True
        ends = time.monotonic() + INTERRUPTED_SECONDS_MAX
        # Repeated: a thread may just have begun to connect.
        while self._pending and time.monotonic() < ends:
            for node in list(self._pending.values()):
                shut_down_sessions(node)
            time.sleep(RETRY_SECONDS)


@contextmanager
def lock_fleet(sessions: Sessions, name: str, label: str = "cutline") -> Iterator[FleetLock]:
    """Hold the fleet lock during the block: an advisory lock on every primary, which ends with its session.

    The locks are taken in the order of node ids, so that two operations can't each get half. `label` becomes the
    sessions' application_name (fleet.label). Raises FleetBusyError naming the node and the holder.
    """
    lock = FleetLock(sessions, lock_key(name), label)
    try:
        for node in sorted(sessions.nodes, key=lambda one: one.id):
            if node.backup_of is None:
                lock.take(node)
        yield lock
    finally:
        lock.release()


def watch_lock(fleet: Fleet) -> str:
    """The name of the lock of the fleet's watch. It is not the fleet's: between its tasks others may do theirs."""
    return f"{fleet.name} watch"


def lock_key(name: str) -> int:
    """The 64-bit advisory lock number for `name`."""
    return int.from_bytes(hashlib.sha256(f"cutline {name}".encode()).digest()[:8], "big", signed=True)


def take_lock(
    node: Node, connection: psycopg.Connection[Any], key: int, label: str, *, former: int | None = None
) -> None:
    """Set the session's application_name to `label` and take the advisory lock `key`; raise FleetBusyError.

    `former` is the server process of our lost session that held the lock: if the server has not noticed that its client
    is gone, it is terminated. A lock that no session holds is tried again up to ENDING_SECONDS_MAX.
    """
    connection.execute("SELECT set_config('application_name', %s, false)", (label,))
    ends = time.monotonic() + ENDING_SECONDS_MAX
    while not _try_lock(connection, key):
        holder = find_holder(connection, key)
        if holder and (holder.session, holder.label) == (former, label):
            connection.execute("SELECT pg_terminate_backend(%s, %s)", (former, FORMER_MILLISECONDS_MAX))
            former, ends = None, time.monotonic() + ENDING_SECONDS_MAX
        elif holder or time.monotonic() >= ends:
            raise _busy_error(node, holder)
        else:
            time.sleep(RETRY_SECONDS)


def _busy_error(node: Node, holder: Holder | None) -> FleetBusyError:
    if holder is None:
        return FleetBusyError(
            f"node {node.id}: the fleet lock is held, but by no session",
            hint="a prepared transaction may hold it: find it with SELECT gid FROM pg_prepared_xacts, and end it; else"
            " repeat the command",
            details={"node": node.id},
        )
    return FleetBusyError(
        f"node {node.id}: another operation is running: {holder.text()}",
        hint="wait until it ends; if its process is gone, its session ends by itself within a minute, or at once with:"
        f" SELECT pg_terminate_backend({holder.session})",
        details={"node": node.id, **holder.details()},
    )


def _try_lock(connection: psycopg.Connection[Any], key: int) -> bool:
    (locked,) = connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone() or (False,)
    return bool(locked)


def _is_held(connection: psycopg.Connection[Any], key: int) -> bool:
    (held,) = connection.execute(HELD_QUERY, {"key": key}).fetchone() or (False,)
    return bool(held)


def find_holder(connection: psycopg.Connection[Any], key: int) -> Holder | None:
    """The session that holds the lock `key` on the connection's server; None if none does."""
    row = connection.execute(HOLDER_QUERY, {"key": key}).fetchone()
    return Holder(row[0], row[1] or "", row[2] or "an unknown time", row[3]) if row else None


def _lock_lost_error(node: Node, what: str) -> FleetLockLostError:
    return FleetLockLostError(
        f"node {node.id}: the fleet lock was lost: {what}; another operation may have begun, so nothing is committed",
        hint="see the server's log for what ended the session, then repeat the command; a connection pooler must keep"
        " sessions",
        details={"node": node.id},
    )
