"""Read stored large objects back: verify their digests and their number.

Only the primary's are stored, so there is no copy to compare them with: the report counts them separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from check.findings import NOT_OF_THE_OBJECT, Findings, conflict_of
from fleet.progress import Progress
from snapshots.operations.spark_jobs import run_tasks
from snapshots.records.commit import LARGE_OBJECTS_COUNT, FullSnapshot, StoredObject
from snapshots.records.large_objects import list_large_objects
from storage.errors import ErrorReport, SnapshotError, error_of, report_of
from storage.location import StoreLocation
from wal.segments.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class LargeCheckTask:
    """A stored object that holds large objects."""

    stored: StoredObject
    store: StoreLocation


def check_large_objects(
    session: SparkSession, full: FullSnapshot, store: StoreLocation, findings: Findings, progress: Progress
) -> None:
    """Read all of them; a damaged one is a conflict, but the rows of its node are still compared.

    Raises the error of a task if the store did not answer.
    """
    tasks = [LargeCheckTask(stored, store) for stored in list_large_objects(full)]
    if not tasks:
        return
    progress.step("read large objects", total=len(tasks), unit="objects")
    for task, problem in zip(tasks, run_tasks(session, read_large, tasks, progress), strict=True):
        if problem is None:
            findings.count(objects=1, size_bytes=task.stored.size)
            findings.report.large_objects += task.stored.rows.get(LARGE_OBJECTS_COUNT, 0)
        elif problem["exit_code"] in NOT_OF_THE_OBJECT:
            raise error_of(problem)
        else:
            findings.conflict(replace(conflict_of(problem), node=task.stored.node, object=task.stored.key))


def read_large(task: LargeCheckTask) -> ErrorReport | None:
    """Read one object; return the problem with it, None if it is intact."""
    stored = task.stored
    try:
        store = task.store.open()
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
