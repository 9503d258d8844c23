"""Take a full snapshot: make every check before anything is changed, then let `full_attempt` do the work.

Nothing here needs Arrow or Spark. Both are imported only after the checks have passed, so a refusal comes at once.
"""

from __future__ import annotations

import time

from fleet.config import Fleet
from fleet.nodes.clocks import check_clocks
from fleet.nodes.collation_versions import note_collation_versions
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from fleet.step_times import StepTimes
from snapshots.create.context import begin_full, undo_create
from snapshots.create.full_plan import choose_nodes, plan_full
from snapshots.create.request import CreateRequest
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.operation import record_operation
from snapshots.records.commit import Commit
from snapshots.tasks.spark_jobs import SparkSource
from wal.slots.slots import slot_name


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
            from snapshots.create.full_attempt import take_full

            with record_operation(store, operation, lambda: undo_create(sessions, operation, slot, progress), progress):
                commit = take_full(context, plan, spark, progress, began)
            progress.reached(CrashPoint.OUTCOME_STORED)
    progress.reached(CrashPoint.RELEASED)
    return commit
