"""Run plain tasks as a Spark job, with progress, and with a limited number of tasks per node at a time.

A Spark task costs 10 to 50 ms of processor time, however little it does, and needs a free session on its node while it
runs. So the tasks are distributed to lanes. Each lane is one Spark task, which runs the lane's tasks one after the
other.

An accumulator of the Spark context tells the driver which lanes have finished, and with which problems. A lane that
Spark runs twice counts once.

With little work, the lanes run in threads and processes of the driver instead (spark/driver_session.py).
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec import Struct, field

from cutline.columns.python_workers import FirstWork, begin_task, first_work
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Progress, Reading
from cutline.nodes.open_sessions import shut_down_sessions, stoppable_sessions
from cutline.nodes.sessions import Sessions
from cutline.spark.amount import Amount
from cutline.spark.driver_session import DriverSession, cancel_jobs, runs_in_driver
from cutline.spark.needs import ExecutorNeeds, raising_executor_errors, unless_jvm_ended
from cutline.spark.preflight import awaiting_executors
from cutline.spark.task_processes import Lane, ProcessLostError, TaskProcess, new_job
from cutline.spark.task_progress import following
from cutline.storage.errors import NOT_OF_THE_OBJECT, ErrorReport, error_of
from cutline.storage.store import stoppable_requests
from cutline.storage.waits import pass_on

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.sql import SparkSession

# The lanes that have finished, by number, keyed by job.
Lanes: TypeAlias = "dict[int, dict[int, LaneEnd]]"
_jobs = itertools.count()


class LaneEnd(NamedTuple):
    """How a lane ended: the problem that ended it, if any, and its tasks' reports, if the job keeps them."""

    problem: ErrorReport | None = None
    reports: Sequence[Any] = ()


class LanesParam:
    """Tells Spark how to combine lanes. It serves as an AccumulatorParam, but does not import that class's module."""

    def zero(self, _: Lanes) -> Lanes:
        """Return a task's initial value."""
        return {}

    def addInPlace(self, total: Lanes, more: Lanes) -> Lanes:  # noqa: N802  # Spark's name
        """Add another task's lanes."""
        for job, lanes in more.items():
            total.setdefault(job, {}).update(lanes)
        return total


class EndedLanes:
    """The lanes in a job that have finished. Tasks receive `accumulator` and `job`, and call `say_ended`."""

    def __init__(self, context: SparkContext) -> None:
        self.accumulator, self.job = _accumulator_of(context), next(_jobs)
        self._seen: set[int] = set()

    def new(self) -> set[int]:
        """Return the lanes that have finished since the last call."""
        lanes = set(self._ended()) - self._seen
        self._seen |= lanes
        return lanes

    def problems(self) -> list[ErrorReport]:
        """Return the problems that ended lanes."""
        return [ended.problem for ended in self._ended().values() if ended.problem]

    def reports(self) -> dict[int, Sequence[Any]]:
        """Return the reports of lanes that were told with them, by lane."""
        return {lane: ended.reports for lane, ended in self._ended().items()}

    def left(self, count: int) -> set[int]:
        """Return the lanes not yet returned by any call, once all lanes below `count` have finished."""
        return set(range(count)) - self._seen

    def close(self) -> None:
        """Forget the job."""
        self.accumulator.value.pop(self.job, None)

    def _ended(self) -> dict[int, LaneEnd]:
        # A copy, because results of tasks come in at any moment.
        return dict(self.accumulator.value.get(self.job, {}))


def say_ended(accumulator: Accumulator[Lanes], job: int, lane: int, end: LaneEnd) -> None:
    """In an executor, report that the lane has finished, along with the task's result."""
    accumulator.add({job: {lane: end}})


@lru_cache(maxsize=1)
def _accumulator_of(context: SparkContext) -> Accumulator[Lanes]:
    # Share one accumulator among all jobs, because Spark never frees accumulators.
    param: Any = LanesParam()
    accumulator: Accumulator[Lanes] = context.accumulator({}, param)
    return accumulator


Task = TypeVar("Task")


