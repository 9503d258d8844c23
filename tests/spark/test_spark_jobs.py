"""Tasks in jobs of a bounded number: the reports come job by job, in the order of the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fleet.progress import Silent
from snapshots.operations import spark_jobs
from snapshots.operations.spark_jobs import run_many

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_many_tasks_are_made_and_run_a_job_at_a_time(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_jobs, "TASKS_PER_JOB_MAX", 2)
    made: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            yield number

    jobs = run_many(spark, lambda number: number * number, tasks(), Silent())
    assert (next(jobs), made) == ([0, 1], [0, 1])
    assert list(jobs) == [[4, 9], [16]]
    assert list(run_many(spark, str, [], Silent())) == []
