"""The fleet lock: advisory locks on all primaries, so that only one operation at a time changes a fleet.

The operation's own sessions hold the locks, so the locks are released when its process ends, no matter how. The
application_name of these sessions names the operation in the errors of all other operations.

Every role that may connect may take advisory locks, and sees those of other roles. So each operation registers with a
number that nobody can predict, in a class of numbers derived from the lock's name, and then reads all registrations. An
operation holds the lock if there is no other registration. Registrations of roles that can't run any Cutline command
are ignored. If two operations register at the same time, at least one sees the other; if both do, the lower number
wins.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from msgspec import Struct, field

from cutline.fleet.config import Fleet, Node
from cutline.fleet.own_process import read_label
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.open_sessions import shut_down_after, shut_down_sessions
from cutline.nodes.roles import ServerState, in_current_roles, read_server
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.nodes.watch import NodesQuery
from cutline.storage.errors import BusyError, UnreachableError

UNLOCK_SECONDS_MAX, INTERRUPTED_SECONDS_MAX = 5.0, 2.0
# How long the server may take to end our lost session, which it still considers alive.
FORMER_MILLISECONDS_MAX = 5000
# An ending session disappears from pg_stat_activity before it releases its locks.
ENDING_SECONDS_MAX, RETRY_SECONDS = 1.0, 0.02
# The advisory lock functions take both parts of a key as signed integers; pg_locks shows them unsigned.
CLASS_BITS, NUMBER_MAX = 32, (1 << 31) - 1
TRY_QUERY = "SELECT set_config('application_name', %s, false), pg_try_advisory_lock(%s, %s)"
UNLOCK_QUERY = "SELECT pg_advisory_unlock(%s, %s)"
REGISTERED = """
      FROM pg_locks l JOIN pg_database d ON d.oid = l.database
     WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
       AND d.datname = coalesce(%(database)s, current_database())
       AND l.classid::bigint = %(shown)s
"""
HELD_QUERY = f"SELECT EXISTS (SELECT {REGISTERED} AND l.objid::bigint = %(number)s AND l.pid = pg_backend_pid())"
# The third column is false for a session that is ending: pg_stat_activity no longer shows it. A prepared transaction
# has no process, so it is not an operation. A role counts if it can run a command: on a source if it has REPLICATION;
# on a target if it is a member of the database's owner, or has CREATEDB or the privileges for --data-only. The role of
# this session also counts.
OTHERS_QUERY = f"""
SELECT l.objid::bigint, l.pid, a.pid IS NOT NULL, coalesce(r.rolname::text, ''), coalesce(a.application_name, ''),
       coalesce(to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 'an unknown time'),
       coalesce(host(a.client_addr), 'local socket')
  FROM (SELECT l.objid, l.pid, d.datdba {REGISTERED} AND l.pid <> pg_backend_pid()) AS l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid LEFT JOIN pg_roles r ON r.oid = a.usesysid
 WHERE a.pid IS NULL OR r.rolsuper OR r.rolreplication OR r.rolcreatedb OR r.rolname = session_user
    OR pg_has_role(r.oid, l.datdba, 'MEMBER') OR has_parameter_privilege(r.oid, 'session_replication_role', 'SET')
 ORDER BY 1
"""


class FleetBusyError(BusyError):
    """Another operation is running on the fleet."""


class FleetLockLostError(UnreachableError):
    """The session that held a node's lock was lost, so another operation may have started."""


class Holder(Struct, frozen=True):
    """The session that holds a lock: its server process, role, application_name, start time and client address.

    `number` is the number of its registration. A session that is ending is no longer `shown`, and has no `role`.
    """

    number: int
    session: int
    shown: bool
    role: str
    label: str
    since: str
    address: str

    def text(self) -> str:
        """Describe the holder, for a message."""
        label = read_label(self.label)
        who = (
            " ".join(word for word in (label.command, label.subject) if word)
            + f" by {label.user}@{label.host} (process {label.process})"
            if label
            else f"session {self.session} of {self.label or 'an unnamed application'}"
        )
        role = f", as role {self.role}" if self.role else ""
        return f"{who}{role}, since {self.since}, from {self.address}"

    def details(self) -> dict[str, object]:
        """Return the holder's fields, for `--json`."""
        label = read_label(self.label)
        owner = {
            "command": label.command if label else None,
            "snapshot": (label.subject or None) if label else None,
            "user": label.user if label else None,
            "host": label.host if label else None,
            "process": label.process if label else None,
        }
        return {**owner, "role": self.role or None, "since": self.since, "from": self.address, "session": self.session}


