"""Take a full snapshot: make every check before anything is changed, then let `full_attempt` do the work.

Nothing here needs Arrow or Spark. Both are imported only after the checks have passed, so a refusal comes at once.
"""

from __future__ import annotations

import time

from msgspec import UNSET, structs

from fleet.config import Fleet
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from fleet.read_only.resume import check_terminal
from snapshots.create.context import CreateContext, undo_create
from snapshots.create.full_plan import choose_nodes, plan_full
from snapshots.create.request import CreateRequest
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.exclusive import exclusive
from snapshots.operations.operation import Operation, new_operation, record_operation
from snapshots.operations.settling import settle_operations
from snapshots.operations.slot_guard import guard_nodes
from snapshots.operations.spark_jobs import SparkSource
from snapshots.records.commit import Commit
from snapshots.records.commits import free_turn
from snapshots.records.tombstones import check_not_deleted
from wal.slots.slots import slot_name


def create_full(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the full snapshot and return its commit."""
    began = time.monotonic()
    progress.step("check nodes")
    store = fleet.store.open()
    nodes = choose_nodes(fleet, only_primary=request.only_primary)
    with open_sessions(fleet, nodes) as sessions:
        plan = plan_full(fleet, request, sessions, store)
        progress.reached(CrashPoint.CHECKED)
        with exclusive(sessions, store, "create", request.name) as lock:
            progress.reached(CrashPoint.LOCKED)
            settle_operations(store, fleet, progress)
            progress.reached(CrashPoint.SETTLED)
            check_not_deleted(store, request.name)
            guard_nodes(store, sessions, progress)
            progress.reached(CrashPoint.GIVEN_UP)
            check_terminal(sessions, plan.selection.fleet_id, progress, terminal=request.terminal)
            intent = new_operation("create", request.name, 0, tuple(node.id for node in plan.nodes))
            slot = slot_name(intent.id)
            # Settling may have used a turn.
            turn, terminal = free_turn(store, request.name, 0), request.terminal or UNSET
            operation = Operation(
                structs.replace(intent, slot=slot, turn=turn, terminal=terminal, fleet_id=plan.selection.fleet_id)
            )
            context = CreateContext(request, store, operation, lock)
            spark.begin()
            progress.reached(CrashPoint.SPARK_BEGUN)
            from snapshots.create.full_attempt import take_full

            with record_operation(store, operation, lambda: undo_create(sessions, operation, slot, progress), progress):
                commit = take_full(context, plan, spark, progress, began)
            progress.reached(CrashPoint.OUTCOME_STORED)
    progress.reached(CrashPoint.RELEASED)
    return commit
