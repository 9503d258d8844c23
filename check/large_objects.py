"""Reading stored large objects back: whole by their digests, and as many as their commit says.

There is one copy of them, of the primary, so they are compared with nothing: the report counts them by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from check.checking import Checking
from check.report import Conflict
from fleet.progress import Progress
from snapshots.jobs import run_tasks
from snapshots.large_objects import stored_large_objects
from snapshots.manifest import LARGE_OBJECTS_COUNT, StoredObject
from storage.errors import ReportedError, SnapshotError, UnreachableError, report_of
from storage.open import open_store
from wal.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class LargeCheckTask:
    """An object that holds large objects."""

    stored: StoredObject
    store_url: str
    store_options: Mapping[str, Any] = field(repr=False)  # may hold secrets


def check_large_objects(checking: Checking, session: SparkSession, progress: Progress) -> None:
    """Read all of them; one that is damaged is a conflict, and takes nothing from the rows of its node."""
    url, options = checking.location
    tasks = [LargeCheckTask(stored, url, options) for stored in stored_large_objects(checking.chain.full)]
    if not tasks:
        return
    progress.step("read large objects", total=len(tasks), unit="objects")
    compared = checking.report.compared
    for task, problem in zip(tasks, run_tasks(session, read_large, tasks, progress), strict=True):
        stored = task.stored
        if problem is None:
            compared.objects += 1
            compared.bytes += stored.size
            checking.report.large_objects += stored.rows.get(LARGE_OBJECTS_COUNT, 0)
        elif problem["exit_code"] == UnreachableError.exit_code:
            raise ReportedError(problem)
        else:
            kind = str(problem["details"].get("kind", problem["slug"]))
            conflict = Conflict(kind, str(problem["message"]), node=stored.node, object=stored.key)
            checking.report.conflicts.append(conflict)


def read_large(task: LargeCheckTask) -> dict[str, Any] | None:
    """Read one object; what is wrong with it, None if nothing is."""
    stored = task.stored
    try:
        store = open_store(task.store_url, task.store_options)
        count = _count(stored, read_listed(store, stored.node, stored.key, (stored.size, stored.digest)))
        if count != stored.rows.get(LARGE_OBJECTS_COUNT, 0):
            detail = f"it has {count} large objects instead of {stored.rows.get(LARGE_OBJECTS_COUNT, 0)}"
            raise ObjectDamagedError(key=stored.key, kind="rows", node=stored.node, detail=detail)
    except SnapshotError as error:
        return report_of(error)
    return None


def _count(stored: StoredObject, body: bytes) -> int:
    try:
        batches = pq.ParquetFile(pa.BufferReader(body)).iter_batches(columns=["definition"], use_threads=False)
        return sum(len(batch) - batch.column(0).null_count for batch in batches)
    except (pa.ArrowException, OSError, ValueError) as error:
        detail = f"it can't be read as Parquet: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error
