"""Tasks in the driver: their order, their errors, what ends them, and when Spark starts after all."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Reading, Silent
from cutline.spark.amount import Amount
from cutline.spark.driver_session import DriverSession, cancel_jobs, runs_in_driver
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.on_demand import SWITCH_SECONDS, SparkOnDemand
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import (
    Cores,
    Dealing,
    JobCancelledError,
    NodeShares,
    cores_of,
    limited_sessions,
    run_tasks,
)
from cutline.spark.task_progress import tell_read
from cutline.storage.errors import UnreachableError, report_of
from cutline.storage.store import check_not_stopped

END_SECONDS_MAX = 20.0
EQUAL = Dealing[Any](lambda _: 1)


def not_started() -> Any:
    raise AssertionError("no task needs Spark")


class Counted(Silent):
    """Counts the tasks that have ended."""

    def __init__(self) -> None:
        self.tasks = 0

    def advance(self, steps: int = 1) -> None:
        self.tasks += steps


def run(work: Callable[[Any], Any], tasks: Sequence[Any], cores: int = 2, dealing: Dealing[Any] = EQUAL) -> list[Any]:
    session: Any = DriverSession(not_started, cores)
    return run_tasks(session, work, tasks, Silent(), dealing)


def test_reports_are_in_the_order_of_the_tasks_and_counted() -> None:
    session: Any = DriverSession(not_started, 2)
    progress = Counted()
    sizes = Dealing[int](lambda number: number + 1)
    assert run_tasks(session, lambda number: number * 2, range(100), progress, sizes) == list(range(0, 200, 2))
    assert progress.tasks == 100
    assert run_tasks(session, lambda number: number, [], progress, sizes) == []


class Readings(Silent):
    """Keeps the readings of nodes."""

    def __init__(self) -> None:
        self.of_nodes: list[tuple[str, int, int | None]] = []
        self.tasks = 0

    def advance(self, done: int) -> None:
        self.tasks += done

    def tell(self, reading: Reading) -> None:
        if reading.node:
            self.of_nodes.append((reading.node, reading.done, reading.total))


def test_a_node_moves_with_what_its_tasks_have_read() -> None:
    """A task counts as its planned amount, whether it reads more or less, and whatever it has told before."""
    session: Any = DriverSession(not_started, 1)
    progress, tasks = Readings(), [("a", 100), ("a", 50)]
    shares = NodeShares[Any].of_tasks(progress, tasks, lambda task: task[0], lambda task: task[1])

    def work(task: tuple[str, int]) -> None:
        for part in (30, 40):
            tell_read(part)

    run_tasks(session, work, tasks, shares, Dealing[Any](lambda _: 1, lambda _: ("a",), {"a": 1}))
    tell_read(7)
    assert progress.of_nodes == [("a", done, 150) for done in (30, 70, 100, 120, 150)]
    assert progress.tasks == 2


class Running:
    """Counts how many tasks run at the same time; on a busy machine, the first ones wait for the `expected` number."""

    def __init__(self, expected: int) -> None:
        self.expected, self.now, self.most = expected, 0, 0
        self._changed = threading.Condition()

    def __call__(self, _: int) -> None:
        with self._changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self.expected, timeout=10)
        time.sleep(0.02)
        with self._changed:
            self.now -= 1


def test_as_many_tasks_run_at_once_as_there_are_cores() -> None:
    running = Running(3)
    run(running, range(12), cores=3)
    assert running.most == 3


@pytest.mark.parametrize(("cores", "at_once"), [(1, 2), (2, 3), (3, 5), (6, 8), (8, 8)])
def test_tasks_that_wait_for_servers_run_more_at_once(cores: int, at_once: int) -> None:
    """Up to eight threads: more would wait for Python's lock."""
    running = Running(at_once)
    run(running, range(24), cores=cores, dealing=Dealing(lambda _: 1, per_core=1.5))
    assert running.most == at_once


def test_more_tasks_at_once_do_not_exceed_a_nodes_sessions() -> None:
    session: Any = DriverSession(not_started, 2)
    assert limited_sessions(session, {"a": 2, "b": 3}) == {}
    limits = limited_sessions(session, {"a": 2, "b": 3}, per_core=1.5)
    assert limits == {"a": 2}
    running = Running(2)
    run(running, range(20), dealing=Dealing(lambda _: 1, lambda _: ("a",), limits, per_core=1.5))
    assert running.most == 2


def test_a_node_has_as_many_sessions_as_it_allows() -> None:
    session: Any = DriverSession(not_started, 4)
    limits = limited_sessions(session, {"a": 2, "b": 4})
    assert limits == {"a": 2}
    few, many = Running(2), Running(4)
    run(few, range(20), cores=4, dealing=Dealing(lambda _: 1, lambda _: ("a",), limits))
    run(many, range(20), cores=4, dealing=Dealing(lambda _: 1, lambda _: ("b",), limits))
    assert (few.most, many.most) == (2, 4)


def test_the_first_error_ends_the_job() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ZeroDivisionError
        time.sleep(0.01)

    with pytest.raises(ZeroDivisionError):
        run(work, range(1000))
    assert len(begun) < 100


