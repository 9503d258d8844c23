"""Divide a base copy into tasks: a large table by ranges of pages, small tables several to a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleet.config import Node
from fleet.tables.groups import Table
from snapshots.base_copy.copy_ranges import CopyTask, PageRange
from snapshots.base_copy.destination import CopyDestination

PAGE_BYTES = 8192
TASK_PAGES = 8192
# A task locks its tables until it ends, and a PostgreSQL server has room for a few thousand locks.
TASK_TABLES = 500


@dataclass(frozen=True, slots=True)
class TableSource:
    """The tables to copy from one node, as its exported snapshot shows them."""

    node: Node
    exported: str
    tables: Sequence[Table]


def plan_ranges(tables: Sequence[Table]) -> list[tuple[PageRange, ...]]:
    """Plan the ranges of each task: one range of a large table, or several whole small tables.

    The last range of a table has no upper bound: it includes pages added after the size was read.
    """
    planned: list[tuple[PageRange, ...]] = []
    together: list[PageRange] = []
    pages_together = 0
    for table in sorted(tables, key=lambda table: (-table.size_bytes, table.group.name)):
        pages = -(-table.size_bytes // PAGE_BYTES)
        if pages > TASK_PAGES:
            bounds = [*range(0, pages - TASK_PAGES // 2, TASK_PAGES), None]
            for low, high in pairwise(bounds):
                planned.append((PageRange(table.group, table.oid, low or 0, high),))
            continue
        if together and (pages_together + pages > TASK_PAGES or len(together) == TASK_TABLES):
            planned.append(tuple(together))
            together, pages_together = [], 0
        together.append(PageRange(table.group, table.oid))
        pages_together += pages
    if together:
        planned.append(tuple(together))
    return planned


def plan_copy(sources: Iterable[TableSource], destination: CopyDestination) -> list[CopyTask]:
    """The tasks that copy all sources, in turn from each node."""
    queues = [(source, plan_ranges(source.tables)) for source in sources]
    tasks: list[CopyTask] = []
    for turn in range(max((len(ranges) for _, ranges in queues), default=0)):
        for source, ranges in queues:
            if turn < len(ranges):
                prefix = destination.prefix(source.node.id)
                number, store = len(tasks), destination.store
                tasks.append(CopyTask(source.node, number, source.exported, ranges[turn], prefix, store))
    return tasks