class FleetLock(Struct):
    """The lock on every primary, held by `sessions`. `retaken`: a lock was lost with its session and taken again."""

    sessions: Sessions
    name: str
    label: str
    retaken: bool = False
    _taken: dict[str, int] = field(default_factory=dict)
    # The nodes on which work is in progress.
    _pending: dict[str, Node] = field(default_factory=dict)
    _is_interrupted: bool = False

    @property
    def granted(self) -> list[str]:
        """The primaries whose lock is held."""
        return sorted(self._taken)

    def take_all(self) -> None:
        """Take the locks of all primaries: that of the first id in fleet.toml, then the others in parallel.

        So of two operations that begin at the same time, one takes no lock at all. Raises the errors of `take`.
        """
        first, *others = sorted(self._primaries, key=lambda node: node.listed_id)
        self.take(first)
        self._on_all(self.take, others)

    def take(self, node: Node) -> None:
        """Take a primary's lock in its session; raise FleetBusyError or NodeUnreachableError."""
        connection = self.sessions.connections[node.id]
        with raising_unreachable(node):
            self._taken[node.id] = take_lock(node, connection, self.name, self.label, former=self._taken.get(node.id))

    def renew(self) -> None:
        """Check every primary's lock; replace a lost session, check that its node is the same, and take its lock again.

        Afterwards no other operation is running on this fleet. Raises NodeUnreachableError, BaselineChangedError,
        FleetBusyError or FleetLockLostError. If interrupted, this does not wait for a silent node.
        """
        self._on_all(self._renew, self._primaries)

    def _renew(self, node: Node) -> None:
        with suppress(psycopg.OperationalError):
            if not self._is_held(node):
                raise _lock_lost_error(node, "its session no longer holds it")
            return
        if self._is_interrupted:
            raise _lock_lost_error(node, "an interrupt ended its session")
        connection = self.sessions.renew(node)
        if self._is_interrupted:
            # The interrupted thread has already released the locks.
            connection.close()
            raise _lock_lost_error(node, "an interrupt ended its session")
        self.take(node)
        self.retaken = True

    def check_held(self) -> None:
        """Raise FleetLockLostError unless every primary's session is alive and holds its lock."""

        def check(node: Node) -> None:
            try:
                if self._is_held(node):
                    return
            except psycopg.OperationalError as error:
                raise _lock_lost_error(node, "the session that held it was ended") from error
            raise _lock_lost_error(node, "its session no longer holds it")

        self._on_all(check, self._primaries)

    def release(self) -> None:
        """Release the locks on all nodes within UNLOCK_SECONDS_MAX; a lost session holds no lock."""

        def unlock(node: Node) -> None:
            connection = self.sessions.connections[node.id]
            # If the release takes too long, the session is shut down, which ends the lock.
            with suppress(psycopg.OperationalError), shut_down_after(connection, UNLOCK_SECONDS_MAX):
                connection.execute(UNLOCK_QUERY, (lock_class(self.name), self._taken[node.id]))

        self._on_all(unlock, [node for node in self._primaries if node.id in self._taken])

    def _is_held(self, node: Node) -> bool:
        values = {"shown": _shown(self.name), "database": None, "number": self._taken[node.id]}
        (held,) = self.sessions.connections[node.id].execute(HELD_QUERY, values).fetchone() or (False,)
        return bool(held)

    @property
    def _primaries(self) -> list[Node]:
        return [node for node in self.sessions.nodes if node.backup_of is None]

    def _on_all(self, work: Callable[[Node], None], nodes: Iterable[Node]) -> None:
        """Do `work` on all nodes in parallel; an interrupt ends our sessions on the nodes that have not finished."""
        pending = self._pending = dict[str, Node]()

        def do(node: Node) -> None:
            pending[node.id] = node
            try:
                work(node)
            finally:
                del pending[node.id]

        in_parallel(do, nodes, self.interrupt)

    def interrupt(self) -> None:
        """End our sessions on the nodes for which this or another thread is waiting."""
        self._is_interrupted = True
        ends = time.monotonic() + INTERRUPTED_SECONDS_MAX
        # Repeat this, because a thread may have just started to connect.
        while self._pending and time.monotonic() < ends:
            shut_down_sessions(list(self._pending.values()))
            time.sleep(RETRY_SECONDS)


@contextmanager
def lock_fleet(sessions: Sessions, name: str, label: str = "cutline") -> Iterator[FleetLock]:
    """Hold the fleet lock during the block: a lock on every primary, released when its session ends.

    `label` becomes the sessions' application_name (fleet.own_process). Raises FleetBusyError naming the node, the
    holder and its role.
    """
    lock = FleetLock(sessions, name, label)
    try:
        lock.take_all()
        yield lock
    finally:
        lock.release()


def watch_lock(fleet: Fleet) -> str:
    """Return the name of the watch's own lock. The watch holds the fleet lock only while a task is running."""
    return f"{fleet.name} watch"


