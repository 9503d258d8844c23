"""Dividing a base copy into tasks: big tables by ranges of pages, small ones several to a task."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from fleet.config import Node
from fleet.groups import Table
from snapshots.base_copy import CopyTask, PageRange

PAGE_BYTES = 8192
TASK_PAGES = 8192
# A task holds the locks of its tables until its end, and PostgreSQL has room for some thousands at once.
TASK_TABLES = 500


def base_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of one node's base copy, of one attempt to make it."""
    return f"snapshots/{snapshot}/base/{node}/{operation}"


def plan_ranges(tables: list[Table]) -> list[tuple[PageRange, ...]]:
    """Each entry is one task's work: one range of a big table, or whole small tables together.

    The last range of a table has no end: pages that were added after its size was read belong to it.
    """
    planned: list[tuple[PageRange, ...]] = []
    together: list[PageRange] = []
    pages_together = 0
    for table in sorted(tables, key=lambda found: (-found.size_bytes, found.group.name)):
        pages = -(-table.size_bytes // PAGE_BYTES)
        if pages > TASK_PAGES:
            bounds = [*range(0, pages - TASK_PAGES // 2, TASK_PAGES), None]
            for low, high in pairwise(bounds):
                planned.append((PageRange(table.group, low or 0, high),))
            continue
        if together and (pages_together + pages > TASK_PAGES or len(together) == TASK_TABLES):
            planned.append(tuple(together))
            together, pages_together = [], 0
        together.append(PageRange(table.group))
        pages_together += pages
    if together:
        planned.append(tuple(together))
    return planned


def plan_copy(
    nodes: Mapping[str, tuple[Node, str, list[Table]]],
    snapshot: str,
    operation: str,
    store: tuple[str, Mapping[str, Any]],
) -> list[CopyTask]:
    """The tasks for nodes with their exported snapshots and tables, taking turns between the nodes."""
    url, options = store
    queues = [
        (node, exported, base_prefix(snapshot, node.id, operation), plan_ranges(tables))
        for node, exported, tables in nodes.values()
    ]
    tasks: list[CopyTask] = []
    for turn in range(max((len(ranges) for *_, ranges in queues), default=0)):
        for node, exported, prefix, ranges in queues:
            if turn < len(ranges):
                tasks.append(CopyTask(node, len(tasks), exported, ranges[turn], prefix, url, options))
    return tasks
