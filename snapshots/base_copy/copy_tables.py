"""Run the base copy as a Spark job: split large tables into page ranges, and combine small tables into tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.config import Fleet, Node, read_limit
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.free_connections import task_sessions
from cutline.nodes.groups import Table
from cutline.nodes.left_out import find_planned_code
from cutline.nodes.sessions import Sessions
from cutline.snapshots.base_copy.copy_ranges import (
    PAGE_BYTES,
    CopyDestination,
    CopyReport,
    CopyTask,
    PageRange,
    copy_ranges,
)
from cutline.snapshots.records.commit import NamedObject
from cutline.spark.amount import Amount
from cutline.spark.spark_jobs import (
    Dealing,
    JobWatch,
    NodeShares,
    SparkSource,
    cores_of,
    raise_first,
    run_tasks,
    share_rate,
    shared_problem,
    start_session,
)
from cutline.storage.errors import ErrorReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_PAGES = 8192
# With a limit on the rate, a COPY reads this many pages of a table, and a job takes about ROUND_SECONDS: tasks are
# counted when their job ends, because a lane runs many of them.
PACED_PAGES, ROUND_SECONDS = 256, 30
# A task locks its tables until it ends, and a PostgreSQL server has room for only a few thousand locks.
TASK_TABLES = 500


class TableSource(Struct, frozen=True):
    """The tables to copy from one node, as its exported snapshot shows them.

    `undivided` contains the oids of tables that one session must copy whole, even if they are large. If it
    `is_for_primary`, the base copy is shared: its objects are stored for the node's primary.
    """

    node: Node
    exported: str
    tables: Sequence[Table]
    undivided: frozenset[int] = frozenset()
    is_for_primary: bool = False


class PlannedRanges(Struct, frozen=True):
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


def plan_copy(
    sources: Sequence[TableSource],
    destination: CopyDestination,
    tasks_max: int,
    bytes_per_second: float | None = None,
) -> list[CopyTask]:
    """Return the tasks that copy all sources, alternating between nodes; there may be a few more than `tasks_max`.

    `bytes_per_second` limits each task. With a limit, tasks read tables piece by piece, so that they can pause while
    they read pages that contain few rows.
    """
    task_pages = task_pages_for(sources, tasks_max)
    queues = [(source, plan_ranges(source.tables, task_pages, source.undivided)) for source in sources]
    tasks: list[CopyTask] = []
    for turn in range(max((len(planned) for _, planned in queues), default=0)):
        for source, planned in queues:
            if turn < len(planned):
                ranges, size = planned[turn].ranges, planned[turn].size
                if bytes_per_second is not None:
                    ranges = tuple(_in_pieces(ranges, source))
                tasks.append(
                    CopyTask(
                        source.node,
                        len(tasks),
                        source.exported,
                        ranges,
                        destination,
                        size,
                        bytes_per_second,
                        source.is_for_primary,
                    )
                )
    return tasks


def _in_pieces(ranges: Iterable[PageRange], source: TableSource) -> Iterator[PageRange]:
    """Divide the ranges into pieces of PACED_PAGES, except those of undivided tables."""
    pages = {table.oid: -(-table.size_bytes // PAGE_BYTES) for table in source.tables}
    for part in ranges:
        end = pages[part.oid] if part.high is None else part.high
        if part.oid in source.undivided:
            end = part.low
        bounds = [*range(part.low, max(end, part.low + 1), PACED_PAGES), part.high]
        yield from (replace(part, low=low or 0, high=high) for low, high in pairwise(bounds))


def rounds_of(tasks: Iterable[CopyTask], bytes_per_second: int | None) -> Iterator[list[CopyTask]]:
    """Divide the tasks into jobs that take about ROUND_SECONDS at this rate per node; without a limit, into one."""
    some: list[CopyTask] = []
    sizes = Counter[str]()
    for task in tasks:
        if bytes_per_second is not None and sizes[task.node.id] >= bytes_per_second * ROUND_SECONDS:
            yield some
            some, sizes = [], Counter()
        some.append(task)
        sizes[task.node.id] += task.size
    if some:
        yield some


class CopiedTables(Struct, frozen=True):
    """The stored objects of a base copy, or lists of them.

    `rewritten_on` has, by node, the oids of tables whose rows may be incomplete in its copy, because the table was
    rewritten while others were copied; `rewritten` has them by shard. Unless a TRUNCATE follows, they must be copied
    again.
    """

    entries: list[NamedObject]
    rewritten: Mapping[str, set[int]]
    rewritten_on: Mapping[str, set[int]]

    def list_rewritten(self, tables: Mapping[str, Iterable[Table]], fleet: Fleet) -> dict[str, tuple[Table, ...]]:
        """Return those of the `tables` of each shard that were rewritten, by node."""
        return {
            node: tuple(table for table in tables[fleet.node(node).shard] if table.oid in oids)
            for node, oids in self.rewritten_on.items()
        }


def copy_tables(
    sources: Sequence[TableSource],
    destination: CopyDestination,
    sessions: Sessions,
    spark: SparkSource,
    progress: Progress,
    watch: JobWatch | None = None,
    recover: Callable[[Exception], Iterable[TableSource]] | None = None,
) -> CopiedTables:
    """Copy the tables from all sources in a Spark job.

    Raises the first error that a task reports; the job is cancelled if a node stops responding, or as `watch` decides.

    With `recover`, a standby that the sessions may leave out does not end the copy. `recover` is called with the error:
    it raises that, or leaves the standby out and returns the sources to read instead. What is copied of other nodes is
    not copied again.
    """
    session = start_session(spark, progress)
    tasks: dict[int, CopyTask] = {}
    reports: dict[int, CopyReport] = {}
    waiting, number = list(sources), 0
    while True:
        try:
            planned = _plan_tasks(waiting, destination, sessions, session)
            # Spark may have run earlier tasks: objects and records are named after the number.
            tasks |= {number + task.number: replace(task, number=number + task.number) for task in planned}
            waiting, number = [], number + len(planned)
            left = [task for task in tasks.values() if task.number not in reports]
            _run_tasks(session, left, reports, sessions, progress, watch, has_recovery=recover is not None)
            break
        except Exception as error:
            if recover is None:
                raise
            waiting += recover(error)
            waiting = [source for source in waiting if source.node.id not in sessions.absent]
            tasks = {one: task for one, task in tasks.items() if task.node.id not in sessions.absent}
            reports = {one: report for one, report in reports.items() if one in tasks}
    progress.reached(CrashPoint.BASE_COPIED)
    rewritten: dict[str, set[int]] = {}
    rewritten_on: dict[str, set[int]] = {}
    for one, task in tasks.items():
        if reports[one].rewritten:
            rewritten.setdefault(task.node.shard, set()).update(reports[one].rewritten)
            rewritten_on.setdefault(task.copy_of, set()).update(reports[one].rewritten)
    return CopiedTables([entry for one in tasks for entry in reports[one].entries], rewritten, rewritten_on)


def _plan_tasks(
    sources: Sequence[TableSource], destination: CopyDestination, sessions: Sessions, session: SparkSession
) -> list[CopyTask]:
    limit = read_limit(source.node for source in sources)
    sources = [_with_undivided(source, sessions.connections[source.node.id], limit) for source in sources]
    _, share = share_rate(session, task_sessions(sessions.by_node), limit)
    return plan_copy(sources, destination, cores_of(session).lanes_max, share)


def _run_tasks(
    session: SparkSession,
    tasks: Sequence[CopyTask],
    reports: dict[int, CopyReport],
    sessions: Sessions,
    progress: Progress,
    watch: JobWatch | None,
    *,
    has_recovery: bool,
) -> None:
    """Run the tasks, and add the reports of those that succeed, by number, also if an error is raised.

    If it `has_recovery`, the failure of a standby that may be left out does not keep the tasks on other nodes from
    ending.
    """
    limit = read_limit(task.node for task in tasks)
    limited, _ = share_rate(session, task_sessions(sessions.by_node), limit)
    progress.step("copy", total=len(tasks), unit="tasks")
    dealing = Dealing[CopyTask](lambda task: task.size, lambda task: (task.node.id,), limited)
    shares = NodeShares[CopyTask].of_tasks(progress, tasks, lambda task: task.node.id, lambda task: task.size)
    shares.begin()
    spare = frozenset(node.id for node in sessions.nodes if has_recovery and sessions.may_leave_out(node))
    problem_of = partial(_problem_of_all, spare)
    for some in rounds_of(tasks, limit):
        ended: dict[int, CopyReport] = {}
        try:
            found = run_tasks(session, copy_ranges, some, shares, dealing, watch or sessions.watch, problem_of, ended)
            ended = dict(enumerate(found))
        finally:
            reports |= {some[one].number: report for one, report in ended.items() if report.problem is None}
        raise_first([report.problem for report in found])


def _problem_of_all(spare: Container[str], report: CopyReport) -> ErrorReport | None:
    """Return the problem of a report if tasks on other nodes would have it, too, or if the node is not `spare`."""
    problem = shared_problem(report)
    return None if problem and problem["details"].get("node") in spare else problem


def _with_undivided(source: TableSource, connection: psycopg.Connection[Any], limit: int | None) -> TableSource:
    """Set `undivided` to the tables that would be divided and that no query may read (nodes/left_out.py)."""
    pages_max = TASK_PAGES if limit is None else PACED_PAGES
    large = [table.oid for table in source.tables if table.size_bytes > pages_max * PAGE_BYTES]
    with raising_unreachable(source.node):
        return replace(source, undivided=find_planned_code(connection, large))