def lock_class(name: str) -> int:
    """Return the class of the numbers that operations use to register for the lock `name`."""
    return int.from_bytes(hashlib.sha256(f"cutline {name}".encode()).digest()[: CLASS_BITS // 8], "big", signed=True)


def _shown(name: str) -> int:
    return lock_class(name) % (1 << CLASS_BITS)


def draw_number() -> int:
    """Draw a number that nobody else can predict."""
    return secrets.randbelow(NUMBER_MAX) + 1


def take_lock(
    node: Node, connection: psycopg.Connection[Any], name: str, label: str, *, former: int | None = None
) -> int:
    """Set the session's application_name to `label`, take the lock `name` and return the number of the registration.

    `former` is the number of our lost session, which is terminated if the server still considers it alive. Waits up to
    ENDING_SECONDS_MAX for sessions that are ending, and for sessions with a higher number: one that has just registered
    will see our registration and give up. Raises FleetBusyError.
    """
    number = _register(connection, name, label)
    ends = time.monotonic() + ENDING_SECONDS_MAX
    while others := find_holders(connection, name):
        if lost := next((holder for holder in others if holder.number == former), None):
            connection.execute("SELECT pg_terminate_backend(%s, %s)", (lost.session, FORMER_MILLISECONDS_MAX))
            former, ends = None, time.monotonic() + ENDING_SECONDS_MAX
        elif any(holder.shown and holder.number < number for holder in others) or time.monotonic() >= ends:
            connection.execute(UNLOCK_QUERY, (lock_class(name), number))
            raise _busy_error(node, next((holder for holder in others if holder.shown), others[0]))
        else:
            time.sleep(RETRY_SECONDS)
    return number


def _register(connection: psycopg.Connection[Any], name: str, label: str) -> int:
    while True:
        number = draw_number()
        row = connection.execute(TRY_QUERY, (label, lock_class(name), number)).fetchone()
        if row is not None and row[1]:
            return number


def _busy_error(node: Node, holder: Holder) -> FleetBusyError:
    if not holder.shown:
        return FleetBusyError(
            f"node {node.id}: the fleet lock is held by a session that is ending: server process {holder.session}",
            hint="repeat the command; if that session does not end, check the server's log",
            details={"node": node.id, **holder.details()},
        )
    hint = "wait until it ends; if its process has died, its session ends within a minute, or immediately with"
    if read_label(holder.label) is None:
        hint = f"it does not look like a Cutline session: check what role {holder.role} is doing there, or end it with"
    return FleetBusyError(
        f"node {node.id}: another operation is running: {holder.text()}",
        hint=f"{hint}: SELECT pg_terminate_backend({holder.session})",
        details={"node": node.id, **holder.details()},
    )


def find_holders(connection: psycopg.Connection[Any], name: str, database: str | None = None) -> list[Holder]:
    """Find the other sessions that hold the lock `name`, or are trying to take it; for `database`, see find_holder."""
    values = {"shown": _shown(name), "database": database}
    return [Holder(*row) for row in connection.execute(OTHERS_QUERY, values)]


def find_holder(connection: psycopg.Connection[Any], name: str, database: str | None = None) -> Holder | None:
    """Find the session that holds the lock `name` in `database`, by default that of the connection; None if none does.

    The database must be on the connection's server.
    """
    return next((holder for holder in find_holders(connection, name, database) if holder.shown), None)


def _lock_lost_error(node: Node, what: str) -> FleetLockLostError:
    return FleetLockLostError(
        f"node {node.id}: the fleet lock was lost: {what}; another operation may have started, so this command commits"
        " nothing",
        hint="check the server's log to see why the session ended, then repeat the command; a connection pooler must"
        " not drop or share the session",
        details={"node": node.id},
    )


ASKING_SECONDS_MAX = 5.0


class LockAnswer(Struct, frozen=True):
    """The holders of the fleet lock and of the watch's lock on a node; None for a lock that nobody holds.

    `problem` says why the node did not answer.
    """

    node: str
    holder: Holder | None = None
    watch: Holder | None = None
    problem: str = ""


class _Holders(Struct, frozen=True):
    server: ServerState
    holder: Holder | None
    watch: Holder | None


def ask_lock_holders(fleet: Fleet) -> list[LockAnswer]:
    """Ask all primaries for their lock holders, within ASKING_SECONDS_MAX.

    All servers are asked, because a standby in fleet.toml may be a primary now. Returns the answers in the order the
    primaries appear in fleet.toml.
    """

    def ask(_node: Node, connection: psycopg.Connection[Any]) -> _Holders:
        server = read_server(connection)
        if server.is_in_recovery:
            return _Holders(server, None, None)
        return _Holders(server, find_holder(connection, fleet.name), find_holder(connection, watch_lock(fleet)))

    asked = NodesQuery(fleet.nodes, ask, ASKING_SECONDS_MAX).answers()
    answers = in_current_roles(fleet, asked, lambda answer: answer.server).answers
    return [
        LockAnswer(node.id, found.holder, found.watch)
        if (found := answers.found.get(node.id))
        else LockAnswer(node.id, problem=answers.problems[node.id])
        for node in fleet.primaries
    ]
