"""The Spark job that copies tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg

from cutline.fleet.nodes.connections import raising_unreachable
from cutline.fleet.nodes.free_connections import task_sessions
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.progress import Progress
from cutline.fleet.tables.planned_code import find_planned_code
from cutline.snapshots.base_copy.copy_plan import PAGE_BYTES, TASK_PAGES, TableSource, plan_copy
from cutline.snapshots.base_copy.copy_ranges import CopyTask, copy_ranges
from cutline.snapshots.base_copy.destination import CopyDestination
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.records.stored_object import NamedObject
from cutline.snapshots.tasks.dealing import Dealing, cores_of, limited_sessions
from cutline.snapshots.tasks.node_shares import NodeShares
from cutline.snapshots.tasks.spark_jobs import SparkSource, raise_first, run_tasks, start_session


def copy_tables(
    sources: Sequence[TableSource],
    destination: CopyDestination,
    sessions: Sessions,
    spark: SparkSource,
    progress: Progress,
) -> list[NamedObject]:
    """Copy the tables of all sources in a Spark job; return the objects that it stored, or lists of them.

    Raises the first error that a task reports; the job is cancelled if a node falls silent.
    """
    session = start_session(spark, progress)
    sources = [_with_undivided(source, sessions.connections[source.node.id]) for source in sources]
    tasks = plan_copy(sources, destination, cores_of(session).lanes_max)
    progress.step("copy", total=len(tasks), unit="tasks")
    limited = limited_sessions(session, task_sessions(sessions.by_node))
    dealing = Dealing[CopyTask](lambda task: task.size, lambda task: (task.node.id,), limited)
    shares = NodeShares[CopyTask].of_tasks(progress, tasks, lambda task: task.node.id, lambda task: task.size)
    shares.begin()
    reports = run_tasks(session, copy_ranges, tasks, shares, dealing, sessions.watch)
    raise_first([report.problem for report in reports])
    progress.reached(CrashPoint.BASE_COPIED)
    return [one for report in reports for one in report.entries]


def _with_undivided(source: TableSource, connection: psycopg.Connection[Any]) -> TableSource:
    """The source with its large tables that no query may read: see fleet/tables/planned_code.py."""
    large = [table.oid for table in source.tables if table.size_bytes > TASK_PAGES * PAGE_BYTES]
    with raising_unreachable(source.node):
        return replace(source, undivided=find_planned_code(connection, large))
