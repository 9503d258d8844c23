"""Processes that run the tasks of jobs for a command that does without Spark.

Python's lock lets only one thread of a process compute at a time, except in long calls of libraries. Tasks that read,
check and write rows make short calls: on two cores, two threads read WAL archives in the same time as one, and
processes keep all cores busy.

A process is forked, so it has all modules at once: importing them takes 0.7 s. A process with threads can't be forked
safely: another thread may hold a lock at that moment, and no thread of the new process will release it. So commands
fork before they start a thread (`can_fork`).

A process takes lanes of tasks through a pipe, one at a time, as Spark's workers do. If the lane is stopped, its task
ends as in a thread of the command, and cleans up. The process ends with the pipe, in the middle of a task if need be.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from msgspec import Struct

from cutline.nodes.open_sessions import stoppable_sessions
from cutline.spark.task_progress import following
from cutline.storage.store import stoppable_requests
from cutline.storage.waits import listening, tell

END_SECONDS_MAX = 5.0
# The files that a process has open, by number.
OPEN_FILES = Path("/proc/self/fd")
# Wakes the main thread for signals, and holds no lock (cli/process/stopping.py).
HARMLESS_THREADS = frozenset({"MainThread", "nudge"})
# How a job's number is sent to be stopped.
JOB = struct.Struct("q")
_jobs = itertools.count()


class InDriver(Struct, frozen=True):
    """A value for tasks that run in the driver, with the attributes of a broadcast that they use."""

    value: Any

    def unpersist(self) -> None:
        """Do nothing."""


class ProcessLostError(Exception):
    """The process has ended, or can't be sent the tasks; they can be run elsewhere."""


class Lane(NamedTuple):
    """The tasks that a process runs one after the other, until `is_last` of a report; None if every task is to run."""

    work: Callable[[Any], Any]
    tasks: Sequence[Any]
    is_last: Callable[[Any], object] | None


class LaneResult(NamedTuple):
    """The reports of a lane, or what a task raised."""

    reports: list[Any]
    error: Exception | None = None


class TaskProcess:
    """A process that runs lanes for this one. Thread-safe."""

    def __init__(self) -> None:
        """Fork the process; raise OSError if that fails."""
        with contextlib.ExitStack() as opened:
            child_requests, requests = _open_pipe(opened)
            answers, child_answers = _open_pipe(opened)
            child_stops, stops = _open_pipe(opened)
            command = os.getpid()
            try:
                with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                    # From 3.12 on, Python warns of every thread, among them that of the allocator, which handles forks.
                    self.pid = os.fork()
                if not self.pid:
                    _be_process(child_requests, child_answers, child_stops)
            finally:
                # An interrupt may come before _be_process: the command must not clean up in both processes.
                if os.getpid() != command:
                    os._exit(1)
            for pipe in (child_requests, child_answers, child_stops):
                pipe.close()
            opened.pop_all()
        self._requests, self._answers, self._stops = requests, answers, stops
        os.set_blocking(stops.fileno(), False)
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._has_ended = self.is_lost = False
        self._job = -1
        # By id, which no other value can get as long as this one is kept.
        self._sent: dict[int, InDriver] = {}

    def run(self, job: int, lane: Lane, read: Callable[[Any, int], None] | None = None) -> list[Any]:
        """Return the reports on the lane's tasks. Values that tasks share (InDriver) are sent once for each `job`.

        `read` is called with a task and the bytes that it has read (`tell_read`).

        Raises what a task raises, and ProcessLostError.
        """
        with self._lock:
            self._send(job, lane)
            try:
                while not isinstance(answer := self._receive(), LaneResult):
                    if isinstance(answer, str):
                        tell(answer)
                    elif read:
                        index, size_bytes = answer
                        read(lane.tasks[index], size_bytes)
            except BaseException:
                # The next lane must not get what is left of this one's answers.
                self._lost()
                raise
        if answer.error is not None:
            raise answer.error
        return answer.reports

    def _send(self, job: int, lane: Lane) -> None:
        if self.is_lost:
            raise ProcessLostError
        if job != self._job:
            self._job = job
            self._sent.clear()
        # Only what was sent as a whole counts.
        sent, pickled = dict(self._sent), io.BytesIO()
        try:
            pickle.dump(job, pickled, pickle.HIGHEST_PROTOCOL)
            _Sender(pickled, sent).dump(lane)
        except Exception as error:
            raise ProcessLostError from error
        try:
            self._requests.write(pickled.getbuffer())
            self._requests.flush()
        except (OSError, ValueError) as error:
            raise self._lost() from error
        self._sent = sent

    def _receive(self) -> Any:
        try:
            return pickle.load(self._answers)
        except Exception as error:
            raise self._lost() from error

    def _lost(self) -> ProcessLostError:
        """End the process, whose pipes are useless from now on."""
        self.kill()
        self.is_lost = True
        return ProcessLostError()

    def stop(self, job: int) -> None:
        """End the sessions and requests of the job's lane, if it runs. May be called from any thread, and again."""
        # If the pipe is full, the process has been told often enough; if it has ended, there is nothing to stop.
        with contextlib.suppress(OSError, ValueError):
            os.write(self._stops.fileno(), JOB.pack(job))

    def kill(self) -> None:
        """End the process at once. May be called from any thread, and again."""
        with self._ending:
            # Once it has ended and was waited for, its number may be that of another process.
            if not self._has_ended:
                # If SIGCHLD is ignored, the system forgets the process when it ends.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def close(self, seconds_max: float | None = None) -> None:
        """End the process, and wait until it has ended, for `seconds_max` (END_SECONDS_MAX) at most.

        A task that waits for a file system can't be ended, and must not keep the command from ending.
        """
        if self._answers.closed:
            return
        self.kill()
        ended = select.poll()
        # Without any flag, only the end of the pipe counts.
        ended.register(self._answers, 0)
        if ended.poll((END_SECONDS_MAX if seconds_max is None else seconds_max) * 1000):
            with self._ending:
                if not self._has_ended:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(self.pid, 0)
                    self._has_ended = True
            for pipe in (self._requests, self._answers, self._stops):
                with contextlib.suppress(OSError):
                    pipe.close()


