"""Tasks in jobs of a bounded number: the reports come job by job, in the order of the tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.fleet.progress import Reading, Silent
from cutline.spark import spark_jobs
from cutline.spark.spark_jobs import Dealing, NodeShares, run_many, run_tasks
from cutline.storage.errors import ErrorReport, UnreachableError, report_of
from tests.unit.test_node_shares import Kept

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


class Releasing(Kept):
    """Creates a file as soon as a node's tasks have all ended."""

    def __init__(self, node: str, file: Path) -> None:
        super().__init__()
        self.node, self.file, self.readings = node, file, list[Reading]()

    def tell(self, reading: Reading) -> None:
        super().tell(reading)
        self.readings.append(reading)
        if reading.node == self.node and reading.done == reading.total:
            self.file.touch()


def test_while_a_job_runs_it_is_known_how_far_each_node_is(spark: SparkSession, tmp_path: Path) -> None:
    """The tasks of `b` end only after it was told that those of `a` have, in jobs side by side and job by job."""
    file = tmp_path / "a-is-done"

    def work(task: tuple[str, int]) -> str:
        waits = threading.Event()
        for _ in range(600):
            if task[0] == "a" or file.exists():
                return task[0]
            waits.wait(0.1)
        raise AssertionError("nobody said that a is done")

    shown = Releasing("a", file)
    tasks = [("b", 7), *[("a", 10)] * 4]
    shares = NodeShares[tuple[str, int]].of_tasks(shown, tasks, lambda one: one[0], lambda one: one[1])
    assert run_tasks(spark, work, tasks, shares) == ["b", "a", "a", "a", "a"]
    assert [(one.done, one.total) for one in shown.readings if one.node == "b"] == [(7, 7)]
    assert shown.last[""] == Reading(47, 47, "bytes")
    assert shown.done == 5


def test_the_tasks_of_all_jobs_count_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_jobs, "TASKS_PER_JOB_MAX", 7)
    kept = Kept()
    shares = NodeShares[int](kept, {"n0": 10, "n1": 10}, lambda one: [(f"n{one % 2}", 1)], "objects")
    assert len(list(run_many(spark, str, range(20), shares, Dealing(lambda _: 1)))) == 3
    assert kept.last == {
        "n0": Reading(10, 10, "objects", "n0"), "n1": Reading(10, 10, "objects", "n1"), "": Reading(20, 20, "objects"),
    }  # fmt: skip
    assert kept.done == 20


def test_the_first_problem_ends_the_job(spark: SparkSession, tmp_path: Path) -> None:
    """Of a job whose tasks would take 2,000 s one after the other, the first reports a problem."""
    problem = report_of(UnreachableError("the store does not answer"))

    def work(number: int) -> ErrorReport | None:
        (tmp_path / str(number)).touch()
        if number == 0:
            return problem
        time.sleep(100)
        return None

    began = time.monotonic()
    with pytest.raises(UnreachableError, match="does not answer"):
        run_tasks(spark, work, range(20), Silent(), Dealing(lambda _: 1), problem_of=lambda report: report)
    # A lane ends with its first problem.
    assert len(list(tmp_path.iterdir())) < 6
    # The other tasks were killed: otherwise these would wait for them.
    assert run_tasks(spark, str, [1, 2], Silent()) == ["1", "2"]
    assert time.monotonic() - began < 90
