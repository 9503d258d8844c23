"""Processes that run tasks for a command: what they are sent, what ends them, and what happens when one is lost.

The work is always a function of the standard library, which other processes can import.
"""

from __future__ import annotations

import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.spark import on_demand, task_processes
from cutline.spark.amount import Amount
from cutline.spark.driver_session import DriverSession, cancel_jobs
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.on_demand import SparkOnDemand
from cutline.spark.spark_jobs import Dealing, JobCancelledError, run_tasks
from cutline.spark.task_processes import InDriver, Lane, ProcessLostError, TaskProcess, new_job, start_processes
from cutline.storage import waits

SECONDS_MAX = 20.0
ALONE = Dealing[Any](lambda _: 1, per_core=1)
# Waits until this file is deleted, or for as long as a test may take.
WAIT = """
import os, time
until = time.monotonic() + 60
while os.path.exists({!r}) and time.monotonic() < until:
    time.sleep(0.05)
"""


@pytest.fixture
def process() -> Iterator[TaskProcess]:
    process = TaskProcess()
    yield process
    process.close()


def not_started() -> Any:
    raise AssertionError("no task needs Spark")


def run_one(process: TaskProcess, work: Callable[[Any], Any], *tasks: Any) -> list[Any]:
    return process.run(new_job(), Lane(work, tasks, None))


def pid_of(process: TaskProcess) -> int:
    return process._process.pid


def is_running(pid: int) -> bool:
    """Whether a process that is not this one's child is running."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_lane_runs_in_another_process_until_a_report_is_the_last(process: TaskProcess) -> None:
    assert run_one(process, math.sqrt, 4, 9, 16) == [2, 3, 4]
    assert process.run(new_job(), Lane(math.sqrt, [4, 1, 16], (1.0).__eq__)) == [2, 1]
    (pid,) = run_one(process, eval, "__import__('os').getpid()")
    assert pid == pid_of(process) != os.getpid()


def test_what_a_task_raises_is_raised_here_and_the_process_goes_on(process: TaskProcess) -> None:
    with pytest.raises(ValueError, match=r"math domain error|nonnegative") as raised:
        run_one(process, math.sqrt, 4, -1)
    assert "Traceback" in raised.value.__notes__[0]
    assert run_one(process, math.sqrt, 4) == [2]


def test_what_a_task_prints_is_no_answer(process: TaskProcess) -> None:
    assert run_one(process, print, "a" * 100_000) == [None]
    assert run_one(process, math.sqrt, 4) == [2]


def test_shared_values_are_sent_once_for_each_job(process: TaskProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    persistent_id = task_processes._Sender.persistent_id

    def noting(self: Any, value: object) -> Any:
        found = persistent_id(self, value)
        if found is not None:
            sent.append(found[1:])
        return found

    monkeypatch.setattr(task_processes._Sender, "persistent_id", noting)
    one, none, value = InDriver("one"), InDriver(None), operator.attrgetter("value")
    job = new_job()
    assert process.run(job, Lane(value, [one, none, one], None)) == ["one", None, "one"]
    assert process.run(job, Lane(value, [none, one], None)) == [None, "one"]
    assert sent == [("one",), (None,), (), (), ()]
    # Values of an earlier job are forgotten, whatever the new ones are called.
    assert process.run(new_job(), Lane(value, [one], None)) == ["one"]
    assert sent[5:] == [("one",)]


def test_a_lost_process_is_named_and_its_lane_runs_here(process: TaskProcess) -> None:
    os.kill(pid_of(process), signal.SIGKILL)
    with pytest.raises(ProcessLostError):
        run_one(process, math.sqrt, 4)
    session: Any = DriverSession(not_started, 2, processes=[process])
    assert run_tasks(session, math.sqrt, [4, 9, 16, 25], Silent(), ALONE) == [2, 3, 4, 5]


def test_a_process_that_is_killed_during_a_lane_loses_no_task(process: TaskProcess, tmp_path: Path) -> None:
    file = tmp_path / "waiting"
    file.touch()
    session: Any = DriverSession(not_started, 2, processes=[process])

    def kill() -> None:
        time.sleep(1)
        os.kill(pid_of(process), signal.SIGKILL)
        time.sleep(0.5)
        file.unlink()

    threading.Thread(target=kill).start()
    assert run_tasks(session, exec, [WAIT.format(str(file))] * 8, Silent(), ALONE) == [None] * 8
    assert process._process.poll() == -signal.SIGKILL


def test_tasks_that_can_not_be_sent_run_here(process: TaskProcess) -> None:
    def work(number: int) -> int:
        return number + 1

    with pytest.raises(ProcessLostError):
        run_one(process, work, 4)
    session: Any = DriverSession(not_started, 2, processes=[process])
    assert run_tasks(session, work, range(40), Silent(), ALONE) == list(range(1, 41))


def test_threads_and_processes_share_the_lanes(process: TaskProcess) -> None:
    session: Any = DriverSession(not_started, 2, processes=[process])
    slow = "(__import__('time').sleep(0.1), __import__('os').getpid())[1]"
    pids = run_tasks(session, eval, [slow] * 40, Silent(), ALONE)
    assert set(pids) == {os.getpid(), pid_of(process)}


def test_a_job_with_a_watch_runs_here(process: TaskProcess) -> None:
    class Watch:
        def on_silence(self, _: object) -> Any:
            return nullcontext()

    session: Any = DriverSession(not_started, 2, processes=[process])
    pids = run_tasks(session, eval, ["__import__('os').getpid()"] * 8, Silent(), ALONE, Watch())
    assert set(pids) == {os.getpid()}


def test_a_cancelled_job_ends_the_process_at_once(process: TaskProcess, tmp_path: Path) -> None:
    file = tmp_path / "waiting"
    file.touch()
    session: Any = DriverSession(not_started, 2, processes=[process])

    def cancel() -> None:
        time.sleep(1)
        threading.Thread(target=lambda: (time.sleep(0.5), file.unlink())).start()
        cancel_jobs(session)

    threading.Thread(target=cancel).start()
    with pytest.raises(JobCancelledError):
        run_tasks(session, exec, [WAIT.format(str(file))] * 4, Silent(), ALONE)
    wait_until(lambda: process._process.poll() is not None)


def test_a_process_ends_with_the_command_in_the_middle_of_a_task() -> None:
    program = (
        "import os, sys, threading, time\n"
        "from cutline.spark.task_processes import Lane, TaskProcess, new_job\n"
        "process = TaskProcess()\n"
        "process.run(new_job(), Lane(abs, [1], None))\n"
        "print(process._process.pid, flush=True)\n"
        "process.run(new_job(), Lane(time.sleep, [60], None))\n"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    pid = int(command.stdout.readline())
    assert is_running(pid)
    command.kill()
    command.wait()
    command.stdout.close()
    wait_until(lambda: not is_running(pid))


def test_a_closed_process_has_ended(process: TaskProcess) -> None:
    run_one(process, math.sqrt, 4)
    process.close()
    assert process._process.returncode == 0
    process.close()


def test_closing_does_not_wait_for_a_task_that_can_not_be_ended(
    process: TaskProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it reads from a folder on a server that is gone: then not even SIGKILL ends it."""
    file = tmp_path / "waiting"
    file.touch()
    running = threading.Thread(target=lambda: run_one(process, exec, WAIT.format(str(file))))
    running.start()
    wait_until(process._lock.locked)
    monkeypatch.setattr(task_processes, "END_SECONDS_MAX", 0.5)
    with monkeypatch.context() as patched:
        patched.setattr(TaskProcess, "kill", lambda _: None)
        began = time.monotonic()
        process.close()
    assert time.monotonic() - began < SECONDS_MAX
    assert process._process.poll() is None
    file.unlink()
    running.join()


