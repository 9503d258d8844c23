"""Bounds so low that small databases meet them: what is else done for large ones is done for these.

Executors are processes of their own, so what they do is given to them with the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import fleet.nodes.relation_locks
import restore.rows
import snapshots.base_copy.copy_plan
import snapshots.create.make_cut
import snapshots.fold.changed_keys
import wal.decoding.changes
import wal.drain.drain
from wal.drain.drain import drain
from wal.drain.drain_task import DrainReport, DrainTask

Bounds = dict[ModuleType, dict[str, Any]]
OF_THE_DRAIN: Bounds = {
    wal.drain.drain: {
        "FIRST_CHUNK_MESSAGES": 50,
        "CHUNK_MESSAGES_MIN": 50,
        "CHUNK_MESSAGES_MAX": 50,
        "SEGMENT_BYTES_MAX": 4000,
    },
    wal.decoding.changes: {"VALUES_PER_BLOCK": 4},
}


def drain_small(task: DrainTask) -> DrainReport:
    """The drain job's task, with low bounds."""
    with lowered(OF_THE_DRAIN):
        return drain(task)


OF_THE_DRIVER: Bounds = {
    snapshots.base_copy.copy_plan: {"TASK_PAGES": 2, "TASK_TABLES": 2},
    snapshots.fold.changed_keys: {"COUNTED_FROM": 0, "KEYS_BYTES_MAX": 0},
    restore.rows: {"MIXED_GROUPS_MAX": 0},
    snapshots.create.make_cut: {"drain": drain_small},
}


@contextmanager
def small_sizes() -> Iterator[None]:
    """Low bounds in the block, on the driver and in the tasks of the drain job."""
    with lowered(OF_THE_DRIVER | OF_THE_DRAIN):
        yield


@contextmanager
def short_waits() -> Iterator[None]:
    """In the block, wait for a lock no longer than it takes to know that nobody will give it up."""
    with lowered({fleet.nodes.relation_locks: {"LOCK_SECONDS_MAX": 2.0}}):
        yield


@contextmanager
def lowered(bounds: Bounds) -> Iterator[None]:
    with ExitStack() as stack:
        for module, values in bounds.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        yield
