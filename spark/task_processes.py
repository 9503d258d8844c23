"""Processes that run the tasks of jobs for a command that does without Spark.

Python's lock lets only one thread of a process compute at a time, except in long calls of libraries. Tasks that check
rows make short calls: on two cores, two threads read WAL archives in the same time as one, and processes keep all cores
busy. A process imports modules for 0.7 s, so it starts before the first job.

A process takes lanes of tasks through a pipe, one at a time, as Spark's workers do. It ends with the pipe, in the
middle of a task if need be.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any, NamedTuple, TypeVar

from cutline.columns.allocator import choose_allocator
from cutline.storage.waits import listening, tell

Task = TypeVar("Task")
Report = TypeVar("Report")

# They are imported by name, because they belong to a higher layer.
PRELOADED = ("cutline.check.partitions", "cutline.check.segment_hashes")
END_SECONDS_MAX = 5.0
_jobs = itertools.count()


@dataclass(frozen=True, slots=True)
class InDriver:
    """A value for tasks that run in the driver, with the attributes of a broadcast that they use."""

    value: Any

    def unpersist(self) -> None:
        """Do nothing."""


class ProcessLostError(Exception):
    """The process has ended, or never began; the tasks can be run elsewhere."""


class Lane(NamedTuple):
    """The tasks that a process runs one after the other, until `is_last` of a report; None if every task is to run."""

    work: Callable[[Any], Any]
    tasks: Sequence[Any]
    is_last: Callable[[Any], object] | None


class TaskProcess:
    """A process that runs lanes for this one. Thread-safe."""

    def __init__(self) -> None:
        """Start the process; raise OSError if that fails."""
        # Ctrl-C and the end of a terminal reach only this process, which then ends the other.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._job = -1
        # By id, which no other value can get as long as this one is kept.
        self._sent: dict[int, InDriver] = {}

    def run(self, job: int, lane: Lane) -> list[Any]:
        """Return the reports on the lane's tasks. Values that tasks share (InDriver) are sent once for each `job`.

        Raises what a task raises, and ProcessLostError.
        """
        with self._lock:
            if job != self._job:
                self._job = job
                self._sent.clear()
            try:
                requests, answers = _pipes_of(self._process)
                pickle.dump(job, requests, pickle.HIGHEST_PROTOCOL)
                _Sender(requests, self._sent).dump(lane)
                requests.flush()
                while isinstance(answer := pickle.load(answers), str):
                    tell(answer)
                reports, error = answer
            except Exception as lost:
                # After a lane that can't be pickled, or an answer that can't be read, the pipes are useless.
                self.kill()
                raise ProcessLostError from lost
        if error is not None:
            raise error
        found: list[Any] = reports
        return found

    def kill(self) -> None:
        """End the process at once. May be called from any thread, and again."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and wait until it has ended, for END_SECONDS_MAX at most.

        A task that waits for a file system can't be ended, and must not keep the command from ending.
        """
        if self._lock.acquire(blocking=False):
            for pipe in _pipes_of(self._process):
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()
            self._lock.release()
        else:
            # While a thread waits for an answer, nothing else can close the pipes.
            self.kill()
        try:
            self._process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()


def start_processes(count: int) -> list[TaskProcess]:
    """Start `count` processes, or as many as the machine can; they import modules in the background."""
    processes: list[TaskProcess] = []
    with contextlib.suppress(OSError):
        # Python may not know its own program.
        processes += (TaskProcess() for _ in range(count if sys.executable else 0))
    return processes


def new_job() -> int:
    """Return a number for `TaskProcess.run`."""
    return next(_jobs)


def _pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    return process.stdin, process.stdout


class _Sender(pickle.Pickler):
    """Pickles tasks; a value that they share is pickled only the first time."""

    def __init__(self, pipe: IO[bytes], sent: dict[int, InDriver]) -> None:
        super().__init__(pipe, pickle.HIGHEST_PROTOCOL)
        self._sent = sent

    def persistent_id(self, value: object) -> tuple[int, *tuple[object, ...]] | None:
        if not isinstance(value, InDriver):
            return None
        number = id(value)
        if number in self._sent:
            return (number,)
        self._sent[number] = value
        return number, value.value


class _Receiver(pickle.Unpickler):
    """Unpickles what _Sender has pickled; `known` are the values that it has sent."""

    def __init__(self, pipe: IO[bytes], known: dict[int, InDriver]) -> None:
        super().__init__(pipe)
        self._known = known

    def persistent_load(self, reference: tuple[int, *tuple[object, ...]]) -> InDriver:
        number, *value = reference
        if value:
            self._known[number] = InDriver(value[0])
        return self._known[number]


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Run lanes until the pipe ends.

    The answer to a lane is the result of `_run`; before it come texts for the operator (str), if there are any.
    """
    known: dict[int, InDriver] = {}
    of_job = -1
    # Several threads may tell of waits for the store.
    writing = threading.Lock()

    def answer(value: object) -> None:
        with writing:
            pickle.dump(value, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()

    with listening(answer):
        while True:
            try:
                job = pickle.load(requests)
            except EOFError:
                return
            if job != of_job:
                known.clear()
                of_job = job
            lane: Lane = _Receiver(requests, known).load()
            answer(_run(lane))


def _run(lane: Lane) -> tuple[list[Any], BaseException | None]:
    """Return the reports, and what a task raised, if anything."""
    from cutline.columns.python_workers import begin_task

    begin_task(None)
    reports: list[Any] = []
    try:
        for task in lane.tasks:
            reports.append(lane.work(task))
            if lane.is_last and lane.is_last(reports[-1]):
                break
    except Exception as error:  # noqa: BLE001  # raised in the other process
        error.add_note(traceback.format_exc())
        return [], error
    return reports, None


def _end_with_pipe() -> None:
    """End this process when the other end of the standard input is closed, even while a task runs."""
    ended = select.poll()
    ended.register(0, 0)

    def wait() -> None:
        ended.poll()
        os._exit(0)

    threading.Thread(target=wait, name="end", daemon=True).start()


def _main() -> None:
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    choose_allocator()
    _end_with_pipe()
    for name in PRELOADED:
        import_module(name)
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
