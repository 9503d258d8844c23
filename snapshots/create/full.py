"""Take a full snapshot: make every check before anything is changed, then let `full_attempt` do the work.

Nothing here needs Arrow or Spark. Both are imported only after the checks have passed, so a refusal comes at once.
"""

from __future__ import annotations

import time

from cutline.fleet.config import Fleet
from cutline.fleet.nodes.clocks import check_clocks
from cutline.fleet.nodes.collation_versions import note_collation_versions
from cutline.fleet.nodes.sessions import open_sessions
from cutline.fleet.progress import Progress
from cutline.fleet.step_times import StepTimes
from cutline.snapshots.create.context import begin_full, undo_create
from cutline.snapshots.create.full_plan import choose_nodes, plan_full
from cutline.snapshots.create.request import CreateRequest
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.operations.operation import record_operation
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.tasks.spark_jobs import SparkSource
from cutline.wal.slots.slots import slot_name


def create_full(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the full snapshot and return its commit."""
    began, progress = time.monotonic(), StepTimes(progress)
    progress.step("check nodes")
    store = fleet.store.open()
    nodes = choose_nodes(fleet, only_primary=request.only_primary)
    with open_sessions(fleet, nodes) as sessions:
        check_clocks(sessions.clocks, progress)
        plan = plan_full(fleet, request, sessions, store)
        note_collation_versions(sessions, progress)
        progress.reached(CrashPoint.CHECKED)
        with begin_full(sessions, store, request, plan.selection.fleet_id, progress) as context:
            operation, slot = context.operation, slot_name(context.operation.id)
            spark.begin(context.executor_needs, progress)
            progress.reached(CrashPoint.SPARK_BEGUN)
            from cutline.snapshots.create.full_attempt import take_full

            with record_operation(store, operation, lambda: undo_create(sessions, operation, slot, progress), progress):
                commit = take_full(context, plan, spark, progress, began)
            progress.reached(CrashPoint.OUTCOME_STORED)
    progress.reached(CrashPoint.RELEASED)
    return commit
