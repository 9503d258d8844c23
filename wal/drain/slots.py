"""Logical replication slots, for which nodes retain the WAL that is not archived yet.

A slot is never advanced past the end of the archive (docs/architecture.md, invariant 4). Its name is derived from the
chain's operation id, so no two chains share a slot.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import FREE_SLOTS, NEXT_COPIES
from cutline.fleet.progress import News, Progress, Silent
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.connections import connect, connect_replication, unreachable_error
from cutline.nodes.open_sessions import shut_down_after
from cutline.nodes.problems import lacks_function, read_role, unfit_error
from cutline.nodes.sessions import in_parallel, let_end
from cutline.nodes.surroundings import FAILOVER_VERSION
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.wal.drain.open_transactions import (
    TOO_LARGE,
    Awaited,
    SlotSnapshotError,
    open_transactions,
    report_transactions,
    too_large_error,
    wait_error,
)
from cutline.wal.drain.replay import ReplayState, read_replay, replay_error, report_replay

PLUGIN = "pgoutput"
# The end of the reason if a slot is past the end of its archive.
ADVANCED = "another process advanced the slot"
# How often to check a slot that is being created.
WATCH_SECONDS = 0.5
# Creating a slot is never cancelled before this: it takes that long even if there is nothing to wait for.
SLOT_SECONDS_MIN = 2.0
CANCEL_SECONDS_MAX = 10.0
DROP_CONNECT_SECONDS_MAX = 5

# The fields of a SlotState of the slot `s`.
STATE_FIELDS = """
       s.confirmed_flush_lsn::text, coalesce(s.wal_status, ''), s.two_phase,
       -- Version 17 says why a slot is invalid; in 16, this is the only reason other than lost WAL.
       coalesce(to_jsonb(s) ->> 'invalidation_reason',
                CASE WHEN to_jsonb(s) ->> 'conflicting' = 'true' THEN 'conflict with recovery' END, '')"""
STATE_QUERY = f"""
SELECT {STATE_FIELDS}
  FROM pg_replication_slots s WHERE slot_name = %s AND database = current_database()
"""
READER_QUERY = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active"
DROP_QUERY = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"


SYNCHRONIZED_QUERY = """
SELECT EXISTS (SELECT FROM pg_replication_slots s
                WHERE slot_name = %s AND pg_is_in_recovery() AND to_jsonb(s) ->> 'synced' = 'true')
"""

COPY_SUFFIX = "_copy"
FREE_QUERY = """
SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots WHERE slot_name <> %s
"""


class SlotLostError(RefusedError):
    """A chain's slot is missing, unusable, or ahead of the archive, so WAL that the chain needs is lost."""


class NoFreeSlotError(RefusedError):
    """All replication slots of a server are in use (max_replication_slots), so no other can be created."""


class SlotState(Struct, frozen=True):
    """The state of a slot on its node. `invalid` is the server's reason, empty if the slot is valid."""

    confirmed: Lsn
    wal_status: str
    two_phase: bool
    invalid: str = ""


class ExportedSlot(Struct, frozen=True):
    """A new slot. While `connection` is open, `snapshot` shows everything that was committed before `position`."""

    position: Lsn
    snapshot: str
    connection: psycopg.Connection[Any]


def slot_name(chain: str) -> str:
    """Return the name of a chain's slot on every node: `cutline_` and the operation id in valid characters."""
    return "cutline_" + re.sub(r"[^a-z0-9]", "_", chain.lower())


def copy_slot_name(operation: str) -> str:
    """Return the name of an operation's slot for copying tables again, the same on every node."""
    return slot_name(operation) + COPY_SUFFIX


def chain_of_slot(name: str) -> str:
    """Return the operation that created a slot: the inverse of `slot_name` and `copy_slot_name`."""
    name = name.removesuffix(COPY_SUFFIX)
    return name.removeprefix("cutline_").upper()[:16] + "-" + name[-10:]


def no_free_slot_error(node: Node, remedy: str = FREE_SLOTS) -> NoFreeSlotError:
    """Return the error of a server that can't create another slot; `remedy` says how to free one."""
    return NoFreeSlotError(
        f"node {node.id}: all replication slots are in use",
        hint=f"{remedy}; then repeat the command",
        details={"node": node.id},
    )


