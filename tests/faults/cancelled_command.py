"""Run `snapshot …` in this process, and cancel it at a point: by requests in the store, which its own thread obeys.

The command line, its handler of SIGTERM and its exit code are those of a process. Only Spark's session is the tests'.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import cutline.cli.main
import cutline.cli.output.activity
import cutline.cli.process.stopping
import cutline.snapshots.operations.activity as activities
from cutline.fleet.progress import Reading, Silent
from cutline.snapshots.operations.activity import Activity
from cutline.snapshots.operations.cancelling import Cancelled, cancel_operations
from cutline.snapshots.operations.under_way import UnderWay, read_one
from tests.commands.in_process import run_here
from tests.commands.watching import Reached, Watching

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.fleet.config import Fleet
    from cutline.snapshots.records.operation_records import CancelRequest

LOOK_SECONDS, SIGN_SECONDS = 0.02, 0.05
SECONDS_MAX = 60.0
STEP, BEGUN = "step ", "operation begun"


@dataclass(slots=True)
class Stepping(Watching):
    """Calls `then` at the beginning of every step, too, as at a point `step NAME`, and when an operation has begun."""

    operation: str = ""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.reached(f"{STEP}{name}")

    def tell(self, reading: Reading) -> None:
        if reading.operation and reading.operation != self.operation:
            self.operation = reading.operation
            self.reached(BEGUN)


@dataclass(frozen=True, slots=True)
class CancelledRun:
    """How the command ended, what each `cancel` said, and how long it took from the first request to the end."""

    code: int
    document: dict[str, Any]
    answers: list[Cancelled]
    seconds: float

    @property
    def results(self) -> list[str]:
        return [one.result.value for one in self.answers]


@dataclass(slots=True)
class Canceller:
    """Cancels the command that runs in this process, once `cancel` is called: by so many `cancel`s at once."""

    fleet: Fleet
    count: int = 1
    watching: Stepping = field(default_factory=Stepping)
    activity: Activity | None = None
    found: UnderWay | None = None
    asked_at: float = 0.0
    asked: threading.Event = field(default_factory=threading.Event)
    # The command's thread has read a request, and stopped the command or not; or nobody asks it for anything.
    looked: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ask the command to stop; return when it has read that, if it is not interrupted before."""
        if self.asked.is_set():
            return
        assert self.activity is not None
        store, operation = self.fleet.store.open(), self.watching.operation or self.activity._own
        deadline = time.monotonic() + SECONDS_MAX
        # A check has nothing but its signs.
        while (found := read_one(store, operation)) is None:
            assert time.monotonic() < deadline, "there is no sign of life"
            time.sleep(LOOK_SECONDS)
        self.found, self.asked_at = found, time.monotonic()
        self.asked.set()
        assert self.looked.wait(SECONDS_MAX), "nobody has read the request"

    def run(self, *words: str, spark: SparkSession | None = None) -> CancelledRun:
        """Run the command line, which somebody cancels meanwhile."""
        with ThreadPoolExecutor(self.count) as threads:
            # Ready before: the command may be interrupted as soon as the first of them has asked.
            answers = [threads.submit(self._ask) for _ in range(self.count)]
            try:
                with self._observing():
                    code, document = run_here(self.fleet, *words, spark=spark)
                seconds = time.monotonic() - self.asked_at
            finally:
                was_asked = self.asked.is_set()
                self.asked.set()
        assert was_asked, f"the point was not reached: {document}"
        return CancelledRun(code, document, [one for answer in answers for one in answer.result()], seconds)

    def _ask(self) -> list[Cancelled]:
        self.asked.wait()
        found = cancel_operations(self.fleet, [self.found], SECONDS_MAX, Silent()) if self.found else []
        # Of what is being published nobody asks anything.
        self.looked.set()
        return found

    @contextmanager
    def _observing(self) -> Iterator[None]:
        canceller = self

        class Observed(Activity):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                canceller.activity = self

            def _obey(self, request: CancelRequest) -> None:
                super()._obey(request)
                canceller.looked.set()

        before = signal.signal(signal.SIGTERM, cutline.cli.main._unwind)
        try:
            with (
                patch.object(cutline.cli.output.activity, "Activity", Observed),
                patch.object(cutline.cli.output.activity, "progress", lambda _: nullcontext(self.watching)),
                patch.object(activities, "LOOK_SECONDS", LOOK_SECONDS),
                patch.object(activities, "SIGN_SECONDS", SIGN_SECONDS),
            ):
                yield
        finally:
            signal.signal(signal.SIGTERM, before)
            # Of this process, which goes on.
            cutline.cli.process.stopping._requests.clear()
            cutline.cli.process.stopping._is_stopping.clear()
            cutline.cli.main._signals.clear()


def cancel_at(
    fleet: Fleet, at: tuple[str, int], *words: str, spark: SparkSession | None = None, count: int = 1
) -> CancelledRun:
    """Run the command line, and cancel it as soon as it has reached the point so many times."""
    canceller = Canceller(fleet, count)

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == at:
            canceller.cancel()

    canceller.watching.then = then
    return canceller.run(*words, spark=spark)


def cancel_when(
    fleet: Fleet, is_there: Callable[[], object], *words: str, spark: SparkSession | None = None
) -> CancelledRun:
    """Run the command line, and cancel it as soon as `is_there`, which a thread asks."""
    canceller, over = Canceller(fleet), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            if is_there():
                canceller.cancel()
                return

    thread = threading.Thread(target=look, name="cancel when")
    thread.start()
    try:
        return canceller.run(*words, spark=spark)
    finally:
        over.set()
        thread.join()
