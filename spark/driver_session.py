"""A session whose plain tasks run in the driver, until something needs Spark.

A JVM and its Python workers take some three seconds of processor time to start. For small snapshots that is longer than
all tasks take.

The tasks run in threads, and of some commands also in processes (spark/task_processes.py).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

from cutline.spark.amount import THREADS_MAX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.spark.task_processes import TaskProcess


class DriverSession:
    """Stands for the session that `start` returns: `run_tasks` runs tasks in the driver, any other use starts Spark.

    After that, tasks run in Spark, too. `cores` is the number of tasks that run at once in the driver unless they wait
    for servers, and `cores_max` the number of those in Spark. Each of the `processes` takes the place of a thread.
    """

    def __init__(
        self,
        start: Callable[[], SparkSession],
        cores: int,
        cores_max: int | None = None,
        processes: Sequence[TaskProcess] = (),
    ) -> None:
        self.cores, self.cores_max, self.processes = cores, cores_max or cores, processes
        self._start = start
        self._started: SparkSession | None = None
        # Several threads may run jobs.
        self._lock = threading.Lock()
        self._stops: list[Callable[[], None]] = []

    def at_once(self, per_core: float) -> int:
        """Return how many tasks run at once in the driver, given the number for each core."""
        return max(min(math.ceil(self.cores * per_core), THREADS_MAX), self.cores)

    @property
    def is_started(self) -> bool:
        """Whether something has needed Spark."""
        return self._started is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session(), name)

    @contextmanager
    def stoppable(self, stop: Callable[[], None]) -> Iterator[None]:
        """While the block runs tasks in the driver, `cancel` calls `stop`."""
        self._stops.append(stop)
        try:
            yield
        finally:
            self._stops.remove(stop)

    def cancel(self) -> None:
        """Stop the tasks in the driver, and cancel Spark's jobs."""
        for stop in list(self._stops):
            stop()
        if self._started is not None:
            self._started.sparkContext.cancelAllJobs()

    def _session(self) -> SparkSession:
        with self._lock:
            if self._started is None:
                self._started = self._start()
            return self._started


def runs_in_driver(session: SparkSession | DriverSession) -> TypeGuard[DriverSession]:
    """Whether the session runs tasks in the driver."""
    return isinstance(session, DriverSession) and not session.is_started


def cancel_jobs(session: SparkSession | DriverSession) -> None:
    """Cancel all jobs of the session; their tasks end soon, and `run_tasks` raises. May be called from any thread."""
    if isinstance(session, DriverSession):
        session.cancel()
    else:
        session.sparkContext.cancelAllJobs()
