"""Processes that run tasks for a command: what they are sent, what ends them, and what happens when one is lost.

They are forked from a process with threads, which commands never do, so the work is always something without locks.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cutline.fleet.progress import Silent
from cutline.spark import on_demand, task_processes
from cutline.spark.amount import Amount
from cutline.spark.driver_session import DriverSession, cancel_jobs
from cutline.spark.spark_jobs import PROCESS_LOST, Dealing, JobCancelledError, NodeShares, run_tasks
from cutline.spark.task_processes import (
    InDriver,
    Lane,
    ProcessLostError,
    TaskProcess,
    end_processes,
    new_job,
    start_processes,
)
from cutline.spark.task_progress import tell_read
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


def test_a_listener_that_fails_leaves_no_answers_to_the_next_lane(process: TaskProcess) -> None:
    def fail(_: object, __: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        process.run(new_job(), Lane(tell_read, [3, 4], None), fail)
    with pytest.raises(ProcessLostError):
        run_one(process, math.sqrt, 4)


def test_an_error_that_can_not_be_sent_is_raised_as_its_text(process: TaskProcess) -> None:
    with pytest.raises(RuntimeError, match="RequestStoppedError"):
        run_one(process, exec, "from cutline.storage.store import RequestStoppedError\nraise RequestStoppedError")
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

    shared = InDriver(7)
    with pytest.raises(ProcessLostError):
        process.run(0, Lane(work, [shared], None))
    # The process goes on, and gets the value that it was not sent.
    assert process.run(0, Lane(operator.attrgetter("value"), [shared], None)) == [7]
    session: Any = DriverSession(not_started, 2, processes=[process])
    assert run_tasks(session, work, range(40), Silent(), ALONE) == list(range(1, 41))
    assert not process.is_lost


def test_threads_and_processes_share_the_lanes(process: TaskProcess) -> None:
    session: Any = DriverSession(not_started, 2, processes=[process])
    slow = "(__import__('time').sleep(0.1), __import__('os').getpid())[1]"
    pids = run_tasks(session, eval, [slow] * 40, Silent(), ALONE)
    assert set(pids) == {os.getpid(), process.pid}


def test_what_a_task_has_read_is_told_here(process: TaskProcess) -> None:
    told: list[tuple[object, int]] = []
    tasks = [3, 4]
    process.run(new_job(), Lane(tell_read, tasks, None), lambda task, size_bytes: told.append((task, size_bytes)))
    assert told == [(3, 3), (4, 4)]
    # A job passes it to the progress of its nodes.
    told.clear()

    class Shares(NodeShares[int]):
        def read(self, task: int, size_bytes: int) -> None:
            told.append((task, size_bytes))

    session: Any = DriverSession(not_started, 2, processes=[process])
    shares = Shares.of_tasks(Silent(), range(1, 41), lambda _: "s1", lambda task: task)
    run_tasks(session, tell_read, range(1, 41), shares, ALONE)
    assert sorted(told) == [(task, task) for task in range(1, 41)]


def test_a_cancelled_job_ends_its_tasks_in_processes_as_in_threads(process: TaskProcess) -> None:
    session: Any = DriverSession(not_started, 2, processes=[process])
    # Each waits for minutes, unless requests of its thread are ended.
    waiting = "__import__('cutline.storage.rate').storage.rate.RateLimit(1.0).spend(1000)"
    threading.Timer(1, cancel_jobs, [session]).start()
    began = time.monotonic()
    with pytest.raises(JobCancelledError):
        run_tasks(session, eval, [waiting] * 4, Silent(), ALONE)
    assert time.monotonic() - began < SECONDS_MAX
    # The process goes on. What it is told about another job does not concern the one that runs.
    job = new_job()
    threading.Timer(0.5, process.stop, [job - 1]).start()
    pause = "__import__('cutline.storage.rate').storage.rate.RateLimit(1.0).spend(2)"
    assert process.run(job, Lane(eval, [pause, "3"], None)) == [None, 3]
    assert run_tasks(session, math.sqrt, [4, 9, 16, 25], Silent(), ALONE) == [2, 3, 4, 5]
    assert run_one(process, math.sqrt, 4) == [2]


def test_a_process_that_was_lost_is_named_once(process: TaskProcess) -> None:
    noted: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            noted.append(text)

    os.kill(process.pid, signal.SIGKILL)
    session: Any = DriverSession(not_started, 2, processes=[process])
    run_tasks(session, time.sleep, [0.02] * 40, Noting(), ALONE)
    assert noted == [PROCESS_LOST]


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
        assert [kind for kind in kinds if not kind.isdecimal()] == ["null", "pipe", "pipe", "pipe"]
        process.close()


def test_processes_that_can_not_be_ended_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "waiting"
    file.touch()
    processes = start_processes(3)
    wait = WAIT.format(str(file))

    def run(process: TaskProcess) -> None:
        with suppress(ProcessLostError):
            run_one(process, exec, wait)

    running = [threading.Thread(target=run, args=[process]) for process in processes]
    for thread in running:
        thread.start()
    wait_until(lambda: all(process._lock.locked() for process in processes))
    monkeypatch.setattr(task_processes, "END_SECONDS_MAX", 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(TaskProcess, "kill", lambda _: None)
        began = time.monotonic()
        end_processes(processes)
        assert 1.0 <= time.monotonic() - began < 2.0
    file.unlink()
    end_processes(processes)
    for thread in running:
        thread.join()


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


def test_a_process_ends_as_usual_if_the_system_waits_for_it() -> None:
    """If SIGCHLD is ignored, as by the program that started this one, waitpid() finds nothing."""
    program = (
        "import signal\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "import os, time\n"
        "from cutline.spark.task_processes import Lane, ProcessLostError, TaskProcess, new_job\n"
        "process, killed = TaskProcess(), TaskProcess()\n"
        "print(process.run(new_job(), Lane(abs, [-1], None)))\n"
        "os.kill(killed.pid, signal.SIGKILL)\n"
        "while os.path.exists(f'/proc/{killed.pid}'):\n"
        "    time.sleep(0.01)\n"
        "try:\n"
        "    killed.run(new_job(), Lane(abs, [-1], None))\n"
        "except ProcessLostError:\n"
        "    print('lost')\n"
        "process.close()\n"
        "killed.close()\n"
        "print('closed')\n"
    )
    assert in_a_command(program).splitlines() == ["[1]", "lost", "closed"]


def test_an_interrupt_at_the_fork_ends_only_the_new_process() -> None:
    program = (
        "import os\n"
        "from cutline.spark import task_processes\n"
        "from cutline.spark.task_processes import TaskProcess\n"
        "def interrupted(*_):\n"
        "    raise KeyboardInterrupt\n"
        "task_processes._be_process = interrupted\n"
        "try:\n"
        "    process = TaskProcess()\n"
        "    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)\n"
        "    process.close()\n"
        "finally:\n"
        "    print('cleaned up', flush=True)\n"
    )
    assert in_a_command(program).splitlines() == ["cleaned up"]


LIMITED = '[limits]\nstore = "10MB/s"\n'


@pytest.mark.parametrize(
    ("amount", "master", "more", "expected"),
    [
        (Amount(0, rows=2 * on_demand.ROWS_PER_PROCESS), "local[4]", "", 2),
        (Amount(0, rows=2 * on_demand.ROWS_PER_PROCESS - 1), "local[4]", "", 1),
        (Amount(2 * on_demand.PAGE_BYTES_PER_PROCESS, rows=1), "local[4]", "", 2),
        (Amount(on_demand.PAGE_BYTES_PER_PROCESS - 1), "local[4]", "", 0),
        (Amount(0, rows=2 * on_demand.ROWS_PER_PROCESS), "local[2]", "", 1),
        (Amount(0, rows=2 * on_demand.ROWS_PER_PROCESS), "local[4]", LIMITED, 0),
    ],
)
def test_processes_run_tasks_if_there_is_enough_to_do(
    tmp_path: Path, amount: Amount, master: str, more: str, expected: int
) -> None:
    begin = f"spark.begin(ExecutorNeeds(fleet.store), Silent(), {amount!r})"
    assert in_block(tmp_path, master, more, begin, "len(spark.session().processes)") == [str(expected)]


@pytest.mark.parametrize(("master", "expected"), [("local[4]", "3"), ("local", "0"), ("local-cluster[2,1,1024]", "0")])
def test_processes_are_forked_for_cores_of_this_machine(tmp_path: Path, master: str, expected: str) -> None:
    assert in_block(tmp_path, master, "", "pass", "len(processes)") == [expected]


def test_processes_end_when_spark_begins(tmp_path: Path) -> None:
    begin = (
        "import types, cutline.spark.start\n"
        "        started = types.SimpleNamespace(is_brief=True, ended=lambda _: None, stop=lambda **_: None)\n"
        "        cutline.spark.start.start_spark = lambda *_, **__: started\n"
        "        spark.begin(ExecutorNeeds(fleet.store), Silent(), Amount(None))"
    )
    assert in_block(tmp_path, "local[4]", "", begin, "count_running()") == ["0"]


def in_block(tmp_path: Path, master: str, more: str, work: str, shown: str) -> list[str]:
    """What a program of the same threads as a command shows, after it has done the work in a session's block."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'name = "f"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "s1"\ndsn = "dbname=bank"\n'
        f'[spark]\nmaster = "{master}"\n{more}'
    )
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from cutline.fleet.config import load_fleet\n"
        "from cutline.fleet.progress import Silent\n"
        "from cutline.spark.amount import Amount\n"
        "from cutline.spark.needs import ExecutorNeeds\n"
        "from cutline.spark.on_demand import SparkOnDemand, forked_processes\n"
        "def count_running():\n"
        "    return len(Path('/proc/self/task', str(os.getpid()), 'children').read_text().split())\n"
        f"fleet = load_fleet(Path({str(file)!r}))\n"
        "with forked_processes(fleet, are_wanted=True, store=True) as processes:\n"
        "    with SparkOnDemand(fleet, 'test', processes=processes) as spark:\n"
        f"        {work}\n"
        f"        print({shown})\n"
        "assert count_running() == 0\n"
    )
    return in_a_command(program).split()
