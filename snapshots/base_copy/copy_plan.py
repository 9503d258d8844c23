"""Divide a base copy into tasks: a large table by ranges of pages, small tables several to a task."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cutline.fleet.config import Node
from cutline.fleet.tables.groups import Table
from cutline.snapshots.base_copy.copy_ranges import CopyTask, PageRange
from cutline.snapshots.base_copy.destination import CopyDestination

PAGE_BYTES = 8192
TASK_PAGES = 8192
# A task locks its tables until it ends, and a PostgreSQL server has room for a few thousand locks.
TASK_TABLES = 500


@dataclass(frozen=True, slots=True)
class TableSource:
    """The tables to copy from one node, as its exported snapshot shows them.

    `undivided` are those, by oid, that one session copies whole, however large they are.
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
    """Plan the ranges of each task: a range of a large table, a table of `undivided`, or several whole small tables.

    The last range of a table has no upper bound: it includes pages added after the size was read.
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
                one = PageRange(table.group, table.oid, low or 0, high)
                planned.append(PlannedRanges((one,), ((pages if high is None else high) - one.low) * PAGE_BYTES))
            continue
        if pages_together + pages > task_pages or len(together) == TASK_TABLES:
            end_task()
        together.append(PageRange(table.group, table.oid))
        pages_together += pages
    end_task()
    return planned


def task_pages_for(sources: Sequence[TableSource], tasks_max: int) -> int:
    """The pages of a task, so that a copy of these sources has about `tasks_max` tasks at most."""
    pages = sum(table.size_bytes for source in sources for table in source.tables) // PAGE_BYTES
    return max(TASK_PAGES, -(-pages // tasks_max))


def plan_copy(sources: Sequence[TableSource], destination: CopyDestination, tasks_max: int) -> list[CopyTask]:
    """The tasks that copy all sources, in turn from each node; a few more than `tasks_max` if there is much to copy."""
    task_pages = task_pages_for(sources, tasks_max)
    queues = [(source, plan_ranges(source.tables, task_pages, source.undivided)) for source in sources]
    tasks: list[CopyTask] = []
    for turn in range(max((len(planned) for _, planned in queues), default=0)):
        for source, planned in queues:
            if turn < len(planned):
                one = planned[turn]
                tasks.append(CopyTask(source.node, len(tasks), source.exported, one.ranges, destination, one.size))
    return tasks
