"""The Spark job that copies tables."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.nodes.watch import Watch
from fleet.progress import Progress
from snapshots.base_copy.copy_ranges import CopyTask, copy_ranges
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.spark_jobs import SparkSource, raise_first, run_tasks, start_session
from snapshots.records.commit import StoredObject


def copy_tables(tasks: Sequence[CopyTask], spark: SparkSource, progress: Progress, watch: Watch) -> list[StoredObject]:
    """Run the tasks and return the objects that they stored; raise the first error that a task reports.

    The job is cancelled if `watch` finds a node silent.
    """
    session = start_session(spark, progress)
    progress.step("copy", total=len(tasks), unit="tasks")
    reports = run_tasks(session, copy_ranges, tasks, progress, watch)
    raise_first([report.problem for report in reports])
    progress.reached(CrashPoint.BASE_COPIED)
    return [stored for report in reports for stored in report.objects]
