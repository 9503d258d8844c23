"""Run the base copy as a Spark job: split large tables into page ranges, and combine small tables into tasks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.free_connections import task_sessions
from cutline.nodes.groups import Table
from cutline.nodes.left_out import find_planned_code
from cutline.nodes.sessions import Sessions
from cutline.snapshots.base_copy.copy_ranges import CopyDestination, CopyTask, PageRange, copy_ranges
from cutline.snapshots.records.commit import NamedObject
from cutline.spark.amount import Amount
from cutline.spark.spark_jobs import (
    Dealing,
    NodeShares,
    SparkSource,
    cores_of,
    limited_sessions,
    raise_first,
    run_tasks,
    shared_problem,
    start_session,
)

PAGE_BYTES = 8192
TASK_PAGES = 8192
# A task locks its tables until it ends, and a PostgreSQL server has room for only a few thousand locks.
TASK_TABLES = 500


@dataclass(frozen=True, slots=True)
class TableSource:
    """The tables to copy from one node, as its exported snapshot shows them.

    `undivided` contains the oids of tables that one session must copy whole, even if they are large.
    """

    node: Node
    exported: str
    tables: Sequence[Table]
    undivided: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PlannedRanges:
    """The ranges of one task, and the bytes of their pages."""

    ranges: tuple[PageRange, ...]
    size: int


def plan_ranges(
    tables: Sequence[Table], task_pages: int = TASK_PAGES, undivided: Container[int] = ()
) -> list[PlannedRanges]:
    """Divide the tables into tasks: a range of a large table, a whole table of `undivided`, or several small tables.

    The last range of a table has no upper bound, so that it includes pages added after the size was read.
    """
    planned: list[PlannedRanges] = []
    together: list[PageRange] = []
    pages_together = 0

    def end_task() -> None:
        nonlocal together, pages_together
        if together:
            planned.append(PlannedRanges(tuple(together), pages_together * PAGE_BYTES))
        together, pages_together = [], 0

    for table in sorted(tables, key=lambda table: (-table.size_bytes, table.group.name)):
        pages = -(-table.size_bytes // PAGE_BYTES)
        if pages > task_pages and table.oid in undivided:
            planned.append(PlannedRanges((PageRange(table.group, table.oid),), pages * PAGE_BYTES))
            continue
        if pages > task_pages:
            bounds = [*range(0, pages - task_pages // 2, task_pages), None]
            for low, high in pairwise(bounds):
                page_range = PageRange(table.group, table.oid, low or 0, high)
                planned.append(
                    PlannedRanges((page_range,), ((pages if high is None else high) - page_range.low) * PAGE_BYTES)
                )
            continue
        if pages_together + pages > task_pages or len(together) == TASK_TABLES:
            end_task()
        together.append(PageRange(table.group, table.oid))
        pages_together += pages
    end_task()
    return planned


def task_pages_for(sources: Sequence[TableSource], tasks_max: int) -> int:
    """Return the number of pages per task with which copying `sources` takes at most about `tasks_max` tasks."""
    pages = sum(table.size_bytes for source in sources for table in source.tables) // PAGE_BYTES
    return max(TASK_PAGES, -(-pages // tasks_max))


def amount_to_copy(nodes: Iterable[Node], tables: Mapping[str, Sequence[Table]]) -> Amount:
    """Return the amount of work with copying the `tables` of each shard from its `nodes`."""
    chosen = (table for node in nodes for table in tables.get(node.shard, ()))
    return Amount(sum(table.size_bytes + table.toast_bytes for table in chosen))


def plan_copy(sources: Sequence[TableSource], destination: CopyDestination, tasks_max: int) -> list[CopyTask]:
    """Return the tasks that copy all sources, alternating between nodes; there may be a few more than `tasks_max`."""
    task_pages = task_pages_for(sources, tasks_max)
    queues = [(source, plan_ranges(source.tables, task_pages, source.undivided)) for source in sources]
    tasks: list[CopyTask] = []
    for turn in range(max((len(planned) for _, planned in queues), default=0)):
        for source, planned in queues:
            if turn < len(planned):
                ranges = planned[turn]
                tasks.append(
                    CopyTask(source.node, len(tasks), source.exported, ranges.ranges, destination, ranges.size)
                )
    return tasks


def copy_tables(
    sources: Sequence[TableSource],
    destination: CopyDestination,
    sessions: Sessions,
    spark: SparkSource,
    progress: Progress,
) -> list[NamedObject]:
    """Copy the tables from all sources in a Spark job; return the stored objects, or lists of them.

    Raises the first error that a task reports; the job is cancelled if a node stops responding.
    """
    session = start_session(spark, progress)
    sources = [_with_undivided(source, sessions.connections[source.node.id]) for source in sources]
    tasks = plan_copy(sources, destination, cores_of(session).lanes_max)
    progress.step("copy", total=len(tasks), unit="tasks")
    limited = limited_sessions(session, task_sessions(sessions.by_node))
    dealing = Dealing[CopyTask](lambda task: task.size, lambda task: (task.node.id,), limited)
    shares = NodeShares[CopyTask].of_tasks(progress, tasks, lambda task: task.node.id, lambda task: task.size)
    shares.begin()
    reports = run_tasks(session, copy_ranges, tasks, shares, dealing, sessions.watch, shared_problem)
    raise_first([report.problem for report in reports])
    progress.reached(CrashPoint.BASE_COPIED)
    return [entry for report in reports for entry in report.entries]


def _with_undivided(source: TableSource, connection: psycopg.Connection[Any]) -> TableSource:
    """Set `undivided` to the large tables that no query may read (nodes/left_out.py)."""
    large = [table.oid for table in source.tables if table.size_bytes > TASK_PAGES * PAGE_BYTES]
    with raising_unreachable(source.node):
        return replace(source, undivided=find_planned_code(connection, large))
