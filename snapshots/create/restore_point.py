"""Take a restore point: a full snapshot without tables. Its commit contains a cut; its archives contain only events.

Its slots are dropped before the commit, so it retains no WAL and can't have increments. As with a full snapshot,
PostgreSQL waits for older transactions when a slot is created, and the cut waits for older prepared transactions, each
for up to `--wait` seconds. There is little to decode, so Spark is not needed.
"""

from __future__ import annotations

import time
from functools import partial

from msgspec import Struct, structs

from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.progress import Progress, StepTimes
from cutline.nodes.clocks import check_clocks
from cutline.nodes.preconditions import find_node_problems
from cutline.nodes.problems import refuse_unfit
from cutline.nodes.publications import check_exists, publication_names
from cutline.nodes.read_only import check_terminal
from cutline.nodes.sessions import Sessions, open_sessions
from cutline.snapshots.base_copy.copy_slots import drop_copy_slots, export_snapshots, insert_position
from cutline.snapshots.create.context import CreateContext, CreateRequest, begin_full, counted_full, undo_create
from cutline.snapshots.create.make_cut import ArchivedCut, CutPlan, LastCut, make_cut
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.snapshots.operations.committing import check_stored
from cutline.snapshots.operations.majority import read_newest_record, read_recorded_servers
from cutline.snapshots.operations.old_primaries import check_timelines
from cutline.snapshots.operations.operation import check_exclusive, commit_operation, record_operation
from cutline.snapshots.operations.slot_guard import how_to_free_slots, preview_guard
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.proven_chains import check_name, free_turn
from cutline.snapshots.records.store_identity import check_takes_snapshots, read_identity
from cutline.snapshots.records.tombstones import ANOTHER_NAME, check_not_deleted
from cutline.storage.store import ObjectStore
from cutline.wal.drain.drain_task import DrainTask
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.own_store import check_own_store


class RestorePointPlan(Struct, frozen=True):
    """The primaries on which a restore point is taken, and the fleet's id."""

    nodes: tuple[str, ...]
    fleet_id: str


def create_restore_point(fleet: Fleet, request: CreateRequest, progress: Progress) -> FullSnapshot:
    """Take the restore point and return its commit."""
    began, progress = time.monotonic(), StepTimes(progress)
    progress.step("check nodes")
    store = fleet.store.open()
    with open_sessions(fleet, fleet.primaries, known=lambda: read_recorded_servers(store)) as sessions:
        check_clocks(sessions.clocks, progress)
        plan = _plan(fleet, request, sessions, store)
        progress.reached(CrashPoint.CHECKED)
        with begin_full(sessions, store, request, plan.fleet_id, progress) as context:
            operation, slot = context.operation, slot_name(context.operation.id)
            with record_operation(store, operation, lambda: undo_create(context, [slot], progress), progress):
                commit = _take(context, plan, progress, began)
            progress.reached(CrashPoint.OUTCOME_STORED)
    progress.reached(CrashPoint.RELEASED)
    return commit


def preview_restore_point(fleet: Fleet, request: CreateRequest, progress: Progress) -> RestorePointPlan:
    """Run every check for a restore point without changing anything."""
    progress.step("check nodes")
    store = fleet.store.open()
    with open_sessions(fleet, fleet.primaries, known=lambda: read_recorded_servers(store)) as sessions:
        check_clocks(sessions.clocks, progress)
        plan = _plan(fleet, request, sessions, store)
        check_timelines(sessions, read_newest_record(store))
        preview_guard(store, sessions, None, progress)
        check_terminal(sessions, plan.fleet_id, progress, terminal=False)
        return plan


