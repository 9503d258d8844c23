"""Where the work of a repair runs: in this process if it is small, otherwise as Spark jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from cutline.fleet.progress import Progress
from cutline.spark.amount import Amount
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.sent_values import sending
from cutline.spark.spark_jobs import (
    TASKS_PER_JOB_MAX,
    Dealing,
    HasProblem,
    SparkSource,
    raise_first,
    run_tasks,
    shared_problem,
    stage_progress,
)
from cutline.spark.task_processes import InDriver
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Reading this many stored bytes takes less time than starting a JVM, and this many rows fit into its process.
LOCAL_BYTES_MAX, LOCAL_ROWS_MAX = 64 << 20, 2_000_000
THREADS_MAX = 4
Task = TypeVar("Task")
Report = TypeVar("Report")
Reported = TypeVar("Reported", bound=HasProblem)


class Work(Struct, frozen=True):
    """The store at `location`, and the means to read and write many objects."""

    location: StoreLocation
    spark: SparkSource
    progress: Progress

    def begin(self, size_bytes: int, rows: int) -> None:
        """Start a Spark session in the background if reading this many bytes or rows needs one."""
        if not self.is_local(size_bytes, rows):
            self.spark.begin(ExecutorNeeds(self.location), self.progress, Amount())

    def is_local(self, size_bytes: int, rows: int = 0) -> bool:
        """Whether this process reads that many bytes and rows itself."""
        return size_bytes <= LOCAL_BYTES_MAX and rows <= LOCAL_ROWS_MAX

    def session(self) -> SparkSession:
        """Return the session; see SparkSource."""
        return self.spark.session()

    def run_here(self, work: Callable[[Task], Report], tasks: Iterable[Task]) -> list[Report]:
        """Run the tasks in threads of this process; return the reports in order."""
        with ThreadPoolExecutor(THREADS_MAX) as threads:
            return list(threads.map(work, tasks))

    def run(
        self,
        work: Callable[[Task], Reported],
        tasks: Callable[[Any], Sequence[Task]],
        known: Any,
        bytes_of: Callable[[Task], int],
        *,
        is_local: bool,
    ) -> list[Reported]:
        """Run the tasks, in this process if `is_local`; `tasks` gets an object whose value is `known`.

        Raises the first error that a task reports.
        """
        if is_local:
            reports = self.run_here(work, tasks(InDriver(known)))
            raise_first([report.problem for report in reports])
            return reports
        dealing = Dealing[Task](bytes_of)
        with sending(self.session(), known) as sent:
            return run_tasks(self.session(), work, tasks(sent), self.progress, dealing, problem_of=shared_problem)

    def run_many(
        self,
        work: Callable[[Task], Reported],
        tasks: Iterable[Task],
        bytes_of: Callable[[Task], int],
        *,
        is_local: bool,
    ) -> Iterator[list[tuple[Task, Reported]]]:
        """Run any number of tasks; yield some of them at a time, each with its report.

        Raises the first error that a task reports.
        """
        left, dealing = iter(tasks), Dealing[Task](bytes_of)
        while some := list(islice(left, TASKS_PER_JOB_MAX)):
            if is_local:
                reports = self.run_here(work, some)
                raise_first([report.problem for report in reports])
                self.progress.advance(len(some))
            else:
                reports = run_tasks(self.session(), work, some, self.progress, dealing, problem_of=shared_problem)
            yield list(zip(some, reports, strict=True))

    @contextmanager
    def showing_stages(self) -> Iterator[None]:
        """Report the tasks of the block's Spark jobs as they finish."""
        with stage_progress(self.session(), self.progress):
            yield
