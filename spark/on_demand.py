"""A Spark session that starts only when a command needs it."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from cutline.fleet.config import Fleet, check_spark_variables, has_executors
from cutline.fleet.progress import Progress
from cutline.spark.driver_session import DriverSession
from cutline.spark.settings import check_protection, cores_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.spark.needs import ExecutorNeeds
    from cutline.spark.spark_jobs import Amount
    from cutline.spark.start import SparkStart

# With more rows to shuffle than this, the JVM's optimising compiler saves more time than it takes.
SHUFFLED_ROWS_MAX = 1_000_000
# Up to this amount, threads of the driver take less time than executors with the start of the JVM and its workers
# (measured on two cores: a third to two thirds of the time with a million rows in 300 MB).
SMALL_BYTES_MAX, SMALL_ROWS_MAX = 256 << 20, 1_500_000
SMALL_CORES_MAX = 8


class SparkOnDemand:
    """A command's SparkSource: `begin` starts the session in the background, and leaving the block ends it.

    If the process `goes_on` to other work after the block, an interrupt during its end is raised as usual. Otherwise
    the work is done and recorded by then, and only its result is still to be shown: an interrupt then only makes Spark
    end at once.

    The constructor raises FleetFileError if a variable in [spark] is not set, and SparkUnprotectedError if fleet.toml
    leaves the session unprotected.
    """

    def __init__(self, fleet: Fleet, name: str, *, goes_on: bool = False) -> None:
        check_spark_variables(fleet)
        check_protection(fleet.spark_master, fleet.spark_settings)
        self._fleet, self._name, self._goes_on = fleet, name, goes_on
        self._has_executors = has_executors(fleet.spark_master)
        self._start: SparkStart | None = None
        self._is_checked = False
        self._is_brief = True
        self.is_small = False

    def begin(self, needs: ExecutorNeeds, progress: Progress, amount: Amount) -> None:
        self._is_brief = amount.changes <= SHUFFLED_ROWS_MAX
        self.is_small = self._start is None and not self._has_executors and _is_small(amount)
        if self.is_small:
            return
        start = self._begin()
        if self._is_checked or not self._has_executors:
            return
        from cutline.columns.python_workers import set_first_work
        from cutline.spark.late import check_worker
        from cutline.spark.packing import build_digest
        from cutline.spark.preflight import check_executors

        progress.step("start Spark")
        complete = check_executors(start.session(), needs, progress)
        set_first_work(partial(check_worker, build_digest(), complete))
        self._is_checked = True

    def session(self) -> SparkSession:
        if self.is_small and self._start is None:
            cores = min(cores_of(self._fleet.spark_master) or 1, SMALL_CORES_MAX)
            return cast("SparkSession", DriverSession(lambda: self._begin().session(), cores))
        return self._begin().session()

    def _begin(self) -> SparkStart:
        if self._start is not None and self._start.is_brief and not self._is_brief and not self._has_executors:
            # Only a new JVM can have the other compiler.
            self._start.stop()
            self._start = None
        if self._start is None:
            from cutline.spark.start import start_spark

            self._start = start_spark(self._fleet, self._name, is_brief=self._is_brief)
        return self._start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._is_checked:
            from cutline.columns.python_workers import set_first_work

            set_first_work(None)
        if self._start is None:
            return
        ended = self._start.ended(value)
        try:
            self._start.stop(graceful=error is None)
        except KeyboardInterrupt:
            if error is not None or self._goes_on:
                raise
            self._start.stop(graceful=False)
        if ended is not None:
            raise ended from value


def _is_small(amount: Amount) -> bool:
    return amount.bytes is not None and amount.bytes <= SMALL_BYTES_MAX and amount.rows <= SMALL_ROWS_MAX
