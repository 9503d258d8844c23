"""Jobs that load side by side end together: the first error cancels the others, and is the one that is raised."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from fleet.progress import Silent
from restore.rows.jobs import run_together
from restore.rows.ledger import LoadError
from snapshots.tasks.spark_jobs import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLEEP_SECONDS, SECONDS_MAX = 120, 60


def test_what_the_jobs_placed_is_added_up(spark: SparkSession) -> None:
    assert run_together(spark, [lambda: Counter({0: 1, 1: 2}), lambda: Counter({1: 3})]) == {0: 1, 1: 5}


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
