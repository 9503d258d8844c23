"""Logical replication slots: a node's promise to keep the WAL that the archive does not hold yet.

A slot is advanced only past what the archive holds (docs/architecture.md, invariant 4). A slot's name is made from the
chain's operation id, so no two chains ever share one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from fleet.config import Node
from fleet.hints import NEW_CHAIN
from fleet.lsn import Lsn
from fleet.nodes.connections import connect, connect_replication, shut_down_after, unreachable_error
from fleet.nodes.sessions import in_parallel
from fleet.progress import Progress, Silent
from storage.errors import RefusedError, SnapshotError
from wal.slots.waiting import Awaited, WaitNotes, open_transactions, wait_error

PLUGIN = "pgoutput"
# How often a slot that is being made is looked after.
WATCH_SECONDS = 0.5
# What making a slot takes where it waits for nothing is never cut off.
SLOT_SECONDS_MIN = 2.0
CANCEL_SECONDS_MAX = 10.0
DROP_CONNECT_SECONDS_MAX = 5

STATE_QUERY = """
SELECT confirmed_flush_lsn::text, restart_lsn::text, active, coalesce(wal_status, ''), two_phase,
       -- 17 says why a slot is invalid; 16 has only this one reason besides lost WAL.
       coalesce(to_jsonb(s) ->> 'invalidation_reason',
                CASE WHEN to_jsonb(s) ->> 'conflicting' = 'true' THEN 'conflict with recovery' END, '')
  FROM pg_replication_slots s WHERE slot_name = %s AND database = current_database()
"""
READER_QUERY = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active"
DROP_QUERY = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"


COPY_SUFFIX = "_copy"


class SlotLostError(RefusedError):
    """A chain's slot is gone, unusable, or ahead of the archive: the WAL between is lost to the chain."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as its node has it; positions in the node's WAL. `invalid` is the server's reason, empty if it is not."""

    confirmed: Lsn
    restart: Lsn
    active: bool
    wal_status: str
    two_phase: bool
    invalid: str = ""


@dataclass(frozen=True, slots=True)
class ExportedSlot:
    """A new slot. While `connection` is open, its snapshot shows what was committed before `position`."""

    position: Lsn
    snapshot: str
    connection: psycopg.Connection[Any]


def slot_name(chain: str) -> str:
    """The slot of a chain, on every node: `cutline_` and the operation id in the letters a slot may have."""
    return "cutline_" + re.sub(r"[^a-z0-9]", "_", chain.lower())


def copy_slot_name(operation: str) -> str:
    """The slot of an operation that copies tables anew, on every node concerned, while it does."""
    return slot_name(operation) + COPY_SUFFIX


def chain_of_slot(name: str) -> str:
    """The operation that a slot is of: `slot_name` and `copy_slot_name` the other way round."""
    name = name.removesuffix(COPY_SUFFIX)
    return name.removeprefix("cutline_").upper()[:16] + "-" + name[-10:]


def create_exported_slot(
    node: Node,
    primary: Node,
    name: str,
    seconds_max: float,
    progress: Progress | None = None,
    abandoned: threading.Event | None = None,
) -> ExportedSlot:
    """Create a two-phase slot on `node` with an exported snapshot.

    PostgreSQL waits for the transactions that run on its server, prepared ones too. `progress` is told which, while it
    waits; after `seconds_max` (but at least SLOT_SECONDS_MIN), or once `abandoned` is set, a SlotWaitError names them,
    and nothing is left of the slot. For a standby, `primary` is asked to log what runs, as long as that takes.
    """
    connection = connect_replication(node)
    waiting = _SlotWait(connection, node, primary, seconds_max, abandoned or threading.Event(), progress or Silent())
    try:
        # statement_timeout does not bound replication commands.
        with waiting.running():
            query = f"CREATE_REPLICATION_SLOT \"{name}\" LOGICAL {PLUGIN} (SNAPSHOT 'export', TWO_PHASE)"
            row = connection.execute(sql.SQL(query)).fetchone()
        if row is None:
            raise RuntimeError("CREATE_REPLICATION_SLOT answered nothing")
        # Any further command on this session would end the exported snapshot.
        return ExportedSlot(Lsn.parse(row[1]), row[2], connection)
    except psycopg.errors.QueryCanceled:
        connection.close()
        raise wait_error(waiting.what, waiting.notes.waited_seconds, waiting.awaited, node.id) from None
    except psycopg.errors.ConfigurationLimitExceeded as error:
        connection.close()
        raise SlotLostError(
            f"node {node.id}: all replication slots are in use",
            hint="raise max_replication_slots, or drop slots that nobody reads",
            details={"node": node.id},
        ) from error
    except psycopg.OperationalError as error:
        connection.close()
        raise unreachable_error(node, error) from error
    except BaseException:
        connection.close()
        raise


