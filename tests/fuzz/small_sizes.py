"""Bounds so low that small databases exceed them, and are treated like large ones.

Executors are separate processes, so their task lowers the bounds itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import cutline.nodes.relation_locks
import cutline.restore.rows.jobs
import cutline.snapshots.base_copy.copy_tables
import cutline.snapshots.create.make_cut
import cutline.snapshots.fold.changed_keys
import cutline.wal.decoding.changes
import cutline.wal.drain.drain
from cutline.wal.drain.drain import drain
from cutline.wal.drain.drain_task import DrainReport, DrainTask

Bounds = dict[ModuleType, dict[str, Any]]
DRAIN_BOUNDS: Bounds = {
    cutline.wal.drain.drain: {
        "FIRST_CHUNK_MESSAGES": 50,
        "CHUNK_MESSAGES_MIN": 50,
        "CHUNK_MESSAGES_MAX": 50,
        "SEGMENT_BYTES_MAX": 4000,
    },
    cutline.wal.decoding.changes: {"VALUES_PER_BLOCK": 4},
}


def drain_small(task: DrainTask) -> DrainReport:
    """The drain job's task, with low bounds."""
    with lowered(DRAIN_BOUNDS):
        return drain(task)


DRIVER_BOUNDS: Bounds = {
    cutline.snapshots.base_copy.copy_tables: {"TASK_PAGES": 2, "TASK_TABLES": 2},
    cutline.snapshots.fold.changed_keys: {"COUNTED_FROM": 0, "KEYS_BYTES_MAX": 0},
    cutline.restore.rows.jobs: {"MIXED_GROUPS_MAX": 0},
    cutline.snapshots.create.make_cut: {"drain": drain_small},
}


@contextmanager
def small_sizes() -> Iterator[None]:
    """Low bounds in the block, on the driver and in the tasks of the drain job."""
    with lowered(DRIVER_BOUNDS | DRAIN_BOUNDS):
        yield


@contextmanager
def short_waits() -> Iterator[None]:
    """In the block, wait for a lock only as long as it takes to know that nobody will release it."""
    with lowered({cutline.nodes.relation_locks: {"LOCK_SECONDS_MAX": 2.0}}):
        yield


@contextmanager
def lowered(bounds: Bounds) -> Iterator[None]:
    with ExitStack() as stack:
        for module, values in bounds.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        yield