def test_the_first_problem_ends_the_job() -> None:
    """A task that waits for a store that has fallen silent need not wait as long as the first."""
    session: Any = DriverSession(not_started, 2)
    begun = list[int]()
    problem = report_of(UnreachableError("the first"))

    def work(number: int) -> Any:
        begun.append(number)
        if number == 0:
            return problem
        await_end()
        raise AssertionError("nobody has ended the task")

    with pytest.raises(UnreachableError, match="the first"):
        run_tasks(session, work, range(10), Silent(), EQUAL, problem_of=lambda report: report)
    # The thread that reported it may have begun the next task.
    assert set(begun) <= {0, 1, 2}


def test_a_cancelled_job_ends_its_tasks_and_begins_no_more() -> None:
    session: Any = DriverSession(not_started, 2)
    begun, both = list[int](), threading.Barrier(3, timeout=END_SECONDS_MAX)

    def work(number: int) -> None:
        begun.append(number)
        both.wait()
        await_end()

    def cancel_when_both_run() -> None:
        both.wait()
        cancel_jobs(session)

    thread = threading.Thread(target=cancel_when_both_run)
    thread.start()
    try:
        with pytest.raises(JobCancelledError, match="cancellation of all jobs"):
            run_tasks(session, work, range(10), Silent(), EQUAL)
    finally:
        thread.join()
    assert len(begun) == 2
    # A later job is not cancelled.
    assert run_tasks(session, lambda number: number, range(3), Silent(), EQUAL) == [0, 1, 2]


def await_end() -> None:
    """Wait like a request to the store, until it is ended."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while time.monotonic() < deadline:
        check_not_stopped()
        time.sleep(0.005)


def test_a_report_of_a_cancelled_task_does_not_count() -> None:
    session: Any = DriverSession(not_started, 1)

    def work(_: int) -> str:
        cancel_jobs(session)
        return "the connection was ended"

    with pytest.raises(JobCancelledError):
        run_tasks(session, work, [1], Silent(), EQUAL)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Interrupt the thread that waits for tasks once this is set."""
    begun = threading.Event()

    def interrupted(_: object) -> Any:
        assert begun.wait(END_SECONDS_MAX)
        raise KeyboardInterrupt

    monkeypatch.setattr("cutline.spark.spark_jobs.as_completed", interrupted)
    return begun


def test_an_interrupt_ends_the_tasks(interrupt: threading.Event) -> None:
    ended = threading.Event()

    def work(_: int) -> None:
        interrupt.set()
        try:
            await_end()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run(work, [1])
    assert ended.is_set()


def test_an_interrupt_does_not_wait_for_a_task_that_can_not_be_ended(
    interrupt: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.spark.spark_jobs.END_SECONDS_MAX", 0.2)
    ended = threading.Event()

    def work(_: int) -> None:
        interrupt.set()
        ended.wait(END_SECONDS_MAX)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(work, [1, 2, 3])
    assert time.monotonic() - began < END_SECONDS_MAX / 2
    ended.set()


def test_a_watch_that_finds_a_silent_node_ends_the_tasks() -> None:
    class SilentAtOnce:
        def on_silence(self, act: Callable[[], None]) -> Any:
            act()
            return threading.Lock()  # a context manager

    session: Any = DriverSession(not_started, 2)
    watch: Any = SilentAtOnce()
    with pytest.raises(JobCancelledError):
        run_tasks(session, lambda number: number, [1, 2], Silent(), EQUAL, watch)


def test_values_are_not_copied_for_tasks_in_the_driver() -> None:
    session: Any = DriverSession(not_started, 2)
    value = object()
    sent = broadcast(session, value)
    assert run_tasks(session, lambda _: sent.value is value, [1], Silent(), EQUAL) == [True]
    sent.unpersist()


def test_anything_else_starts_spark_once() -> None:
    started: list[int] = []

    class Context:
        defaultParallelism = 7  # noqa: N815  # Spark's name
        master = "local[7]"

        def getConf(self) -> dict[str, str]:  # noqa: N802  # Spark's name
            return {}

    class Started:
        sparkContext = Context()  # noqa: N815  # Spark's name

        def sql(self, query: str) -> str:
            return f"rows of {query}"

    def start() -> Any:
        started.append(1)
        return Started()

    session: Any = DriverSession(start, 2)
    assert cores_of(session) == Cores(2, 2)
    assert runs_in_driver(session)
    assert session.sql("a") == "rows of a"
    assert session.sql("b") == "rows of b"
    assert started == [1]
    # The jobs that follow run in Spark, too.
    assert not runs_in_driver(session)
    assert cores_of(session) == Cores(7, 7)


def test_threads_take_turns_at_short_intervals_until_the_command_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'name = "f"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "s1"\ndsn = "dbname=bank"\n')
    fleet, before = load_fleet(file), sys.getswitchinterval()
    with SparkOnDemand(fleet, "test") as spark:
        spark.begin(ExecutorNeeds(fleet.store), Silent(), Amount(0))
        assert runs_in_driver(spark.session())
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS, rel=0.1)
    assert sys.getswitchinterval() == before
