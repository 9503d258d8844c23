"""Snapshots of a primary and its standbys in a known order: each shows all that the snapshots before it show.

A snapshot is a set of committed transactions. Two servers never have the same set at the same moment, so a check of
running databases can't compare them at one position. It takes snapshots by turns instead, P1 of the primary, Q1 of a
standby, P2, Q2, so that P1 ⊆ Q1 ⊆ P2 ⊆ Q2 holds for their sets. Then a row version that P1 and P2 show was committed in
Q1 as well, and nobody had deleted it there: if Q1 lacks it, the standby has lost it. A version that Q1 and Q2 show must
be in P2 for the same reason. Versions that change in between are in only one of the snapshots on the same server, and
prove nothing.

- P ⊆ Q: a transaction writes its commit record before its primary shows it. So a snapshot that a standby takes after it
  has replayed a record written after P shows all that P shows.
- Q ⊆ P: a standby may show a transaction before its primary does, for example while the primary waits for a synchronous
  standby. So P is taken again until none of its running transactions has committed on the standby
  (procarray.c, GetSnapshotData; pg_current_snapshot does not list running transactions on a standby, pg_xact_status
  works there).

Nothing waits for a transaction of the application, and nothing is locked. Each turn writes a logical message without
content into the primary's WAL.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psycopg
from msgspec import Struct

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.connections import connect, raising_unreachable
from cutline.storage.errors import RefusedError
from cutline.wal.cut.markers import FLUSHING_MESSAGE_VERSION
from cutline.wal.drain.replay import NOT_RECEIVING, REPLAY_POLL_SECONDS, ReplayState, read_replay, report_replay

PREFIX = "cutline.live"
REPLAY_SECONDS_MAX = 60.0
# A standby that receives no WAL reconnects every five seconds, unless its primary is gone.
NOT_RECEIVING_SECONDS_MAX = 12.0
# A transaction that waits for a synchronous standby may take as long as that standby is down.
AHEAD_SECONDS_MAX = 30.0
AHEAD_POLL_SECONDS = 0.02
# At most this many transactions are looked up at a time.
SUSPECTS_MAX = 100_000
BOUNDS = re.compile(r"(\d+):(\d+):((?:\d+(?:,\d+)*)?)")
# Before 17 the function can't flush the message; the commit of a transaction that has an xid does (wal/cut/markers.py).
WRITE_QUERY = f"SELECT pg_logical_emit_message(false, '{PREFIX}', '')::text, pg_current_xact_id()"
FLUSHING_WRITE_QUERY = f"SELECT pg_logical_emit_message(false, '{PREFIX}', '', true)::text"
TAKE_QUERY = "SELECT pg_export_snapshot(), pg_current_snapshot()::text"
COMMITTED_QUERY = "SELECT x::text FROM unnest(%s::text[]) x WHERE pg_xact_status(x::xid8) = 'committed'"


class SnapshotOrderError(RefusedError):
    """No snapshot of a primary shows all that its standby shows: a commit waits for a synchronous standby."""


class SnapshotBounds(Struct, frozen=True):
    """A snapshot, as pg_current_snapshot() prints it: `running` is empty on a standby.

    All transactions before `xmin` have ended, and none from `xmax` on is shown.
    """

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SnapshotBounds:
        """Parse `xmin:xmax:xid,xid`; raise ValueError for anything else."""
        match = BOUNDS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a snapshot")
        return cls(int(match[1]), int(match[2]), tuple(map(int, match[3].split(",") if match[3] else ())))


class LiveSnapshot(Struct, frozen=True):
    """A snapshot that tasks can import as `exported` until its block ends."""

    node: Node
    exported: str
    bounds: SnapshotBounds


@contextmanager
def take_snapshot(node: Node) -> Iterator[LiveSnapshot]:
    """Export a snapshot of the node for the block; raise NodeUnreachableError."""
    connection = connect(node)
    try:
        with raising_unreachable(node):
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            exported, text = connection.execute(TAKE_QUERY).fetchone() or ("", "")
        yield LiveSnapshot(node, str(exported), SnapshotBounds.parse(str(text)))
    finally:
        # A standby may have ended the session because replay could not wait for it.
        with suppress(psycopg.Error):
            connection.close()


class SnapshotTurn(Struct, frozen=True):
    """A snapshot of the primary, and later snapshots of its standbys, keyed by node."""

    primary: LiveSnapshot
    standbys: Mapping[str, LiveSnapshot]


class Shard(Struct, frozen=True):
    """A primary and its standbys, and a session on each of them outside of any transaction."""

    primary: Node
    standbys: tuple[Node, ...]
    connections: Mapping[str, psycopg.Connection[Any]]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The primary and its standbys."""
        return (self.primary, *self.standbys)


