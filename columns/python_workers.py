"""Run functions in Spark's Python workers, and keep garbage collection short.

A worker collects garbage after every task. The collection visits all objects in all imported modules, some 100,000 with
pandas and pyarrow, and takes about 50 ms of CPU time, more than a small task.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A function that every worker process calls before its first task. It is set in the driver and sent with the tasks.
FirstWork: TypeAlias = Callable[[], None]

_first_work: FirstWork | None = None
_has_begun = False
_modules_frozen = 0


def map_batches(
    rows: DataFrame, work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return the rows that `work` yields for the Arrow batches of each Spark partition, with this `schema` (DDL)."""
    first = first_work()

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task(first)
        yield from work(batches)

    return rows.mapInArrow(run, schema)


def local_frame(session: SparkSession, table: pa.Table) -> DataFrame:
    """Return a DataFrame of a table in this process, all of it.

    Spark reads such a table only up to its first batch without rows, and ignores the rest in silence.
    """
    filled = [batch for batch in table.to_batches() if len(batch)]
    return session.createDataFrame(pa.Table.from_batches(filled, table.schema))


def set_first_work(work: FirstWork | None) -> None:
    """Make every worker process of later jobs call `work`, which must be picklable, before its first task."""
    global _first_work  # process-wide state of the driver
    _first_work = work


def first_work() -> FirstWork | None:
    """Return the function passed to `set_first_work`."""
    return _first_work


def begin_task(first: FirstWork | None) -> None:
    """Begin a task in a worker: call `first`, unless this process has already called it."""
    global _has_begun  # process-wide state
    freeze_modules()
    if first is not None and not _has_begun:
        first()
        _has_begun = True


def freeze_modules() -> None:
    """Exempt all existing objects from later garbage collections, unless that was done since the last import.

    Garbage is collected first. A reference cycle that exists now and is dropped later is never freed, so every function
    that runs in a worker calls this first (through `begin_task`).
    """
    global _modules_frozen  # process-wide state
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