class NodeShares(Generic[Task]):
    """As tasks finish, reports to `progress` how much work is done on each node and in total. Thread-safe.

    `totals` is the amount of work in `unit`, keyed by node; `shares_of` returns the node and the amount of each part of
    a task. `progress` is also advanced by the number of parts.
    """

    def __init__(
        self,
        progress: Progress,
        totals: Mapping[str, int],
        shares_of: Callable[[Task], Sequence[tuple[str, int]]],
        unit: str = "bytes",
    ) -> None:
        self.progress, self._totals, self._unit = progress, totals, unit
        self._shares_of = shares_of
        self._done = Counter[str]()
        # Adding up all nodes for every task would take longer than small tasks do.
        self._done_total, self._total = 0, sum(totals.values())
        # What tasks that have not finished have read, by the task's id.
        self._read: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_tasks(
        cls,
        progress: Progress,
        tasks: Sequence[Task],
        node_of: Callable[[Task], str],
        bytes_of: Callable[[Task], int] | None = None,
    ) -> NodeShares[Task]:
        """Create the shares of a job with exactly these tasks; if their bytes are unknown, count tasks instead."""

        def shares_of(task: Task) -> Sequence[tuple[str, int]]:
            return [(node_of(task), bytes_of(task) if bytes_of else 1)]

        totals = Counter[str]()
        for task in tasks:
            for node, amount in shares_of(task):
                totals[node] += amount
        return cls(progress, totals, shares_of, "bytes" if bytes_of else "tasks")

    def begin(self) -> None:
        """Report the total amount of work, which may have changed since the last call."""
        with self._lock:
            self._total = sum(self._totals.values())
            self._tell(self._totals)

    def read(self, task: Task, size_bytes: int) -> None:
        """Count what a task on one node has read before it has finished, up to the amount that was planned."""
        if self._unit != "bytes" or len(shares := self._shares_of(task)) != 1:
            return
        ((node, planned),) = shares
        with self._lock:
            before = self._read.get(id(task), 0)
            more = min(size_bytes, planned - before)
            self._read[id(task)] = before + more
            self._done[node] += more
            self._done_total += more
            self._tell({node: None})

    def end(self, tasks: Sequence[Task]) -> None:
        """Count tasks that have finished, except what was counted before."""
        if not tasks:
            return
        with self._lock:
            shares = [
                (node, amount - read)
                for task in tasks
                for read in (self._read.pop(id(task), 0),)
                for node, amount in self._shares_of(task)
            ]
        self.progress.advance(len(shares))
        with self._lock:
            for node, amount in shares:
                self._done[node] += amount
                self._done_total += amount
            self._tell(dict.fromkeys(node for node, _ in shares))

    def _tell(self, nodes: Mapping[str, object]) -> None:
        for node in nodes:
            self.progress.tell(Reading(self._done[node], self._totals.get(node), self._unit, node))
        self.progress.tell(Reading(self._done_total, self._total, self._unit))


# A lane of objects or pages has at least this many bytes, unless that would make too few lanes for all cores.
LANE_BYTES = 4 << 20
# Enough lanes per core for their different lengths to even out.
LANES_PER_CORE_MIN, LANES_PER_CORE_MAX = 4, 16
# This many lanes are cheap, and enough to show a job's progress.
LANES_AT_LEAST = 256
LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,")


def _no_nodes(_: Any) -> Iterable[str]:
    return ()


# In Python 3.11 a generic frozen dataclass can't have slots.
class Dealing(Struct, Generic[Task], frozen=True):
    """How to distribute tasks: a task's bytes, the nodes on which it opens sessions, and how many each node allows.

    In the driver, `per_core` tasks run at once for each core: more than one if the tasks also wait for servers.
    """

    bytes_of: Callable[[Task], int]
    nodes_of: Callable[[Task], Iterable[str]] = _no_nodes
    sessions: Mapping[str, int] = field(default_factory=dict)
    per_core: float = 1.0


class Cores(Struct, frozen=True):
    """How many cores a session's executors have now, and the most tasks that they may ever run at once."""

    now: int
    most: float

    @property
    def lanes_max(self) -> int:
        """The most lanes that a job may have."""
        return max(LANES_AT_LEAST, LANES_PER_CORE_MAX * self.now)


