"""A base copy's slots and exported snapshots, the sessions that read them, and the transactions that the copy misses.

A copy shows the transactions committed before its position. Changes committed later are decoded from that position on,
except those made by a transaction that was prepared before the position and is decided after it: such a transaction is
decoded at its PREPARE. Creating the copy's slot waits for all transactions in progress, so only transactions that begin
while it waits are affected. The commit names those that changed the copied tables, and their changes count.

A full snapshot keeps its slots for the chain's WAL. An increment drops the slots that it created to copy tables.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.config import Fleet, Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import name_nodes
from cutline.fleet.progress import Progress
from cutline.nodes.connections import NodeUnreachableError, connect, refuse_views, unreachable_error
from cutline.nodes.relation_locks import bound_lock_waits, locked_error
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.ddl.attempts import ChangedError
from cutline.snapshots.ddl.fingerprint import are_same_objects, read_again
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import ExportedSlot, create_exported_slot, drop_slots
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import (
    COMMIT_PREPARED,
    PREPARE,
    ROLLBACK_PREPARED,
    SEGMENT_SCHEMA,
    read_events,
    read_positions_and_groups,
)

# Each slot that is being created takes two threads. PostgreSQL may wait for transactions on every node, so there are
# more than THREADS_MAX; with one for each node, a fleet of 2,000 nodes would reach the usual limits on threads (4,096).
SLOTS_AT_ONCE = 256
# The events of so many segments are in memory.
READ_AT_ONCE = 4


@contextmanager
def open_exported(node: Node, exported: str) -> Iterator[psycopg.Connection[Any]]:
    """Open a read-only session on `node` in the snapshot `exported` for the block.

    Raises RelationLockedError if a wait for a lock takes too long, and NodeUnreachableError for any other server or
    libpq error, including errors within the block. A snapshot disappears with the session that exported it, for example
    when the server restarts.
    """
    try:
        with connect(node) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{exported}'".encode())
            bound_lock_waits(connection)
            refuse_views(connection)
            yield connection
    except psycopg.errors.LockNotAvailable as error:
        raise locked_error(node, "reading the catalogs", None) from error
    except psycopg.Error as error:
        raise unreachable_error(node, error) from error


def find_prepared(store: ObjectStore, segments: Iterable[Segment], position: Lsn) -> dict[Lsn, str]:
    """Return the transactions that had been prepared but not decided at `position`: their gids or global ids.

    They are keyed by the positions of their PREPAREs, ascending. The segments are all of a node's that are archived.
    """
    early, decided = [SEGMENT_SCHEMA.empty_table()], [np.zeros(0, np.int64)]
    for segment in segments:
        events = read_events(store, segment).cast(SEGMENT_SCHEMA)
        op, xid = to_numpy(events["op"]), to_numpy(events["xid"])
        is_decision = np.isin(op, (COMMIT_PREPARED, ROLLBACK_PREPARED)) & (to_numpy(events["end_lsn"]) <= position)
        decided.append(xid[is_decision])
        # A transaction that was prepared before the slot was created is decoded, and archived, only when it is decided.
        early.append(events.filter(to_mask((op == PREPARE) & (to_numpy(events["lsn"]) < position))))
    prepared = pa.concat_tables(early)
    late = prepared.filter(to_mask(~np.isin(to_numpy(prepared["xid"]), np.concatenate(decided))))
    rows = late.sort_by("lsn").select(["lsn", "global_id"]).to_pylist()
    return {Lsn(row["lsn"]): str(row["global_id"]) for row in rows}


def find_prepared_at(
    store: ObjectStore, segments: Iterable[Segment], positions: Iterable[Lsn]
) -> dict[Lsn, tuple[Lsn, ...]]:
    """Return the positions of the PREPAREs of `find_prepared` for several positions, reading each segment once.

    No transaction may have been prepared before the archive begins and decided after one of the positions.
    """
    waiting = sorted(set(positions))
    found: dict[Lsn, tuple[Lsn, ...]] = dict.fromkeys(waiting, ())
    xids, lsns = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for segment, table in _read_ahead(store, list(segments)):
        events = table.cast(SEGMENT_SCHEMA)
        op, xid, lsn, end = (to_numpy(events[name]) for name in ("op", "xid", "lsn", "end_lsn"))
        is_decision, is_prepare = np.isin(op, (COMMIT_PREPARED, ROLLBACK_PREPARED)), op == PREPARE
        xids, lsns = np.concatenate([xids, xid[is_prepare]]), np.concatenate([lsns, lsn[is_prepare]])
        for position in (one for one in waiting if segment.after < one <= segment.through):
            late = (lsns < position) & ~np.isin(xids, xid[is_decision & (end <= position)])
            found[position] = tuple(Lsn(one) for one in np.sort(lsns[late]).tolist())
        is_open = ~np.isin(xids, xid[is_decision])
        xids, lsns = xids[is_open], lsns[is_open]
    return found


def _read_ahead(store: ObjectStore, segments: Sequence[Segment]) -> Iterator[tuple[Segment, pa.Table]]:
    """Yield the segments with their events, and read a few at once: small ones take less time than their requests."""
    with ThreadPoolExecutor(READ_AT_ONCE) as threads:
        for first in range(0, len(segments), READ_AT_ONCE):
            batch = segments[first : first + READ_AT_ONCE]
            yield from zip(batch, threads.map(partial(read_events, store), batch), strict=True)


def find_changed_groups(
    store: ObjectStore, segments: Sequence[Segment], prepared: Collection[Lsn], numbers: Collection[int]
) -> dict[Lsn, frozenset[int]]:
    """Return which of the groups `numbers` the transactions prepared at these positions changed.

    Transactions that changed none of them are omitted. The segments are those of `find_prepared`.
    """
    begin = min((segment.after for segment in segments), default=ORIGIN)
    found: dict[Lsn, set[int]] = {}
    for segment in segments:
        # A transaction from before the archive was decoded when it was decided: it may be in any segment.
        wanted = [lsn for lsn in prepared if segment.contains(lsn) or lsn < begin]
        if not segment.changes or not wanted:
            continue
        lsn, group = read_positions_and_groups(store, segment)
        of_numbers = np.isin(group, list(numbers))
        for one in wanted:
            if changed := np.unique(group[of_numbers & (lsn == one)]).tolist():
                found.setdefault(one, set()).update(changed)
    return {lsn: frozenset(groups) for lsn, groups in sorted(found.items())}


@contextmanager
def export_snapshots(
    fleet: Fleet, nodes: Sequence[Node], name: str, wait_seconds: float, progress: Progress, *, is_kept: bool = False
) -> Iterator[dict[str, ExportedSlot]]:
    """Create the slot `name` on all `nodes`; yield the slots by node id. Their exported snapshots last for the block.

    If the slot `is_kept` for a chain, it gets the FAILOVER property where fleet.toml says so.

    Raises NoFreeSlotError, NodeUnreachableError, and, if it takes longer than `wait_seconds`, SlotWaitError or
    SlotSnapshotError.
    """
    progress.step("slots", total=len(nodes), unit="nodes")
    abandoned = threading.Event()
    futures: list[Future[None]] = []
    made: dict[str, ExportedSlot] = {}
    problems: list[BaseException] = []

    def create(node: Node) -> None:
        if abandoned.is_set():
            return
        try:
            primary = fleet.node(node.shard)
            has_failover = is_kept and fleet.has_failover_slots(node)
            made[node.id] = create_exported_slot(
                node, primary, name, wait_seconds, progress, abandoned, has_failover=has_failover
            )
            progress.advance(1)
            progress.reached(CrashPoint.SLOT_MADE, node=node.id)
        except BaseException as error:  # noqa: BLE001  # raised below, once all threads have ended
            # Stop the other threads now: they may wait for a long time, and then fail for a less important reason.
            problems.append(error)
            abandoned.set()

    with ExitStack() as stack:
        stack.callback(_close_made, futures, made)
        with ThreadPoolExecutor(max_workers=min(len(nodes), SLOTS_AT_ONCE)) as threads:
            try:
                # An interrupt does not stop threads that have already started.
                for node in nodes:
                    futures.append(threads.submit(create, node))
                # Wait without asking for results: raising a thread's error here would hide an interrupt that is handled
                # later.
                wait(futures)
            except BaseException:
                # The executor waits for all threads that have started.
                abandoned.set()
                raise
        if problems:
            raise problems[0]
        yield {node.id: made[node.id] for node in nodes}


def _close_made(futures: Sequence[Future[None]], made: Mapping[str, ExportedSlot]) -> None:
    # A second interrupt may have ended the executor's wait while a slot was still being created.
    wait(futures)
    for slot in made.values():
        slot.connection.close()


def insert_position(connection: psycopg.Connection[Any]) -> Lsn:
    """Return the position in a primary's WAL after which all later records begin."""
    (position,) = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("0/0",)
    return Lsn.parse(position)


def check_exported(nodes: Sequence[Node], slots: Mapping[str, ExportedSlot], fingerprints: Mapping[str, str]) -> None:
    """Raise ChangedError unless the catalogs in all exported snapshots match the `fingerprints`, by shard.

    Otherwise the copied rows would not match the definitions in the commit.
    """

    def check(node: Node) -> None:
        with open_exported(node, slots[node.id].snapshot) as connection:
            fingerprint = read_again(connection, fingerprints[node.shard])
        if not are_same_objects(fingerprint, fingerprints[node.shard]):
            text = f"node {node.id}: DDL was committed while the base copy was starting"
            raise ChangedError(text, {node.shard: set()})

    in_parallel(check, nodes)


def drop_copy_slots(nodes: Sequence[Node], name: str, progress: Progress) -> None:
    """Drop the slot `name` on all nodes; raise NodeUnreachableError if a slot remains."""
    if left := drop_slots(nodes, name):
        # The next command drops the slot when it settles this operation.
        raise NodeUnreachableError(
            f"{name_nodes(left)}: slot {name} could not be dropped",
            hint="check the server's log; the next create will drop the slot",
            details={"node": left[0]},
        )
    progress.reached(CrashPoint.COPY_SLOTS_DROPPED)
