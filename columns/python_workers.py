"""Run functions in Spark's Python workers, and keep their garbage collections short.

A worker collects garbage after every task. That visits all objects of all imported modules, some 100,000 with pandas
and pyarrow, and takes about 50 ms of CPU time: more than a small task.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_modules_frozen = 0


def map_batches(
    rows: DataFrame, work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return the rows that `work` yields for the Arrow batches of each Spark partition, as `schema` (DDL text)."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        yield from work(batches)

    return rows.mapInArrow(run, schema)


def freeze_modules() -> None:
    """Exempt all objects that exist now from later garbage collections, unless that was done since the last import.

    Garbage is collected first. A cycle that exists now and is dropped later is never freed, so every function that runs
    in a worker begins with this.
    """
    global _modules_frozen  # the state of this process
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