def cores_of(spark: SparkSession) -> Cores:
    """Return the session's cores. On clusters executors may be added later, unless `spark.cores.max` limits them."""
    if runs_in_driver(spark):
        return Cores(spark.cores, spark.cores_max)
    now, master = max(spark.sparkContext.defaultParallelism, 1), str(spark.sparkContext.master)
    if cluster := LOCAL_CLUSTER.match(master):
        # Some of its executors may not have registered yet.
        now = math.prod(map(int, cluster.groups()))
    limit = spark.sparkContext.getConf().get("spark.cores.max", None)
    return Cores(now, now if master.startswith("local") else float(limit) if limit else math.inf)


def limited_sessions(
    spark: SparkSession, sessions: Mapping[str, int], jobs: int = 1, per_core: float = 1.0
) -> dict[str, int]:
    """Divide each node's `sessions` among `jobs` that run at the same time; leave out limits that can't be exceeded.

    A task that Spark runs twice because it seems slow needs two sessions. `per_core` is the jobs' (`Dealing`).
    """
    most = max(cores_of(spark).most, spark.at_once(per_core) if runs_in_driver(spark) else 0)
    copies = _attempts_at_once(spark)
    return {node: max(number // (jobs * copies), 1) for node, number in sessions.items() if number < most * copies}


def _attempts_at_once(spark: SparkSession) -> int:
    is_twice = not runs_in_driver(spark) and spark.sparkContext.getConf().get("spark.speculation", "false") == "true"
    return 2 if is_twice else 1


# One task reads or loads at least this fast, so that several tasks share only higher limits. Tasks that share a limit
# leave the shares of those that have ended unused.
TASK_BYTES_PER_SECOND = 16 << 20


class Shares(NamedTuple):
    """How many tasks of a job may run at once, by node, as in `limited_sessions`, and the rate of each (None: any)."""

    sessions: dict[str, int]
    bytes_per_second: float | None


def sessions_for(sessions: Mapping[str, int], bytes_per_second: int | None) -> dict[str, int]:
    """Return the sessions that tasks need to reach this rate on each node, or all of these `sessions` if it is None."""
    wanted = None if bytes_per_second is None else -(-bytes_per_second // TASK_BYTES_PER_SECOND)
    return {node: number if wanted is None else min(number, wanted) for node, number in sessions.items()}


def share_rate(
    spark: SparkSession,
    sessions: Mapping[str, int],
    bytes_per_second: int | None,
    jobs: int = 1,
    per_core: float = 1.0,
) -> Shares:
    """Divide `bytes_per_second` of every node among the tasks that may run there at once, in all `jobs`.

    The fewer tasks there are, the closer they come to the limit, so a low limit allows one task at a time.
    """
    if bytes_per_second is None:
        return Shares(limited_sessions(spark, sessions, jobs, per_core), None)
    fewer = sessions_for(sessions, bytes_per_second)
    copies, most = _attempts_at_once(spark), max(fewer.values(), default=1)
    at_once = max(most // (jobs * copies), 1) * jobs * copies
    return Shares(limited_sessions(spark, fewer, jobs, per_core), bytes_per_second / max(at_once, most))


def deal(tasks: Sequence[Task], dealing: Dealing[Task], cores: Cores) -> list[list[int]]:
    """Distribute the tasks to lanes, which are lists of task indexes; lanes with the largest first tasks come first.

    `dealing.sessions` contains only limits that the job could exceed.
    """
    sizes = [max(dealing.bytes_of(task), 1) for task in tasks]
    total = sum(sizes)
    wanted = min(max(total // LANE_BYTES, LANES_PER_CORE_MIN * cores.now), cores.lanes_max)
    lanes: list[list[int]] = []
    for some, most in _together(tasks, dealing):
        share = math.ceil(wanted * sum(sizes[number] for number in some) / total)
        lanes += _spread(some, sizes, int(min(share, most, len(some))))
    return sorted(lanes, key=lambda lane: -sizes[lane[0]])


def _together(tasks: Sequence[Task], dealing: Dealing[Task]) -> Iterable[tuple[list[int], float]]:
    """Group the indexes of tasks that share nodes with limits; return each group with its lowest limit."""
    parents = {node: node for node in dealing.sessions}

    def root(node: str) -> str:
        while parents[node] != node:
            parents[node] = node = parents[parents[node]]
        return node

    first: dict[int, str] = {}
    for number, task in enumerate(tasks):
        for node in dealing.nodes_of(task):
            if node in parents:
                parents[root(node)] = root(first.setdefault(number, node))
    nodes_by_root: dict[str, list[int]] = {}
    for number in range(len(tasks)):
        nodes_by_root.setdefault(root(first[number]) if number in first else "", []).append(number)
    least = dict.fromkeys(nodes_by_root, math.inf)
    for node, most in dealing.sessions.items():
        if (node_root := root(node)) in least:
            least[node_root] = min(least[node_root], most)
    return [(numbers, least[node_root]) for node_root, numbers in nodes_by_root.items()]


def _spread(numbers: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Distribute tasks to `count` lanes of about equal bytes: largest task first, always to the smallest lane."""
    lanes: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, lane) for lane in range(count)]
    for number in sorted(numbers, key=lambda number: -sizes[number]):
        load, lane = heap[0]
        lanes[lane].append(number)
        heapq.heapreplace(heap, (load + sizes[number], lane))
    return lanes


Report = TypeVar("Report")
Done = TypeVar("Done")
ProblemOf: TypeAlias = Callable[[Report], ErrorReport | None]
POLL_SECONDS = 0.3
END_POLL_SECONDS, END_SECONDS_MAX = 0.1, 10.0
# Spark's message about jobs that were cancelled.
CANCELLED = "cancellation of all jobs"
PROCESS_LOST = (
    "a process of this command was killed, perhaps because memory ran out: its tasks run in the command, which takes"
    " longer"
)
# 20,000 base-object tasks take about 50 MB in the driver; at 64 MB each, such a job reads over 1 TB.
TASKS_PER_JOB_MAX = 20_000


class JobWatch(Protocol):
    """Decides when a job can't go on: for example, a Watch over the nodes."""

    def on_silence(self, act: Callable[[], object]) -> AbstractContextManager[None]:
        """Return a context in which `act` is called once the job can't go on."""
        ...


class SparkSource(Protocol):
    """A Spark session that may not have been started yet."""

    def begin(self, needs: ExecutorNeeds, progress: Progress, amount: Amount) -> None:
        """Start the session in the background, unless it was started before, or the driver can do the work itself.

        `amount` is added to the amounts of earlier calls.

        No jobs may be running, and no DataFrames may be kept from earlier ones, because more work than before may need
        a new session.

        On a cluster, wait for it and raise the error of any executor that can't take part. Must be called before
        anything is created on a node or in the store.
        """
        ...

    def session(self) -> SparkSession:
        """Start the session unless it was started before; wait for it and return it.

        If the driver does the work, return a DriverSession, which has started nothing.
        """
        ...

    @property
    def is_small(self) -> bool:
        """Whether the driver does the work, as far as is known."""
        ...


def start_session(spark: SparkSource, progress: Progress) -> SparkSession:
    """Wait for the Spark session, as a separate step of `progress` unless the driver does the work, and return it."""
    if not spark.is_small:
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
    watch: JobWatch | None = None,
    problem_of: ProblemOf[Report] | None = None,
    kept: dict[int, Report] | None = None,
) -> list[Report]:
    """Run `work` on every task in Spark tasks; return the reports in task order.

    The tasks are distributed according to `dealing`; without it, each becomes one Spark task. If `watch` finds that a
    node is not responding, the job is cancelled, because a task may be waiting for that node. Reports are small
    (descriptions of objects), so collecting them is bounded by the number of tasks.

    If `problem_of` returns a problem of a report, the job is cancelled, and the problem's error is raised. This is for
    problems that the other tasks would have, too, after waiting as long: see `shared_problem`.

    If an error is raised, `kept` gets the reports of the lanes that had ended before, by the index of the task. A lane
    that a problem ended may be among them.
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

    def followed(task: Task) -> Report:
        if not isinstance(progress, NodeShares):
            return work(task)
        with following(partial(progress.read, task)):
            return work(task)

    def keep(ended: Mapping[int, Sequence[Report]]) -> None:
        # A lane that a problem ended has fewer reports than tasks.
        found = (one for lane, reports in ended.items() for one in zip(lanes[lane], reports, strict=False))
        (kept if kept is not None else {}).update(found)

    if runs_in_driver(spark):
        in_lanes = _run_in_driver(
            spark,
            _DriverLanes(
                [[tasks[number] for number in lane] for lane in lanes],
                work,
                followed,
                progress.read if isinstance(progress, NodeShares) else None,
                problem_of,
                shown.note,
            ),
            spark.at_once(dealing.per_core if dealing else 1),
            count,
            watch,
            problem_of,
            keep,
        )
        return _in_task_order(lanes, in_lanes)

    def follow(ended: EndedLanes) -> None:
        if not ended.problems():
            count(ended.new())
            return
        # The job may end in this moment, and Spark with it.
        with suppress(Exception):
            cancel_jobs(spark)

    with closing(EndedLanes(spark.sparkContext)) as ended:
        try:
            with job_progress(spark, shown, watch, partial(follow, ended)):
                dealt = spark.sparkContext.parallelize(
                    [(lane, [tasks[number] for number in numbers]) for lane, numbers in enumerate(lanes)], len(lanes)
                )
                run = partial(_run, work, problem_of, first_work(), ended.accumulator, ended.job, kept is not None)
                reports = dealt.map(run).collect()
            raise_first(ended.problems())
        except Exception:
            keep(ended.reports())
            raise_first(ended.problems())
            raise
        # Count the lanes that finished after the last poll.
        count(ended.left(len(lanes)))
    return _in_task_order(lanes, reports)


def _in_task_order(lanes: Sequence[Sequence[int]], reports: Iterable[Sequence[Report]]) -> list[Report]:
    by_task = dict(zip(chain.from_iterable(lanes), chain.from_iterable(reports), strict=True))
    return [by_task[number] for number in range(len(by_task))]


class JobCancelledError(RuntimeError):
    """The tasks in the driver were stopped by `cancel_jobs` or a watch."""


class _DriverLanes(Generic[Task, Report]):
    """The lanes of a job in the driver, which its threads take one after the other.

    A thread does the work itself, `followed`, or leaves it to a process; then `read` is called with a task and the
    bytes that it has read. `note` is told of a process that was lost.
    """

    def __init__(
        self,
        lanes: Sequence[Sequence[Task]],
        work: Callable[[Task], Report],
        followed: Callable[[Task], Report],
        read: Callable[[Task, int], None] | None,
        problem_of: ProblemOf[Report] | None,
        note: Callable[[str], None],
    ) -> None:
        self.futures = [Future[list[Report]]() for _ in lanes]
        self._left = deque(enumerate(lanes))
        self._work, self._followed, self._read, self._problem_of, self._note = work, followed, read, problem_of, note
        self._job = new_job()
        self._stops: set[Callable[[], None]] = set()
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """End the running tasks, and let no more begin."""
        self._is_stopped.set()
        for end in list(self._stops):
            end()

    def run_some(self, process: TaskProcess | None) -> None:
        """Take lanes until there are none left, and run them in the `process` if there is one."""
        while True:
            try:
                number, lane = self._left.popleft()
            except IndexError:
                return
            try:
                self.futures[number].set_result(self._run_in(process, lane) if process else self._run(lane))
            except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
                self.futures[number].set_exception(error)

    def results(self) -> dict[int, list[Report]]:
        """Return the reports of the lanes that have ended without an error, by number."""
        done = ((number, future) for number, future in enumerate(self.futures) if future.done())
        return {number: future.result() for number, future in done if future.exception() is None}

    def _run(self, lane: Sequence[Task]) -> list[Report]:
        with stoppable_requests() as end_requests, stoppable_sessions() as end_sessions:
            ends = {end_requests, end_sessions}
            self._stops.update(ends)
            try:
                return _until_problem(
                    lambda task: self._unless_stopped(partial(self._followed, task)), lane, self._problem_of
                )
            finally:
                self._stops.difference_update(ends)

    def _run_in(self, process: TaskProcess, lane: Sequence[Task]) -> list[Report]:
        stop, was_lost = partial(process.stop, self._job), process.is_lost
        self._stops.add(stop)
        try:
            run = partial(process.run, self._job, Lane(self._work, lane, self._problem_of), self._read)
            return self._unless_stopped(run)
        except ProcessLostError:
            if process.is_lost and not was_lost:
                self._note(PROCESS_LOST)
        finally:
            self._stops.discard(stop)
        return self._run(lane)

    def _unless_stopped(self, work: Callable[[], Done]) -> Done:
        """Return what `work` returns; raise JobCancelledError if the job is stopped before or during it."""
        if self._is_stopped.is_set():
            raise JobCancelledError(CANCELLED)
        try:
            result = work()
        except Exception as error:
            if self._is_stopped.is_set():
                raise JobCancelledError(CANCELLED) from error
            raise
        # The end of a connection may be what the result is about.
        if self._is_stopped.is_set():
            raise JobCancelledError(CANCELLED)
        return result


def _run_in_driver(
    session: DriverSession,
    lanes: _DriverLanes[Task, Report],
    at_once: int,
    count: Callable[[Iterable[int]], None],
    watch: JobWatch | None,
    problem_of: ProblemOf[Report] | None,
    keep: Callable[[Mapping[int, Sequence[Report]]], None],
) -> list[list[Report]]:
    """Run `at_once` lanes at a time in threads, and `count` a lane when its tasks have ended; return reports by lane.

    All threads but the first leave the work to the session's processes, as far as there are any.

    If the job is cancelled, or this thread is interrupted, no more tasks begin, and the connections to nodes and
    requests to the store (`stoppable_requests`) of the others are ended repeatedly, until all tasks have ended. Then
    `keep` is called with the reports of the lanes that had ended.
    """
    futures, stop = lanes.futures, lanes.stop
    processes = [None, *session.processes]
    # Daemons: a task that waits for a file system can't be ended, and must not keep the command from ending.
    threads = [
        threading.Thread(target=lanes.run_some, args=(process,), name=f"task {number}", daemon=True)
        for number, process in zip(range(min(len(futures), at_once)), chain(processes, repeat(None)), strict=False)
    ]
    with session.stoppable(stop), watch.on_silence(stop) if watch else nullcontext():
        try:
            for thread in threads:
                thread.start()
            numbers = {future: number for number, future in enumerate(futures)}
            for future in as_completed(futures):
                reports = future.result()
                if problem_of:
                    raise_first([problem_of(reports[-1])])
                count([numbers[future]])
        except BaseException:
            _await_ended(threads, stop)
            keep(lanes.results())
            raise
    return [future.result() for future in futures]


def _await_ended(threads: Iterable[threading.Thread], stop: Callable[[], None]) -> None:
    """Call `stop` repeatedly until all threads have ended, for END_SECONDS_MAX at most."""
    deadline = time.monotonic() + END_SECONDS_MAX
    for thread in threads:
        while True:
            stop()
            if not thread.is_alive() or time.monotonic() > deadline:
                break
            thread.join(END_POLL_SECONDS)


def run_many(
    spark: SparkSession,
    work: Callable[[Task], Report],
    tasks: Iterable[Task],
    progress: Progress | NodeShares[Task],
    dealing: Dealing[Task] | None = None,
    problem_of: ProblemOf[Report] | None = None,
) -> Iterator[list[Report]]:
    """Call `run_tasks` for any number of tasks, at most TASKS_PER_JOB_MAX at a time; yield the reports of each job."""
    left = iter(tasks)
    while some := list(islice(left, TASKS_PER_JOB_MAX)):
        yield run_tasks(spark, work, some, progress, dealing, problem_of=problem_of)


def _until_problem(
    work: Callable[[Task], Report], tasks: Sequence[Task], problem_of: ProblemOf[Report] | None
) -> list[Report]:
    """Run the tasks one after the other; the first report with a problem is the last."""
    reports: list[Report] = []
    for task in tasks:
        reports.append(work(task))
        if problem_of and problem_of(reports[-1]):
            break
    return reports


def _run(
    work: Callable[[Task], Report],
    problem_of: ProblemOf[Report] | None,
    first: FirstWork | None,
    ended: Accumulator[Lanes],
    job: int,
    keeps: bool,  # noqa: FBT001  # bound by position
    dealt: tuple[int, Sequence[Task]],
) -> list[Report]:
    lane, tasks = dealt
    begin_task(first)
    reports = _until_problem(work, tasks, problem_of)
    problem = problem_of(reports[-1]) if problem_of else None
    say_ended(ended, job, lane, LaneEnd(problem, reports if keeps else ()))
    return reports


@contextmanager
def job_progress(
    spark: SparkSession,
    progress: Progress,
    watch: JobWatch | None = None,
    count: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Report the tasks of this block's jobs as they finish, by calling `count` periodically if it is given.

    The jobs are cancelled if the block raises, or if `watch` finds that a node is not responding.
    """
    with polling(count or _stage_count(spark, progress)):
        try:
            with (
                watch.on_silence(partial(cancel_jobs, spark)) if watch else nullcontext(),
                awaiting_executors(spark, None, progress),
                raising_executor_errors(),
            ):
                yield
        except BaseException:
            # Tasks must release their sessions and slots before the caller cleans up the nodes.
            cancel_jobs(spark)
            raise


@contextmanager
def stage_progress(spark: SparkSession, progress: Progress) -> Iterator[None]:
    """Report the tasks of this block's jobs as they finish; unlike `job_progress`, never cancel the jobs."""
    with polling(_stage_count(spark, progress)):
        yield


def _stage_count(spark: SparkSession, progress: Progress) -> Callable[[], None]:
    """Return a function that advances `progress` by the tasks of active stages that finished since its last call."""
    seen: dict[int, int] = {}

    def count() -> None:
        if runs_in_driver(spark):
            return
        tracker = spark.sparkContext.statusTracker()
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info and info.numCompletedTasks > seen.get(stage, 0):
                progress.advance(info.numCompletedTasks - seen.get(stage, 0))
                seen[stage] = info.numCompletedTasks

    return count


@contextmanager
def polling(count: Callable[[], object]) -> Iterator[None]:
    """While the block runs, call `count` in a thread every POLL_SECONDS, and report what tasks are waiting for."""
    done = threading.Event()

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            with unless_jvm_ended():
                count()
            pass_on()

    thread = threading.Thread(target=poll, name="job progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class HasProblem(Protocol):
    """A task's report, which may be about a problem."""

    @property
    def problem(self) -> ErrorReport | None:
        """What went wrong, if anything."""
        ...


def shared_problem(report: HasProblem) -> ErrorReport | None:
    """Return the problem of a report if other tasks would have it, too: a node or the store can't be reached.

    It is a `problem_of` for `run_tasks`.
    """
    return if_shared(report.problem)


def if_shared(problem: ErrorReport | None) -> ErrorReport | None:
    """Return the problem if it is not one of a single object or table."""
    return problem if problem and problem["exit_code"] in NOT_OF_THE_OBJECT else None


def raise_first(problems: Sequence[ErrorReport | None]) -> None:
    """Raise the first error that a task reported, with its own class and the messages of all others in its details."""
    reported = [problem for problem in problems if problem]
    if reported:
        error = error_of(reported[0])
        if len(reported) > 1:
            error.details["others"] = [problem["message"] for problem in reported[1:]]
        raise error


def run_own_tasks(
    work: Callable[[Task], Report],
    tasks: Sequence[Task],
    sessions: Sessions,
    progress: Progress | NodeShares[Task],
    at_once: int,
) -> list[Report]:
    """Run `work` on every task in threads, `at_once` at a time; return the reports in task order.

    Each thread may use as much memory as a task in an executor.

    If this thread is interrupted, the tasks' requests to the store and this process's connections to the nodes, except
    `sessions`, are ended repeatedly until all tasks have finished. The tasks must release their slots before the caller
    cleans up the nodes. If a node stops responding, the sessions' watch ends the connections to it.
    """
    stops: list[Callable[[], None]] = []

    def run(task: Task) -> Report:
        with stoppable_requests() as stop:
            stops.append(stop)
            return work(task)

    if not tasks:
        return []
    futures: dict[Future[Report], Task] = {}
    with ThreadPoolExecutor(max_workers=min(len(tasks), at_once)) as threads:
        try:
            futures |= {threads.submit(run, task): task for task in tasks}
            for future in as_completed(futures):
                if isinstance(progress, NodeShares):
                    progress.end([futures[future]])
                else:
                    progress.advance(1)
        except BaseException:
            for future in futures:
                future.cancel()
            while wait(futures, END_POLL_SECONDS).not_done:
                for stop in stops:
                    stop()
                shut_down_sessions(sessions.nodes, sessions.connections.values())
            raise
        return [future.result() for future in futures]
