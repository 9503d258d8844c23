"""Run plain tasks as a Spark job: one function over a list of tasks, with progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol, TypeVar

from cutline.columns.python_workers import FirstWork, begin_task, first_work
from cutline.fleet.nodes.watch import Watch
from cutline.fleet.progress import Progress
from cutline.snapshots.executors.failures import raising_executor_errors
from cutline.snapshots.executors.needs import WAIT_SECONDS, ExecutorNeeds
from cutline.snapshots.executors.preflight import WAIT_SETTING, awaiting_executors
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.tasks.dealing import Dealing, cores_of, deal
from cutline.snapshots.tasks.ended_lanes import EndedLanes, Lanes, say_ended
from cutline.snapshots.tasks.node_shares import NodeShares
from cutline.storage.errors import ErrorReport, error_of
from cutline.storage.waits import pass_on

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

Task = TypeVar("Task")
Report = TypeVar("Report")
POLL_SECONDS = 0.3
# 20,000 base-object tasks take about 50 MB in the driver; at 64 MB each a job reads over 1 TB.
TASKS_PER_JOB_MAX = 20_000


class SparkSource(Protocol):
    """A Spark session that may not be started yet."""

    def begin(self, needs: ExecutorNeeds, progress: Progress) -> None:
        """Start it in the background, unless it was started before.

        On a cluster wait for it, and raise the error of any executor that can't take part: before anything is made.
        """
        ...

    def session(self) -> SparkSession:
        """Start it unless it was started before, wait for it and return it."""
        ...


def start_session(spark: SparkSource, progress: Progress) -> SparkSession:
    """Wait for the Spark session, as a separate step of `progress`, and return it."""
    progress.step("start Spark")
    session = spark.session()
    progress.reached(CrashPoint.SPARK_READY)
    return session


def run_tasks(
    spark: SparkSession,
    work: Callable[[Task], Report],
    tasks: Sequence[Task],
    progress: Progress | NodeShares[Task],
    dealing: Dealing[Task] | None = None,
    watch: Watch | None = None,
) -> list[Report]:
    """Run `work` on every task in Spark tasks; return the reports in the order of the tasks.

    They are dealt to Spark tasks as `dealing` says; without it, each is one. If a node that `watch` asks falls silent,
    the job is cancelled: a task may be waiting for that node. Reports are small (descriptions of objects), so
    collecting them is bounded by the number of tasks.
    """
    if not tasks:
        return []
    lanes = deal(tasks, dealing, cores_of(spark)) if dealing else [[number] for number in range(len(tasks))]
    shown: Progress = progress.progress if isinstance(progress, NodeShares) else progress

    def count(numbers: Iterable[int]) -> None:
        done = [tasks[number] for lane in numbers for number in lanes[lane]]
        if isinstance(progress, NodeShares):
            progress.end(done)
        else:
            progress.advance(len(done))

    with closing(EndedLanes(spark.sparkContext)) as ended:
        with job_progress(spark, shown, watch, lambda: count(ended.new())):
            dealt = spark.sparkContext.parallelize(
                [(lane, [tasks[number] for number in numbers]) for lane, numbers in enumerate(lanes)], len(lanes)
            )
            reports = dealt.map(partial(_run, work, first_work(), ended.accumulator, ended.job)).collect()
        # Those that ended after the last poll.
        count(ended.left(len(lanes)))
    by_task = dict(zip(chain.from_iterable(lanes), chain.from_iterable(reports), strict=True))
    return [by_task[number] for number in range(len(tasks))]


def run_many(
    spark: SparkSession,
    work: Callable[[Task], Report],
    tasks: Iterable[Task],
    progress: Progress | NodeShares[Task],
    dealing: Dealing[Task] | None = None,
) -> Iterator[list[Report]]:
    """`run_tasks` of any number of tasks: TASKS_PER_JOB_MAX at a time are in memory. Yields the reports of each job."""
    left = iter(tasks)
    while some := list(islice(left, TASKS_PER_JOB_MAX)):
        yield run_tasks(spark, work, some, progress, dealing)


def _run(
    work: Callable[[Task], Report],
    first: FirstWork | None,
    ended: Accumulator[Lanes],
    job: int,
    dealt: tuple[int, Sequence[Task]],
) -> list[Report]:
    lane, tasks = dealt
    begin_task(first)
    reports = [work(task) for task in tasks]
    say_ended(ended, job, lane)
    return reports


@contextmanager
def job_progress(
    spark: SparkSession,
    progress: Progress,
    watch: Watch | None = None,
    count: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Report the tasks that end in the jobs of this block; or call `count` now and then, which does.

    The jobs are cancelled if the block raises, and if `watch` finds a node silent.
    """
    with polling(count or _stage_count(spark, progress)):
        try:
            with (
                watch.on_silence(spark.sparkContext.cancelAllJobs) if watch else nullcontext(),
                awaiting_executors(spark, float(spark.conf.get(WAIT_SETTING, str(WAIT_SECONDS)) or 0), progress),
                raising_executor_errors(),
            ):
                yield
        except BaseException:
            # Tasks must release their sessions and slots before the caller cleans up the nodes.
            spark.sparkContext.cancelAllJobs()
            raise


@contextmanager
def stage_progress(spark: SparkSession, progress: Progress) -> Iterator[None]:
    """Report the tasks that end in the jobs of this block, which are protected elsewhere."""
    with polling(_stage_count(spark, progress)):
        yield


def _stage_count(spark: SparkSession, progress: Progress) -> Callable[[], None]:
    """A function that advances `progress` by the tasks that have ended in the stages at work since its last call."""
    tracker = spark.sparkContext.statusTracker()
    seen: dict[int, int] = {}

    def count() -> None:
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info and info.numCompletedTasks > seen.get(stage, 0):
                progress.advance(info.numCompletedTasks - seen.get(stage, 0))
                seen[stage] = info.numCompletedTasks

    return count


@contextmanager
def polling(count: Callable[[], object]) -> Iterator[None]:
    """Call `count` every POLL_SECONDS while the block runs, in another thread, and tell what tasks wait for."""
    done = threading.Event()

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            count()
            pass_on()

    thread = threading.Thread(target=poll, name="job progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def raise_first(problems: Sequence[ErrorReport | None]) -> None:
    """Raise the first error that a task reported, in its own class; its details have the other messages."""
    reported = [problem for problem in problems if problem]
    if reported:
        error = error_of(reported[0])
        if len(reported) > 1:
            error.details["others"] = [problem["message"] for problem in reported[1:]]
        raise error