def can_fork() -> bool:
    """Whether this process can be forked safely: its threads hold no locks, and its libraries allow it (on Linux)."""
    is_alone = {thread.name for thread in threading.enumerate()} <= HARMLESS_THREADS
    return sys.platform == "linux" and OPEN_FILES.is_dir() and is_alone


def start_processes(count: int) -> list[TaskProcess]:
    """Start `count` processes, or as many as the machine can."""
    processes: list[TaskProcess] = []
    with contextlib.suppress(OSError):
        processes += (TaskProcess() for _ in range(count))
    return processes


def end_processes(processes: Iterable[TaskProcess]) -> None:
    """End all processes, and wait for END_SECONDS_MAX at most; may be called again."""
    deadline = time.monotonic() + END_SECONDS_MAX
    for process in processes:
        process.kill()
    for process in processes:
        process.close(max(deadline - time.monotonic(), 0))


def new_job() -> int:
    """Return a number for `TaskProcess.run`."""
    return next(_jobs)


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


class _Running:
    """The lane that runs, if any. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: int | None = None
        self._ends: tuple[Callable[[], None], ...] = ()
        self.is_stopped = False

    @contextlib.contextmanager
    def lane(self, job: int) -> Iterator[None]:
        """Let `stop` end the sessions and requests that this thread opens in the block."""
        with stoppable_requests() as end_requests, stoppable_sessions() as end_sessions:
            with self._lock:
                self._job, self._ends, self.is_stopped = job, (end_requests, end_sessions), False
            try:
                yield
            finally:
                with self._lock:
                    self._job = None

    def stop(self, job: int) -> None:
        """Let no more task of the job's lane begin, and end the sessions and requests of the task that runs."""
        with self._lock:
            if job != self._job:
                return
            self.is_stopped = True
            for end in self._ends:
                end()


def _serve(requests: IO[bytes], answers: IO[bytes], running: _Running) -> None:
    """Run lanes until the pipe ends.

    The answer to a lane is its LaneResult. Before it come texts for the operator (str), and the index of a task with
    the bytes that it has read.
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
            with running.lane(job):
                result = _run(lane, answer, running)
            answer(result)


def _run(lane: Lane, answer: Callable[[object], None], running: _Running) -> LaneResult:
    def tell_of(index: int, size_bytes: int) -> None:
        answer((index, size_bytes))

    reports: list[Any] = []
    try:
        for index, task in enumerate(lane.tasks):
            with following(partial(tell_of, index)):
                reports.append(lane.work(task))
            if running.is_stopped or (lane.is_last and lane.is_last(reports[-1])):
                break
    except Exception as error:  # noqa: BLE001  # raised in the other process
        return LaneResult([], _sendable(error))
    return LaneResult(reports)


def _sendable(error: Exception) -> Exception:
    """Return the error, or if it can't be pickled, another with its text."""
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # whatever its class raises
        return RuntimeError(text)
    error.add_note(text)
    return error


def _open_pipe(opened: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return opened.enter_context(os.fdopen(reading, "rb")), opened.enter_context(os.fdopen(writing, "wb"))


def _be_process(requests: IO[bytes], answers: IO[bytes], stops: IO[bytes]) -> NoReturn:
    """Run lanes in this process, which was just forked, and end it."""
    try:
        # Ctrl-C and the end of a terminal reach only the other process, which then ends this one.
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGURG):
            signal.signal(number, signal.SIG_DFL)
        _close_files(requests.fileno(), answers.fileno(), stops.fileno())
        running = _Running()
        threading.Thread(target=_follow, args=(requests, stops, running), name="end", daemon=True).start()
        _serve(requests, answers, running)
        os._exit(0)
    finally:
        # The command's frames are on this stack, too: nothing of them must run here.
        os._exit(1)


def _close_files(*kept: int) -> None:
    """Close all files but those `kept`. What a library prints goes nowhere: it is not the command's output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    # Among the others are the pipes of other processes, which would otherwise not end with the command.
    for number in [int(path.name) for path in OPEN_FILES.iterdir()]:
        if number > 2 and number not in kept:
            # One was that of the listing, and is closed already.
            with contextlib.suppress(OSError):
                os.close(number)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # until the end


def _follow(requests: IO[bytes], stops: IO[bytes], running: _Running) -> None:
    """End this process when the other end of `requests` is closed, even while a task runs; stop the lane if told to."""
    told = select.poll()
    told.register(requests, 0)
    told.register(stops, select.POLLIN)
    # Both pipes are closed together, and either may be first.
    while requests.fileno() not in dict(told.poll()) and (job := os.read(stops.fileno(), JOB.size)):
        running.stop(*JOB.unpack(job))
    os._exit(0)