def count_free_slots(connection: psycopg.Connection[Any], besides: str) -> int:
    """Return how many slots the server can still create; the slot `besides` is not counted as one in use."""
    (free,) = connection.execute(FREE_QUERY, (besides,)).fetchone() or (0,)
    return int(free)


def create_exported_slot(
    node: Node,
    primary: Node,
    name: str,
    seconds_max: float,
    progress: Progress | None = None,
    abandoned: threading.Event | None = None,
    *,
    has_failover: bool = False,
) -> ExportedSlot:
    """Create a two-phase slot on `node` with an exported snapshot.

    With `has_failover`, standbys that synchronize slots keep a copy of it, from FAILOVER_VERSION on (PostgreSQL manual,
    "Replication Slot Synchronization").

    PostgreSQL waits for all running transactions on the server, including prepared transactions. They are reported to
    `progress`. After `seconds_max` (at least SLOT_SECONDS_MIN), or once `abandoned` is set, raises a SlotWaitError that
    names them, and leaves no slot behind. For a standby, makes `primary` log its running transactions; raises a
    ReplayLagError with the reason if the standby does not replay this record. Also raises NoFreeSlotError and
    NodeUnreachableError.

    A snapshot names at most as many transactions as the server has places for, and the exported one names each
    subtransaction since the oldest running transaction that is unfinished or was rolled back. If they are too many, the
    server refuses; the command is repeated within `seconds_max`, because this changes when that transaction ends. After
    that, raises a SlotSnapshotError.
    """
    connection = connect_replication(node)
    failover = ", FAILOVER" if has_failover and connection.info.server_version >= FAILOVER_VERSION else ""
    waiting = _SlotWait(connection, node, primary, seconds_max, abandoned or threading.Event(), progress or Silent())
    try:
        # statement_timeout does not apply to replication commands.
        with waiting.running():
            query = f"CREATE_REPLICATION_SLOT \"{name}\" LOGICAL {PLUGIN} (SNAPSHOT 'export', TWO_PHASE{failover})"
            row = _repeat_while_too_large(waiting, node, lambda: connection.execute(sql.SQL(query)).fetchone())
        if row is None:
            raise RuntimeError("CREATE_REPLICATION_SLOT returned no row")
        # Any further command on this session would end the exported snapshot.
        return ExportedSlot(Lsn.parse(row[1]), row[2], connection)
    except psycopg.errors.QueryCanceled:
        connection.close()
        if waiting.behind is not None:
            raise replay_error(waiting.behind, waiting.what, waiting.notes.waited_seconds) from None
        if waiting.is_too_large:
            raise _too_large_error(waiting, node) from None
        raise wait_error(waiting.what, waiting.notes.waited_seconds, waiting.awaited, node.id) from None
    except psycopg.errors.SerializationFailure as error:
        connection.close()
        raise (
            _too_large_error(waiting, node) if _is_too_large(error, node) else unreachable_error(node, error)
        ) from None
    except psycopg.errors.ConfigurationLimitExceeded as error:
        connection.close()
        raise no_free_slot_error(node) from error
    except psycopg.OperationalError as error:
        connection.close()
        raise unreachable_error(node, error) from error
    except BaseException:
        connection.close()
        raise


def _repeat_while_too_large(waiting: _SlotWait, node: Node, create: Callable[[], Any]) -> Any:
    """Return the result of `create`, which is repeated while the snapshot would be too large and there is time."""
    while True:
        try:
            return create()
        except psycopg.errors.SerializationFailure as error:
            if not (_is_too_large(error, node) and waiting.goes_on_after_too_large()):
                raise


def _is_too_large(error: psycopg.errors.SerializationFailure, node: Node) -> bool:
    """Whether the slot's snapshot would be too large ("initial slot snapshot too large", snapbuild.c).

    On a standby, replay may also have ended the command, because it conflicts with it.
    """
    return node.backup_of is None or "snapshot too large" in str(error)


def _too_large_error(waiting: _SlotWait, node: Node) -> SlotSnapshotError:
    return too_large_error(waiting.what, waiting.notes.waited_seconds, waiting.open, node.id)


