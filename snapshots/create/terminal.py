"""Terminal snapshots: before the last cut the fleet stops accepting writes, so that the cut is its final state.

In this order: what was prepared is over (before this, so that nobody is disturbed for what is in doubt for ever); new
sessions are read-only on all primaries; all sessions from before have ended; what they had left prepared is over; the
position of every WAL from which on nothing may be written is taken; the cut. Nothing makes a database read-only for
those who insist: a session may set the variable itself. So before the commit the archive and the slots are asked
whether anything was written after those positions. If it was, or anything else fails, nothing is committed and the
fleet made writable again (fleet/read_only/resume.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psycopg

from fleet.config import Node
from fleet.lsn import Lsn
from fleet.nodes.connections import raising_unreachable
from fleet.nodes.lock import FleetLock
from fleet.nodes.other_sessions import SessionsLeftError, end_sessions, sessions_text
from fleet.nodes.sessions import Sessions, in_parallel
from fleet.progress import Progress
from fleet.read_only.frozen import freeze, read_frozen
from snapshots.create.make_cut import CutPlan, MadeCut
from snapshots.create.prepared_transactions import await_prepared
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.exclusive import check_exclusive
from snapshots.operations.operation import Operation
from storage.errors import RefusedError
from storage.store import ObjectStore
from wal.drain.drain_task import DrainTask
from wal.segments.segments import read_changed_groups

SLOT_SECONDS_MAX = 10.0
# What ending a session takes on a busy machine is never cut off.
SESSIONS_SECONDS_MIN = 5.0
POLL_SECONDS = 0.2
# Insert, update, delete, truncate as pgoutput has them (PostgreSQL manual, "Logical Replication Message Formats").
WRITTEN_QUERY = """
SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '3', 'publication_names', %s)
 WHERE lsn >= %s::pg_lsn AND chr(get_byte(data, 0)) IN ('I', 'U', 'D', 'T')
"""


class FinalStateError(RefusedError):
    """The cut is not the final state: something was written, or could be written, after all writes were to be over."""


def end_writes(
    lock: FleetLock, store: ObjectStore, operation: Operation, fleet_id: str, wait_seconds: float, progress: Progress
) -> dict[str, Lsn]:
    """Make all primaries accept no more writes; return where in each one's WAL the last may be.

    Raises SlotWaitError, SessionsLeftError, and what tells that the fleet is not ours any more.
    """
    sessions = lock.sessions
    check_exclusive(lock, store, operation)
    primaries = [sessions.fleet.node(name) for name in sessions.primaries]
    progress.step("end writes", total=len(primaries), unit="nodes")

    wait = max(wait_seconds, SESSIONS_SECONDS_MIN)

    def close(node: Node) -> None:
        with raising_unreachable(node):
            freeze(sessions.connections[node.id], fleet_id, operation.id, operation.snapshot)
        progress.reached(CrashPoint.FROZEN, node=node.id)

    def clear(node: Node) -> None:
        with raising_unreachable(node):
            _, left = end_sessions(node, sessions.connections[node.id], None, wait, progress)
        if left:
            raise SessionsLeftError(
                f"sessions that may write did not end in {wait:g} s, or may not be ended: {sessions_text(left)}",
                hint="end them, or give them more time: --wait SECONDS",
                details={"node": node.id, "sessions": [one.details() for one in left]},
            )
        progress.advance(1)
        progress.reached(CrashPoint.SESSIONS_ENDED, node=node.id)

    in_parallel(close, primaries)
    in_parallel(clear, primaries)
    # Read-only sessions may commit what is prepared. Of new transactions none writes, so none is waited for.
    await_prepared(sessions, wait_seconds, progress, "the last cut")
    return sessions.ask_primaries(_insert_position)


def check_final(plan: CutPlan, made: MadeCut, ends: Mapping[str, Lsn], sessions: Sessions, store: ObjectStore) -> None:
    """Raise FinalStateError if anything was written after `ends`, which `end_writes` gave; none: do nothing.

    What comes next is the commit.
    """
    for node, end in ends.items():
        task = plan.tasks[node]
        undecided = made.record.of(node).undecided
        if undecided:
            gids = ", ".join(repr(one.global_id) for one in undecided)
            raise _not_final_error(task.node, f"{gids} is prepared and not decided", [])
        numbers: set[int] = set()
        for segment in made.segments[node]:
            if segment.through > end:
                numbers |= read_changed_groups(store, segment, end)
        if numbers:
            names = sorted({one.group.name for one in task.versions if one.group.number in numbers})
            raise _not_final_error(task.node, f"{', '.join(names)} was written when all writes were to be over", names)

    def check(node: str) -> None:
        with raising_unreachable(plan.tasks[node].node):
            _check_unwritten(sessions.connections[node], plan.tasks[node], made.record.of(node).finish)
            frozen = read_frozen(sessions.connections[node])
        if frozen is None or frozen.operation != plan.operation:
            raise _not_final_error(plan.tasks[node].node, "somebody has let it accept writes again", [])

    in_parallel(check, ends)


def _insert_position(connection: psycopg.Connection[Any]) -> Lsn:
    (position,) = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("0/0",)
    return Lsn.parse(position)


def _check_unwritten(connection: psycopg.Connection[Any], task: DrainTask, finish: Lsn) -> None:
    """That the slot has no change after the cut either."""
    names = ",".join(f'"{name}"' for name in task.publications)
    deadline = time.monotonic() + SLOT_SECONDS_MAX
    while True:
        try:
            row = connection.execute(WRITTEN_QUERY, (task.slot, names, str(finish))).fetchone()
            break
        except psycopg.errors.ObjectInUse:
            # The session of the drain has a moment to end.
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    if row and row[0]:
        raise _not_final_error(task.node, f"{row[0]} changes were made after the cut", [])


def _not_final_error(node: Node, what: str, groups: list[str]) -> FinalStateError:
    return FinalStateError(
        f"node {node.id}: {what}: the snapshot would not be the final state",
        hint="find who sets default_transaction_read_only or transaction_read_only itself (SET, BEGIN READ WRITE,"
        " options of a connection string), stop that, and repeat",
        details={"node": node.id, "groups": groups},
    )
