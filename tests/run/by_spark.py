"""Make commands use Spark, however little they have to do. Otherwise they do little work themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import cutline.spark.amount
import cutline.wal.drain.lags
from cutline.spark.driver_session import DriverSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def work_by_spark() -> None:
    """Make Spark archive all WAL and run all tasks, in this process."""
    cutline.wal.drain.lags.SIDE_BY_SIDE_BYTES = -1
    cutline.spark.amount.PAGE_BYTES_MAX = -1


def in_driver(spark: SparkSession) -> SparkSession:
    """Return a session that runs tasks in threads of this process, as small commands do; SQL runs on `spark`."""
    return cast("SparkSession", DriverSession(lambda: spark, 2))


@contextmanager
def archiving_by_spark(*, wanted: bool = True) -> Iterator[None]:
    """Make Spark archive all WAL while the block runs, if `wanted`."""
    before = cutline.wal.drain.lags.SIDE_BY_SIDE_BYTES
    try:
        if wanted:
            cutline.wal.drain.lags.SIDE_BY_SIDE_BYTES = -1
        yield
    finally:
        cutline.wal.drain.lags.SIDE_BY_SIDE_BYTES = before