class _SlotWait:
    """Watches a session that is creating a slot: reports what blocks it, and cancels it after the time limit.

    If the slot is on a standby, repeatedly makes the primary log its running transactions, because the standby needs
    such records.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        node: Node,
        primary: Node,
        seconds_max: float,
        abandoned: threading.Event,
        progress: Progress,
    ) -> None:
        self.what = f"slot on node {node.id}"
        self.notes = WaitNotes(self.what, progress)
        # Set until a standby has replayed the first record of running transactions that was logged for it.
        self.behind: ReplayState | None = None
        # Kept apart from `notes`, because a busy standby is often behind, which says nothing new about the
        # transactions.
        self._replay_notes = WaitNotes(self.what, progress)
        self._needed: Lsn | None = None
        self.awaited: list[Awaited] = []
        # All transactions that the primary had when it was last asked, oldest first.
        self.open: list[Awaited] = []
        # Whether the server's last answer was that the snapshot would be too large.
        self.is_too_large = False
        self._connection, self._node, self._primary = connection, node, primary
        self._seconds_max = max(seconds_max, SLOT_SECONDS_MIN)
        self._abandoned, self._done = abandoned, threading.Event()
        self._round: set[str] = set()
        self._problem: Exception | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch in a thread while the block runs."""
        thread = threading.Thread(target=self._run, name=self.what, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            if self._problem:
                raise self._problem

    def goes_on_after_too_large(self) -> bool:
        """Report that the snapshot would be too large, and pause; return whether there is time for another attempt."""
        if not self.is_too_large:
            self.notes.progress.note(News(f"{self.what}: {TOO_LARGE}; trying again"))
        self.is_too_large = True
        return not self._abandoned.wait(WATCH_SECONDS) and self.notes.waited_seconds < self._seconds_max

    def _run(self) -> None:
        sessions: dict[str, psycopg.Connection[Any]] = {}
        try:
            while not self._done.wait(WATCH_SECONDS):
                if self.notes.waited_seconds > self._seconds_max or self._abandoned.is_set() or self._problem:
                    # Cancel repeatedly: a request that arrives before the command is lost.
                    with suppress(psycopg.Error):
                        self._connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)
                    continue
                self._visit(sessions, self._primary, self._look)
                if self._needed is not None:
                    self._visit(sessions, self._node, self._look_at_replay)
        finally:
            for session in sessions.values():
                session.close()

    def _visit(
        self,
        sessions: dict[str, psycopg.Connection[Any]],
        node: Node,
        look: Callable[[psycopg.Connection[Any]], None],
    ) -> None:
        """Call `look` with the node's session; if that fails, reconnect next time."""
        try:
            if node.id not in sessions:
                sessions[node.id] = connect(node)
            look(sessions[node.id])
        except (psycopg.OperationalError, SnapshotError):
            # Errors in the slot's own session are raised there.
            if (failed := sessions.pop(node.id, None)) is not None:
                failed.close()
        except Exception as error:  # noqa: BLE001  # `running` raises it; without this thread, nothing would end the wait
            self._problem = error

    def _look(self, primary: psycopg.Connection[Any]) -> None:
        if self._node.backup_of is not None:
            try:
                position = log_standby_snapshot(primary)
                self._needed = self._needed or position
            except psycopg.errors.InsufficientPrivilege:
                role = read_role(self._primary, primary)
                self._problem = unfit_error([lacks_function(self._primary.id, role, "pg_log_standby_snapshot()")])
                return
        self.open = transactions = open_transactions(self._primary.id, primary)
        self.awaited = [transaction for transaction in transactions if transaction.xid in self._round]
        if not self.awaited:
            # PostgreSQL waits in several rounds, each for the transactions that are running when the round begins
            # (snapbuild.c).
            self.awaited = transactions
            self._round = {transaction.xid for transaction in transactions}
        if self.behind is None:
            report_transactions(self.notes, self.awaited)

    def _look_at_replay(self, standby: psycopg.Connection[Any]) -> None:
        self.behind = read_replay(self._node.id, standby, self._needed) if self._needed is not None else None
        if self.behind is not None:
            report_replay(self._replay_notes, self.behind, self._seconds_max)


def log_standby_snapshot(primary: psycopg.Connection[Any]) -> Lsn:
    """Log a primary's running transactions; return the end of the record, which is flushed within moments."""
    (position,) = primary.execute("SELECT pg_log_standby_snapshot()::text").fetchone() or ("",)
    return Lsn.parse(position)