def test_what_a_task_tells_of_a_failing_store_is_told_here(process: TaskProcess) -> None:
    told: list[str] = []
    with waits.listening(told.append):
        assert run_one(process, waits.tell, "the store is slow", "it is still slow") == [None, None]
    assert told == ["the store is slow", "it is still slow"]


def test_without_a_program_there_are_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", None)
    assert start_processes(2) == []


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    process = TaskProcess()
    assert run_one(process, math.sqrt, 4) == [2]
    process.close()


def test_fewer_processes_than_wanted_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[TaskProcess] = []

    def limited() -> TaskProcess:
        if begun:
            raise OSError("no more processes")
        begun.append(TaskProcess())
        return begun[0]

    monkeypatch.setattr(task_processes, "TaskProcess", limited)
    processes = start_processes(3)
    assert processes == begun
    processes[0].close()


@pytest.mark.parametrize(
    ("rows", "command", "expected"),
    [
        (2 * on_demand.ROWS_PER_PROCESS, "check", 2),
        (2 * on_demand.ROWS_PER_PROCESS - 2, "check", 1),
        (on_demand.ROWS_PER_PROCESS - 1, "check", 0),
        (5_000_000, "create", 0),
    ],
)
def test_processes_start_for_an_amount_that_is_worth_it(tmp_path: Path, rows: int, command: str, expected: int) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'name = "f"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "s1"\ndsn = "dbname=bank"\n'
        '[spark]\nmaster = "local[4]"\n'
    )
    fleet = load_fleet(file)
    with SparkOnDemand(fleet, command, in_processes=command == "check") as spark:
        for _ in range(2):
            spark.begin(ExecutorNeeds(fleet.store), Silent(), Amount(0, rows=rows // 2))
        session: Any = spark.session()
        processes = session.processes
        assert len(processes) == expected
    assert all(process._process.returncode is not None for process in processes)
