"""Take an increment: make every check before anything is changed, then let `increment_attempt` do the work.

As in `snapshots.create.full`, nothing here needs Arrow or Spark.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, structs

from cutline.fleet.config import Fleet
from cutline.fleet.nodes.clocks import check_clocks
from cutline.fleet.nodes.free_connections import check_free_connections
from cutline.fleet.nodes.sessions import Sessions, open_sessions
from cutline.fleet.progress import Progress
from cutline.fleet.read_only.resume import check_terminal
from cutline.fleet.step_times import StepTimes
from cutline.fleet.tables.left_out import LeftOut, read_left_out
from cutline.snapshots.create.append_only_counters import (
    check_append_only,
    last_commit_label,
    states_to_compare,
    with_warnings,
)
from cutline.snapshots.create.context import CreateContext, undo_create
from cutline.snapshots.create.continuable import check_continuable, check_fleet_file, plan_next, rules_since
from cutline.snapshots.create.request import CreateRequest
from cutline.snapshots.ddl.table_changes import NodeTables, known_tables, report_changes
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.operations.exclusive import exclusive
from cutline.snapshots.operations.operation import Operation, OutcomeDetails, new_operation, record_operation
from cutline.snapshots.operations.settling import note_restores, settle_operations
from cutline.snapshots.operations.slot_guard import guard_nodes, preview_guard
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.chains import check_has_rows, read_chain, read_newest_part
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.commits import check_not_pruned, free_turn
from cutline.snapshots.records.cut_times import cut_time
from cutline.snapshots.records.large_objects import with_large_object_counts
from cutline.snapshots.records.lost_chains import check_not_lost
from cutline.snapshots.records.store_identity import check_of_fleet, read_identity
from cutline.snapshots.tasks.spark_jobs import SparkSource
from cutline.wal.slots.retained import is_little, read_waiting
from cutline.wal.slots.slots import copy_slot_name, slot_name

ANOTHER = "take another one under another name: snapshot create NAME --only-cut"


@dataclass(frozen=True, slots=True)
class IncrementPlan:
    """What an increment would hold: the bytes of WAL to decode by node, and what it leaves out of the databases."""

    wal_bytes: Mapping[str, int]
    left_out: tuple[LeftOut, ...]


def create_increment(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the next increment of the snapshot and return its commit."""
    began, progress = time.monotonic(), StepTimes(progress)
    progress.step("check the chain")
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    chain = read_chain(store, request.name, 0)
    check_of_fleet(chain, identity)
    check_has_rows(chain, ANOTHER)
    nodes = check_fleet_file(fleet, chain)
    check_not_pruned(store, request.name)
    with (
        open_sessions(fleet, nodes) as sessions,
        exclusive(sessions, store, "create", request.name) as lock,
    ):
        progress.reached(CrashPoint.LOCKED)
        note_restores(settle_operations(store, fleet, progress), sessions, progress)
        progress.reached(CrashPoint.SETTLED)
        # Read again under the lock: from here on no other command adds an increment.
        chain = read_newest_part(store, request.name)
        check_clocks(sessions.clocks, progress, cut_time(chain.last))
        check_not_pruned(store, request.name)
        guard_nodes(store, sessions, progress)
        check_free_connections(sessions.by_node)
        progress.reached(CrashPoint.GIVEN_UP)
        check_not_lost(store, chain)
        node_tables = check_continuable(store, sessions, chain)
        check_terminal(sessions, chain.full.fleet_id, progress, terminal=request.terminal)
        progress.reached(CrashPoint.CHECKED)
        number = chain.last.increment + 1
        intent = new_operation("create", request.name, number, tuple(node.id for node in nodes))
        intent = structs.replace(
            intent,
            turn=free_turn(store, request.name, number),
            terminal=request.terminal or UNSET,
            fleet_id=chain.full.fleet_id,
        )
        operation = Operation(intent, details=OutcomeDetails(times=progress))
        context, slot = CreateContext(request, store, operation, lock), copy_slot_name(operation.id)
        if _needs_spark(chain, node_tables, sessions):
            spark.begin(context.executor_needs, progress)
            progress.reached(CrashPoint.SPARK_BEGUN)
        from cutline.snapshots.create.increment_attempt import take_increment

        with record_operation(store, operation, lambda: undo_create(sessions, operation, slot, progress), progress):
            commit = take_increment(context, chain, node_tables, spark, progress, began)
        progress.reached(CrashPoint.OUTCOME_STORED)
    progress.reached(CrashPoint.RELEASED)
    return commit


def _needs_spark(chain: Chain, node_tables: Mapping[str, NodeTables], sessions: Sessions) -> bool:
    """Whether tables have to be copied, or more than little WAL archived, as far as can be known before the cut."""
    plan = plan_next(chain, node_tables)
    waiting = read_waiting(sessions, slot_name(chain.full.operation))
    return bool(plan.unpublished or plan.to_copy) or not is_little(waiting)


def preview_increment(fleet: Fleet, request: CreateRequest, progress: Progress) -> IncrementPlan:
    """Make every check of an increment and return what it would hold, changing nothing."""
    progress.step("check the chain")
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    chain = read_newest_part(store, request.name)
    check_of_fleet(chain, identity)
    check_has_rows(chain, ANOTHER)
    check_not_pruned(store, request.name)
    with open_sessions(fleet, check_fleet_file(fleet, chain)) as sessions:
        check_clocks(sessions.clocks, progress, cut_time(chain.last))
        check_free_connections(sessions.by_node)
        check_not_lost(store, chain)
        preview_guard(store, sessions, chain.full.chain, progress)
        plan = plan_next(chain, check_continuable(store, sessions, chain))
        report_changes(plan, progress)
        unknown = check_append_only(sessions, states_to_compare(plan, known_tables(chain)), last_commit_label(chain))
        check_terminal(sessions, chain.full.fleet_id, progress, terminal=request.terminal)
        waiting = read_waiting(sessions, slot_name(chain.full.operation))
        groups = {shard: one.groups for shard, one in plan.shards.items()}
        left_out = read_left_out(sessions.primaries, rules_since(chain, fleet), groups)
        left_out = with_large_object_counts(left_out, chain.full) + chain.too_old
        return IncrementPlan(waiting, with_warnings(left_out, chain, unknown))