def slot_state(connection: psycopg.Connection[Any], name: str) -> SlotState | None:
    """Read the state of the slot; None if it does not exist."""
    row = connection.execute(STATE_QUERY, (name,)).fetchone()
    return None if row is None else state_of_row(*row)


def state_of_row(confirmed: str | None, wal_status: str, two_phase: bool, invalid: str) -> SlotState:  # noqa: FBT001  # a row of STATE_FIELDS
    """Return the state from a row of STATE_FIELDS."""
    return SlotState(Lsn.parse(confirmed or "0/0"), wal_status, two_phase, invalid)


def slot_problem(name: str, state: SlotState | None) -> str:
    """Return why the slot can't continue its chain; "" if nothing in its state prevents it."""
    if state is None:
        return f"slot {name} does not exist"
    if state.wal_status == "lost" or state.invalid:
        reason = state.invalid or "wal_removed"
        return f"slot {name} was invalidated by the server ({reason}), so WAL that it retained is lost"
    return "" if state.two_phase else f"slot {name} does not decode prepared transactions"


def check_slot(
    node: str, name: str, state: SlotState | None, archived: int, how: str = ADVANCED, why_missing: str = ""
) -> SlotState:
    """Return the state; raise SlotLostError unless the slot can continue where the archive ends.

    `how` says how a slot has come past the end of the archive, and `why_missing` why there may be none.
    """
    problem = slot_problem(name, state) + (why_missing if state is None else "")
    if state is not None and not problem and state.confirmed > archived:
        place = str(state.confirmed)
        problem = f"slot {name} is at {place}, but the archive ends at {archived}: {how}"
    if problem or state is None:
        raise SlotLostError(
            f"node {node}: {problem}",
            hint=NEXT_COPIES,
            details={"node": node, "slot": name},
        )
    return state


def advance_slot(connection: psycopg.Connection[Any], name: str, through: Lsn) -> None:
    """Advance the slot, so that the node can remove WAL up to `through`."""
    connection.execute("SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", (name, str(through)))


def drop_slot(node: Node, name: str, seconds_max: float = 10) -> bool:
    """Drop the slot if it exists. Return False if the node can't be reached or the slot stays in use.

    Terminates any session that is still creating or reading the slot, because its result is no longer needed. Otherwise
    a killed command's session that is creating a slot on a standby might never end if the primary is idle.
    """
    deadline = time.monotonic() + seconds_max
    while True:
        try:
            with (
                connect(node, connect_timeout=str(DROP_CONNECT_SECONDS_MAX)) as connection,
                shut_down_after(connection, seconds_max),
            ):
                connection.execute(READER_QUERY, (name,))
                connection.execute(DROP_QUERY, (name,))
                return True
        except psycopg.errors.ObjectInUse:
            # The terminated session takes a moment to end.
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        except (psycopg.Error, SnapshotError):
            return False


def is_synchronized(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether the slot is a standby's copy of its primary's, which nobody can read or drop before a promotion."""
    (found,) = connection.execute(SYNCHRONIZED_QUERY, (name,)).fetchone() or (False,)
    return bool(found)


def drop_slots(nodes: Iterable[Node], name: str) -> list[str]:
    """Drop a chain's slot on all nodes in parallel; return the nodes on which it may still exist."""
    targets = list(nodes)
    dropped = in_parallel(lambda node: drop_slot(node, name), targets, let_end)
    return [node.id for node, is_dropped in zip(targets, dropped, strict=True) if not is_dropped]


OWN_SLOTS = "slot_name ^@ 'cutline_'"
# Cutline's slots in the session's database, including invalidated ones.
SLOTS_HERE = f"{OWN_SLOTS} AND database = current_database()"
# The position where a primary writes or a standby replays.
POSITION = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
NAMES_QUERY = f"""
SELECT slot_name FROM pg_replication_slots
 WHERE {OWN_SLOTS} AND datoid = coalesce(%s::oid, (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


def list_own_slots(connection: psycopg.Connection[Any], database: int | None = None) -> list[str]:
    """Return the names of Cutline's slots in the database with the oid `database`, or in the session's database."""
    return [name for (name,) in connection.execute(NAMES_QUERY, (database,))]