def _plan(fleet: Fleet, request: CreateRequest, sessions: Sessions, store: ObjectStore) -> RestorePointPlan:
    check_name(request.name)
    identity = read_identity(store, fleet)
    check_takes_snapshots(identity, store)
    check_not_deleted(store, request.name, ANOTHER_NAME)
    free_turn(store, request.name, 0)
    refuse_unfit(find_node_problems(sessions, partial(how_to_free_slots, store)))
    _, of_inserts = publication_names(identity.fleet_id)
    sessions.ask_named_primaries(lambda node, connection: check_exists(connection, node.id, of_inserts))
    return RestorePointPlan(tuple(node.id for node in sessions.nodes), identity.fleet_id)


def _take(context: CreateContext, plan: RestorePointPlan, progress: Progress, began: float) -> FullSnapshot:
    """Create slots, make the cut, drop the slots, and commit; `began` is when the command started (time.monotonic)."""
    progress.reached(CrashPoint.INTENT_STORED)
    sessions, operation, request = context.sessions, context.operation, context.request
    slot = slot_name(operation.id)
    with export_snapshots(context.fleet, sessions.nodes, slot, request.wait_seconds, progress) as slots:
        base = {node: exported_slot.position for node, exported_slot in slots.items()}
        slots_complete_at = sessions.ask_primaries(insert_position)
    progress.reached(CrashPoint.SNAPSHOTS_RELEASED)
    await_prepared(sessions, request.wait_seconds, progress)
    progress.reached(CrashPoint.PREPARED_OVER)
    cut = make_cut(context.lock, _plan_cut(context, plan, base), None, context.store, progress)
    drop_copy_slots(sessions.nodes, slot, progress)
    progress.step("commit")
    commit = _build_commit(context, plan, base, cut, time.monotonic() - began)
    commit = structs.replace(commit, slots_complete_at=slots_complete_at)
    check_own_store(context.store, plan.fleet_id)
    check_stored(context.store, commit.object_sizes)
    check_exclusive(context.lock, context.store, operation)
    commit_operation(context.store, operation, commit)
    progress.ending()
    progress.reached(CrashPoint.COMMITTED)
    return commit


def _plan_cut(context: CreateContext, plan: RestorePointPlan, base: dict[str, Lsn]) -> CutPlan:
    operation = context.operation
    # Transaction events and markers are decoded with any publication. This one has the fewest tables, usually none.
    # Inserts into them don't belong to any group and are dropped.
    _, of_inserts = publication_names(plan.fleet_id)
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=slot_name(operation.id),
            publications=(of_inserts,),
            snapshot=operation.snapshot,
            archive=operation.id,
            operation=operation.id,
            definitions=(),
            global_id_form=context.fleet.global_id,
            base=base[node.id],
            last=None,
            finish=ORIGIN,
            store=context.fleet.store,
            fleet_id=plan.fleet_id,
        )
        for node in context.sessions.nodes
    }
    last_cut, request = {node: LastCut(position) for node, position in base.items()}, context.request
    return CutPlan(operation.id, operation.id, tasks, last_cut, {}, request.retries, None, request.wait_seconds)


def _build_commit(
    context: CreateContext, plan: RestorePointPlan, base: dict[str, Lsn], cut: ArchivedCut, seconds: float
) -> FullSnapshot:
    operation, sessions = context.operation, context.sessions
    commit = FullSnapshot(
        snapshot=operation.snapshot,
        increment=0,
        operation=operation.id,
        chain=operation.id,
        created_at=operation.began_at,
        seconds=round(seconds, 3),
        comment=context.request.comment,
        counts={},
        cut=cut.record,
        sequences={node: () for node in plan.nodes},
        segments=cut.segments,
        left_out=(),
        fleet_id=plan.fleet_id,
        global_id_form=context.fleet.global_id,
        baseline=tuple(sessions.identities.values()),
        groups={node: () for node in plan.nodes},
        base=base,
        copied=(),
        roles={node: () for node in plan.nodes},
        rules=GroupRules(),
        tables={},
        fingerprints={},
        only_cut=True,
    )
    return counted_full(commit, cut.ignored)
