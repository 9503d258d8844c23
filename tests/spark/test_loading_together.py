"""Jobs that load side by side end together: the first error cancels the others, and is the one that is raised."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from cutline.fleet.progress import Silent
from cutline.restore.rows.jobs import run_together
from cutline.restore.rows.load import LoadError
from cutline.spark.spark_jobs import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLEEP_SECONDS, SECONDS_MAX = 120, 60


class InterruptedOnce:
    """A session whose user presses Ctrl-C once more, while the jobs are being cancelled."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self.cancelled = 0

    @property
    def sparkContext(self) -> InterruptedOnce:  # noqa: N802  # Spark's name
        return self

    def cancelAllJobs(self) -> None:  # noqa: N802  # Spark's name
        self.cancelled += 1
        if self.cancelled == 1:
            raise KeyboardInterrupt
        self._context.cancelAllJobs()


def test_another_interrupt_does_not_leave_a_job_running(spark: SparkSession, tmp_path: Path) -> None:
    def sleep(_task: int) -> int:
        (tmp_path / "sleeping").touch()
        time.sleep(SLEEP_SECONDS)
        return 0

    def sleeping() -> Counter[int]:
        return Counter(run_tasks(spark, sleep, [1], Silent()))

    def interrupt() -> None:
        while not (tmp_path / "sleeping").exists():
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    session, began = InterruptedOnce(spark), time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_together(cast("SparkSession", session), [sleeping])
    assert session.cancelled > 1
    assert time.monotonic() - began < SECONDS_MAX


def test_results_are_returned_in_the_order_of_the_jobs(spark: SparkSession) -> None:
    assert run_together(spark, [lambda: Counter({0: 1, 1: 2}), lambda: Counter({1: 3})]) == [{0: 1, 1: 2}, {1: 3}]


@pytest.mark.parametrize("is_in_task", [True, False])
def test_an_error_of_one_ends_the_others_and_is_raised(spark: SparkSession, *, is_in_task: bool) -> None:
    def sleep(_task: int) -> int:
        time.sleep(SLEEP_SECONDS)
        return 0

    def fail(_task: int) -> int:
        time.sleep(1)
        raise ValueError("a task that fails")

    def sleeping() -> Counter[int]:
        return Counter(run_tasks(spark, sleep, [1], Silent()))

    def failing() -> Counter[int]:
        if is_in_task:
            return Counter(run_tasks(spark, fail, [1], Silent()))
        time.sleep(1)
        raise LoadError("refused")

    began = time.monotonic()
    with pytest.raises(Exception, match="a task that fails" if is_in_task else "refused"):
        run_together(spark, [sleeping, failing])
    assert time.monotonic() - began < SECONDS_MAX
