"""A Spark session that starts only when a command needs it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from cutline.fleet.config import Fleet, check_spark_variables, has_executors
from cutline.fleet.cores import cores_of
from cutline.fleet.progress import Progress
from cutline.spark.amount import THREADS_MAX, Amount, is_for_command
from cutline.spark.driver_session import DriverSession
from cutline.spark.settings import check_protection
from cutline.spark.task_processes import TaskProcess, can_fork, end_processes, start_processes
from cutline.storage.location import S3_PROTOCOLS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.spark.needs import ExecutorNeeds
    from cutline.spark.start import SparkStart

# With more rows to shuffle than this, the JVM's optimising compiler saves more time than it takes.
SHUFFLED_ROWS_MAX = 1_000_000
# Tasks release Python's lock in short calls. With Python's default, 5 ms, a thread waits for the lock longer than its
# call took: on two cores, a check of four million rows took 8 % more time.
SWITCH_SECONDS = 0.0001
# For every 500,000 rows, or 128 MiB of pages of tables, a process takes the place of a thread. On two cores, a check
# of 4.7 million rows and changes took 5.4 s instead of 6.6 s, one of 1.4 million 2.7 s instead of 2.9 s, and one of
# 350,000 as long as without; a copy of 1.2 GB took 9.0 s instead of 10.2 s.
ROWS_PER_PROCESS, PAGE_BYTES_PER_PROCESS = 500_000, 128 << 20


@contextmanager
def forked_processes(fleet: Fleet, *, are_wanted: bool, store: bool) -> Iterator[Sequence[TaskProcess]]:
    """Fork processes for a SparkOnDemand in the block, unless they can't be used; end them with the block.

    `store` says whether tasks store objects. To be called before this process starts a thread, so before it opens a
    store (spark/task_processes.py).
    """
    # With a limit on storing, a process would get a share of it, and the command would still use all of it.
    is_limited = store and fleet.store.bytes_per_second is not None
    processes: list[TaskProcess] = []
    if are_wanted and not is_limited and is_for_command(Amount(0), fleet.spark_master, fleet.store) and can_fork():
        if fleet.store.url.partition("://")[0] in S3_PROTOCOLS:
            # Otherwise every process would import it, which takes 0.5 s.
            import_module("cutline.storage.s3")
        # A collection writes to all objects, and so would copy the memory that the processes share.
        gc.freeze()
        processes = start_processes(_cores_of(fleet) - 1)
    try:
        yield processes
    finally:
        end_processes(processes)


def _cores_of(fleet: Fleet) -> int:
    """How many tasks run at once without Spark."""
    return min(cores_of(fleet.spark_master) or 1, THREADS_MAX)


def _processes_for(amount: Amount) -> int:
    return max(amount.rows // ROWS_PER_PROCESS, (amount.page_bytes or 0) // PAGE_BYTES_PER_PROCESS)


class SparkOnDemand:
    """A command's SparkSource: `begin` starts the session in the background, and leaving the block ends it.

    If the process `goes_on` to other work after the block, an interrupt during its end is raised as usual. Otherwise
    the work is done and recorded by then, and only its result is still to be shown: an interrupt then only makes Spark
    end at once.

    Some tasks that need no Spark run in the `processes`, which end with the block.

    The constructor raises FleetFileError if a variable in [spark] is not set, and SparkUnprotectedError if fleet.toml
    leaves the session unprotected.
    """

    def __init__(
        self, fleet: Fleet, name: str, *, goes_on: bool = False, processes: Sequence[TaskProcess] = ()
    ) -> None:
        check_spark_variables(fleet)
        check_protection(fleet.spark_master, fleet.spark_settings)
        self._fleet, self._name, self._goes_on, self._processes = fleet, name, goes_on, processes
        self._has_executors = has_executors(fleet.spark_master)
        self._start: SparkStart | None = None
        self._is_checked = False
        self._amount = Amount(0)
        self._switch_seconds = sys.getswitchinterval()
        self.is_small = False

    def begin(self, needs: ExecutorNeeds, progress: Progress, amount: Amount) -> None:
        self._amount += amount
        fleet = self._fleet
        self.is_small = self._start is None and is_for_command(self._amount, fleet.spark_master, fleet.store)
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
            sys.setswitchinterval(SWITCH_SECONDS)
            cores_max = cores_of(self._fleet.spark_master)
            processes = self._processes[: _processes_for(self._amount)]
            start = DriverSession(lambda: self._begin().session(), _cores_of(self._fleet), cores_max, processes)
            return cast("SparkSession", start)
        return self._begin().session()

    def _begin(self) -> SparkStart:
        is_brief = self._amount.changes <= SHUFFLED_ROWS_MAX
        if self._start is not None and self._start.is_brief and not is_brief:
            # Only a new JVM can have the other compiler.
            self._start.stop()
            self._start, self._is_checked = None, False
        if self._start is None:
            from cutline.spark.start import start_spark

            # From now on, tasks run in Spark.
            end_processes(self._processes)
            self._start = start_spark(self._fleet, self._name, is_brief=is_brief)
        return self._start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        sys.setswitchinterval(self._switch_seconds)
        try:
            end_processes(self._processes)
        except KeyboardInterrupt:
            # Otherwise the result is still to be shown. The processes end with this one.
            if error is not None or self._goes_on:
                raise
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
