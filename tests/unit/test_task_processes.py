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

from cutline.fleet.progress import Silent
from cutline.spark import on_demand, task_processes
from cutline.spark.driver_session import DriverSession, cancel_jobs
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


def is_running(pid: int) -> bool:
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
    assert pid == process.pid != os.getpid()


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
    os.kill(process.pid, signal.SIGKILL)
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
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.5)
        file.unlink()

    threading.Thread(target=kill).start()
    assert run_tasks(session, exec, [WAIT.format(str(file))] * 8, Silent(), ALONE) == [None] * 8
    assert not is_running(process.pid)


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
    assert set(pids) == {os.getpid(), process.pid}


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
    wait_until(lambda: not is_running(process.pid))


def test_a_process_ends_with_the_command_in_the_middle_of_a_task() -> None:
    program = (
        "import os, sys, threading, time\n"
        "from cutline.spark.task_processes import Lane, TaskProcess, new_job\n"
        "process = TaskProcess()\n"
        "process.run(new_job(), Lane(abs, [1], None))\n"
        "print(process.pid, flush=True)\n"
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
    assert not Path(f"/proc/{process.pid}").exists()
    process.close()
    process.kill()


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
    assert is_running(process.pid)
    file.unlink()
    running.join()


def test_what_a_task_tells_of_a_failing_store_is_told_here(process: TaskProcess) -> None:
    told: list[str] = []
    with waits.listening(told.append):
        assert run_one(process, waits.tell, "the store is slow", "it is still slow") == [None, None]
    assert told == ["the store is slow", "it is still slow"]


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


# An expression: the files that a process has open, by number.
OPEN_FILES = (
    "(lambda os: {n: os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')})(__import__('os'))"
)


def test_a_process_has_only_its_own_files(tmp_path: Path) -> None:
    """Otherwise it would keep the pipes of another process open, and locks of the command."""
    with (tmp_path / "locked").open("w"):
        processes = start_processes(2)
    for process in processes:
        (files,) = run_one(process, eval, OPEN_FILES)
        assert [files.pop(number) for number in "012"] == [os.devnull] * 3
        # The folder that lists them has no file any more. What it prints goes to the last.
        kinds = sorted(Path(file).name.partition(":")[0] for file in files.values())
        assert [kind for kind in kinds if not kind.isdecimal()] == ["null", "pipe", "pipe"]
        process.close()


def in_a_command(program: str) -> str:
    """What a program prints that has the threads of a command."""
    begin = "from cutline.cli.process.stopping import nudge_until_handled\nnudge_until_handled()\n"
    done = subprocess.run([sys.executable, "-c", begin + program], capture_output=True, text=True, check=True)
    return done.stdout


def test_only_a_process_without_other_threads_is_forked() -> None:
    program = (
        "import threading\n"
        "from cutline.spark.task_processes import can_fork\n"
        "print(can_fork())\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(can_fork())\n"
    )
    assert in_a_command(program).split() == ["True", "False"]


@pytest.mark.parametrize(
    ("rows", "command", "master", "expected"),
    [
        (2 * on_demand.ROWS_PER_PROCESS, "check", "local[4]", 2),
        (2 * on_demand.ROWS_PER_PROCESS - 2, "check", "local[4]", 1),
        (on_demand.ROWS_PER_PROCESS - 1, "check", "local[4]", 0),
        (2 * on_demand.ROWS_PER_PROCESS, "check", "local[2]", 1),
        (2 * on_demand.ROWS_PER_PROCESS, "create", "local[4]", 0),
    ],
)
def test_processes_run_tasks_if_there_are_enough_rows(
    tmp_path: Path, rows: int, command: str, master: str, expected: int
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'name = "f"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "s1"\ndsn = "dbname=bank"\n'
        f'[spark]\nmaster = "{master}"\n'
    )
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from cutline.fleet.config import load_fleet\n"
        "from cutline.fleet.progress import Silent\n"
        "from cutline.spark.amount import Amount\n"
        "from cutline.spark.needs import ExecutorNeeds\n"
        "from cutline.spark.on_demand import SparkOnDemand\n"
        f"fleet = load_fleet(Path({str(file)!r}))\n"
        f"with SparkOnDemand(fleet, 'test', in_processes={command == 'check'}) as spark:\n"
        "    for _ in range(2):\n"
        f"        spark.begin(ExecutorNeeds(fleet.store), Silent(), Amount(0, rows={rows // 2}))\n"
        "    print(len(spark.session().processes))\n"
        # All have ended.
        "try:\n"
        "    os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError:\n"
        "    print('none')\n"
    )
    assert in_a_command(program).split() == [str(expected), "none"]