@contextmanager
def take_turns(
    shard: Shard, standbys: Sequence[Node], turns: int, progress: Progress, behind: Callable[[ReplayState], None]
) -> Iterator[list[SnapshotTurn]]:
    """Take snapshots of the primary and of these standbys by turns; the snapshots last for the block.

    If a standby does not replay in time, calls `behind` and continues without it. Raises SnapshotOrderError and
    NodeUnreachableError.
    """
    left, taken = list(standbys), list[SnapshotTurn]()
    with ExitStack() as stack:
        for _ in range(turns):
            before = taken[-1].standbys if taken else {}
            primary = _take_after(shard, stack, before)
            needed = write_position(shard.primary, shard.connections[shard.primary.id])
            found: dict[str, LiveSnapshot] = {}
            for standby in list(left):
                if (state := _await_replay(shard, standby, needed, progress)) is not None:
                    behind(state)
                    left.remove(standby)
                    continue
                found[standby.id] = stack.enter_context(take_snapshot(standby))
            taken.append(SnapshotTurn(primary, found))
        complete = taken[-1].standbys.keys()
        yield [SnapshotTurn(turn.primary, {node: turn.standbys[node] for node in complete}) for turn in taken]


def write_position(node: Node, connection: psycopg.Connection[Any]) -> Lsn:
    """Write a message into the primary's WAL, durably; return the position after it."""
    flushes = connection.info.server_version >= FLUSHING_MESSAGE_VERSION
    with raising_unreachable(node):
        row = connection.execute((FLUSHING_WRITE_QUERY if flushes else WRITE_QUERY).encode()).fetchone()
    if row is None:
        raise RuntimeError("a query without a table returned no row")
    return Lsn.parse(row[0])


def _await_replay(shard: Shard, standby: Node, needed: Lsn, progress: Progress) -> ReplayState | None:
    """Wait until the standby has replayed up to `needed`; return its state if that takes too long."""
    notes = WaitNotes(f"the check of {standby.id}", progress)
    with raising_unreachable(standby):
        while state := read_replay(standby.id, shard.connections[standby.id], needed):
            seconds_max = NOT_RECEIVING_SECONDS_MAX if state.why == NOT_RECEIVING else REPLAY_SECONDS_MAX
            if notes.waited_seconds > seconds_max:
                return state
            report_replay(notes, state, seconds_max)
            time.sleep(REPLAY_POLL_SECONDS)
    return None


def _take_after(shard: Shard, stack: ExitStack, before: Mapping[str, LiveSnapshot]) -> LiveSnapshot:
    """Take a snapshot of the primary that shows all that the standbys' snapshots in `before` show."""
    deadline = time.monotonic() + AHEAD_SECONDS_MAX
    while True:
        with ExitStack() as attempt:
            snapshot = attempt.enter_context(take_snapshot(shard.primary))
            ahead = [node for node, earlier in before.items() if not _shows_all(snapshot, earlier, shard)]
            if not ahead:
                stack.enter_context(attempt.pop_all())
                return snapshot
        if time.monotonic() > deadline:
            raise SnapshotOrderError(
                f"node {shard.primary.id}: a transaction that has committed on {', '.join(ahead)} is still running",
                hint="it waits for a synchronous standby, which may be down: see pg_stat_activity, wait_event SyncRep",
                details={"node": shard.primary.id},
            )
        time.sleep(AHEAD_POLL_SECONDS)


def _shows_all(snapshot: LiveSnapshot, earlier: LiveSnapshot, shard: Shard) -> bool:
    """Whether the primary's snapshot shows all transactions that the standby's earlier snapshot shows."""
    suspects = hidden_transactions(snapshot.bounds, earlier.bounds)
    if suspects is None:
        return False
    if not suspects:
        return True
    with raising_unreachable(earlier.node):
        listed = [str(xid) for xid in suspects]
        return not shard.connections[earlier.node.id].execute(COMMITTED_QUERY, (listed,)).fetchall()


def hidden_transactions(primary: SnapshotBounds, standby: SnapshotBounds) -> list[int] | None:
    """Return the transactions that the primary's snapshot hides and the standby's may show; None if they are too many.

    The standby's snapshot shows those of them that had committed there by then.
    """
    # After a restart, a standby's xmax may be ahead of its primary's until a later transaction ends.
    if standby.xmax - primary.xmax > SUSPECTS_MAX:
        return None
    unknown = range(primary.xmax, standby.xmax)
    return [*(xid for xid in primary.running if xid < standby.xmax), *unknown]
