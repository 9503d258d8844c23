"""Terminal snapshots: the fleet stops accepting writes before the last cut, so that the cut is its final state.

The steps, in this order:

1. Wait for prepared transactions. This comes first, so that no session is ended if a transaction stays in doubt.
2. Make new sessions read-only on all primaries.
3. End all older sessions.
4. Wait for the transactions that those sessions left prepared.
5. Take each primary's WAL position, after which nothing may be written.
6. Make the cut.

A session can still turn off the read-only setting for itself. Therefore, before the commit, the archive and the slots
are searched for changes after those positions. If there is a change, or anything else fails, nothing is committed and
the fleet is made writable again (nodes/read_only.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.encodings import readable
from cutline.nodes.lock import FleetLock
from cutline.nodes.other_sessions import SessionsLeftError, end_sessions, sessions_text
from cutline.nodes.read_only import freeze, read_frozen
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.snapshots.base_copy.copy_slots import insert_position
from cutline.snapshots.create.absent_copies import COMMIT_QUERY
from cutline.snapshots.create.failover_slots import reading_failover_slots
from cutline.snapshots.create.make_cut import ArchivedCut, CutPlan
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.snapshots.operations.operation import Operation, check_exclusive
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.drain_task import DrainTask
from cutline.wal.segments.segments import read_changed_groups

TABLES_NAMED_MAX = 5
SLOT_SECONDS_MAX = 10.0
# The minimum wait for sessions to end, even if --wait is shorter: on a busy machine, ending them takes seconds.
SESSIONS_SECONDS_MIN = 5.0
POLL_SECONDS = 0.2
# Counts pgoutput's Insert, Update, Delete and Truncate messages, and names their tables, of Truncate only the first
# (PostgreSQL manual, "Logical Replication Message Formats").
WRITTEN_QUERY = f"""
WITH messages AS (
    SELECT data, chr(get_byte(data, 0)) AS kind
      FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '3', 'publication_names', %s)
     WHERE lsn >= %s::pg_lsn),
written AS (
    SELECT ('x' || encode(substring(data FROM CASE kind WHEN 'T' THEN 7 ELSE 2 END FOR 4), 'hex'))::bit(32)::bigint::oid
        AS relid FROM messages WHERE kind IN ('I', 'U', 'D', 'T'))
SELECT (SELECT count(*) FROM written), ARRAY(
    SELECT DISTINCT {readable("n.nspname || '.' || c.relname")}
      FROM written w JOIN pg_class c ON c.oid = w.relid JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY 1)
"""


class FinalStateError(RefusedError):
    """The cut is not the final state: something was written, or could have been written, after writes had ended."""


def end_writes(
    lock: FleetLock, store: ObjectStore, operation: Operation, fleet_id: str, wait_seconds: float, progress: Progress
) -> dict[str, Lsn]:
    """Make all primaries refuse writes; return the WAL positions after which nothing may be written, by primary.

    Raises SlotWaitError, SessionsLeftError, and the errors of `check_exclusive` if the operation has lost the fleet's
    lock or was settled as dead.
    """
    sessions = lock.sessions
    check_exclusive(lock, store, operation)
    primaries = [sessions.fleet.node(name) for name in sessions.primaries]
    progress.step("end writes", total=len(primaries), unit="nodes")

    wait = max(wait_seconds, SESSIONS_SECONDS_MIN)

    def make_read_only(node: Node) -> None:
        with raising_unreachable(node):
            freeze(node, sessions.connections[node.id], fleet_id, operation.id, operation.snapshot)
        progress.reached(CrashPoint.FROZEN, node=node.id)

    def end_older_sessions(node: Node) -> None:
        with raising_unreachable(node):
            _, left = end_sessions(node, sessions.connections[node.id], None, wait, progress)
        if left:
            raise SessionsLeftError(
                f"node {node.id}: sessions that can write did not end within {wait:g} s, or the role is not allowed to"
                f" end them: {sessions_text(left)}",
                hint="end them, or allow more time: --wait SECONDS",
                details={"node": node.id, "sessions": [session.details() for session in left]},
            )
        progress.advance(1)
        progress.reached(CrashPoint.SESSIONS_ENDED, node=node.id)

    in_parallel(make_read_only, primaries)
    in_parallel(end_older_sessions, primaries)
    # A read-only session can still commit prepared transactions, so wait for those as well. New transactions can't
    # write.
    await_prepared(sessions, wait_seconds, progress, "the last cut")
    return sessions.ask_primaries(insert_position)


def check_final(
    operation: Operation,
    plan: CutPlan,
    cut: ArchivedCut,
    ends: Mapping[str, Lsn],
    sessions: Sessions,
    store: ObjectStore,
    progress: Progress,
) -> None:
    """Raise FinalStateError if anything was written after `ends`, the positions that `end_writes` returned.

    Call this right before the commit. It does nothing if `ends` is empty, as it is for a snapshot that is not terminal.
    """
    for node, end in ends.items():
        task = plan.tasks[node]
        undecided = cut.record.of(node).undecided
        if undecided:
            gids = ", ".join(repr(transaction.global_id) for transaction in undecided)
            raise _not_final_error(
                task.node, f"prepared transactions were neither committed nor rolled back: {gids}", []
            )
        numbers: set[int] = set()
        for segment in cut.segments[node]:
            if segment.through > end:
                numbers |= read_changed_groups(store, segment, end)
        if numbers:
            names = sorted(
                {definition.group.name for definition in task.definitions if definition.group.number in numbers}
            )
            raise _not_final_error(
                task.node,
                f"tables were written to after all writes had been stopped: {list_some(names, TABLES_NAMED_MAX)}",
                names,
            )

    def check(node: str) -> None:
        with raising_unreachable(plan.tasks[node].node):
            _check_unwritten(sessions.connections[node], plan.tasks[node], cut.record.of(node).finish)
            frozen = read_frozen(plan.tasks[node].node, sessions.connections[node])
        if frozen is None or frozen.operation != operation.id:
            raise _not_final_error(plan.tasks[node].node, "it was made writable again before the commit", [])

    if not ends:
        return
    wait_seconds = min(plan.wait_seconds, sessions.fleet.standby_wait_seconds)
    written = sessions.ask_primaries(insert_position)
    with reading_failover_slots(sessions, next(iter(plan.tasks.values())).slot, written, wait_seconds, progress):
        in_parallel(check, ends)


def _check_unwritten(connection: psycopg.Connection[Any], task: DrainTask, finish: Lsn) -> None:
    names = ",".join(f'"{name}"' for name in task.publications)
    # The search ends at the last flushed byte. If that is in the middle of a record, it waits for the rest.
    connection.execute(COMMIT_QUERY)
    deadline = time.monotonic() + SLOT_SECONDS_MAX
    while True:
        try:
            row = connection.execute(WRITTEN_QUERY, (task.slot, names, str(finish))).fetchone()
            break
        except psycopg.errors.ObjectInUse:
            # The session that drained the slot may still be ending.
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    if row and row[0]:
        count, tables = row
        where = f" to {list_some(tables, TABLES_NAMED_MAX)}" if tables else ""
        raise _not_final_error(task.node, f"{count} changes were written{where} after the cut", tables)


def _not_final_error(node: Node, what: str, groups: list[str]) -> FinalStateError:
    return FinalStateError(
        f"node {node.id}: {what}: the snapshot would not be the final state",
        hint="find the client that sets default_transaction_read_only or transaction_read_only (SET, BEGIN READ WRITE,"
        " connection string options), stop it, and repeat the command",
        details={"node": node.id, "groups": groups},
    )