class _SlotWait:
    """Beside the session that makes a slot: says what it waits for, and cancels it when it has waited long enough.

    While a slot is made on a standby, its primary logs its running transactions again and again.
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
        self.awaited: list[Awaited] = []
        self._connection, self._node, self._primary = connection, node, primary
        self._seconds_max = max(seconds_max, SLOT_SECONDS_MIN)
        self._abandoned, self._done = abandoned, threading.Event()
        self._round: set[str] = set()
        self._problem: psycopg.Error | None = None

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

    def _run(self) -> None:
        with ExitStack() as stack:
            asking: psycopg.Connection[Any] | None = None
            while not self._done.wait(WATCH_SECONDS):
                if self.notes.waited_seconds > self._seconds_max or self._abandoned.is_set() or self._problem:
                    # Again and again: a cancel that comes before its command is lost.
                    with suppress(psycopg.Error):
                        self._connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)
                    continue
                try:
                    asking = asking or stack.enter_context(closing(connect(self._primary)))
                    self._look(asking)
                except (psycopg.OperationalError, SnapshotError):
                    # A primary that is away says nothing; the slot's own session tells whether it goes on.
                    asking = None
                except psycopg.Error as error:
                    self._problem = error

    def _look(self, asking: psycopg.Connection[Any]) -> None:
        if self._node.backup_of is not None:
            asking.execute("SELECT pg_log_standby_snapshot()")
        found = open_transactions(self._primary.id, asking)
        self.awaited = [one for one in found if one.xid in self._round]
        if not self.awaited:
            # PostgreSQL waits in several rounds, each for what runs when it begins (snapbuild.c).
            self.awaited = found
            self._round = {one.xid for one in found}
        self.notes.tell(self.awaited)


def slot_state(connection: psycopg.Connection[Any], name: str) -> SlotState | None:
    """The slot as its node has it, None if there is none."""
    row = connection.execute(STATE_QUERY, (name,)).fetchone()
    if row is None:
        return None
    return SlotState(Lsn.parse(row[0] or "0/0"), Lsn.parse(row[1] or "0/0"), *row[2:])


def check_slot(node: str, name: str, state: SlotState | None, archived: int) -> SlotState:
    """Return the state; raise SlotLostError unless the slot can go on where the archive ends."""
    problem = ""
    if state is None:
        problem = f"slot {name} is gone"
    elif state.wal_status == "lost" or state.invalid:
        reason = state.invalid or "wal_removed"
        problem = f"slot {name} was invalidated by the server, and WAL that it kept is lost ({reason})"
    elif not state.two_phase:
        problem = f"slot {name} does not decode prepared transactions"
    elif state.confirmed > archived:
        place = str(state.confirmed)
        problem = f"slot {name} is at {place}, but the archive ends at {archived}: somebody advanced it"
    if problem or state is None:
        raise SlotLostError(
            f"node {node}: {problem}",
            hint=NEW_CHAIN,
            details={"node": node, "slot": name},
        )
    return state


def advance_slot(connection: psycopg.Connection[Any], name: str, through: Lsn) -> None:
    """Let the node forget what ends at or before `through`."""
    connection.execute("SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", (name, str(through)))


def drop_slot(node: Node, name: str, seconds_max: float = 10) -> bool:
    """Drop the slot if there is one; True if it is gone now. False where the node can't be asked.

    A session that still makes or reads it is ended: nobody wants what it waits for, and a slot that is being made on a
    standby whose primary is idle, for a command that was killed, can be waited for without end.
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
            # The session that was ended takes a moment.
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        except (psycopg.Error, SnapshotError):
            return False


def drop_slots(nodes: Iterable[Node], name: str) -> list[str]:
    """Drop a chain's slot on all nodes at once; return the nodes on which it may be left."""
    asked = list(nodes)
    dropped = in_parallel(lambda node: drop_slot(node, name), asked)
    return [node.id for node, is_gone in zip(asked, dropped, strict=True) if not is_gone]
