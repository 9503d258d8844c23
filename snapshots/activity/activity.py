"""The activity of this process: it passes progress on, stores signs of life, and stops if it is asked to.

A thread does both, every few seconds, and never makes the command fail: what it can't store or read, nobody sees. A
command that ends within the first seconds stores nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from fleet.label import own_label
from fleet.progress import Progress, Reading
from fleet.record import Time
from fleet.step_pace import StepPace
from snapshots.activity.command import Command
from snapshots.operations.operation import current_time
from snapshots.operations.restore_decisions import is_publishing
from snapshots.operations.signs import clear_signs, sign_name, sign_numbers, store_sign
from snapshots.records.operation_records import (
    CancelRequest,
    NodeSign,
    SignOfLife,
    operation_key,
    read_cancel_request,
    read_intent,
)
from snapshots.records.store_identity import FLEET_KEY
from storage.errors import SnapshotError
from storage.store import ObjectMissingError, ObjectStore

# How often the thread looks whether somebody asks to stop, and how often it stores a sign.
LOOK_SECONDS, SIGN_SECONDS = 2.0, 6.0
# Where signs can't be stored, or those before not deleted, they become ever rarer: few are left.
RARER, SIGN_SECONDS_MAX = 2.0, 300.0
END_SECONDS_MAX = 5.0


class Activity:
    """A Progress that passes everything on to `target`, and keeps how far the command is."""

    def __init__(
        self,
        target: Progress,
        command: Command,
        open_store: Callable[[], ObjectStore],
        stop: Callable[[CancelRequest], None],
    ) -> None:
        self._target, self._command, self._open_store, self._stop = target, command, open_store, stop
        self._by, self.began_at = own_label(command.kind, command.snapshot), current_time()
        self._step = StepPace("begin", None, "")
        self._left: tuple[float, float] | None = None
        self._is_rough = False
        self._operation = command.operation
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="activity", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # Bounded: the store may not answer.
        self._thread.join(END_SECONDS_MAX)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Keep it and pass it on."""
        with self._lock:
            self._step = StepPace(name, total, unit)
        self._target.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        """Keep it and pass it on."""
        with self._lock:
            self._step.done += done
        self._target.advance(done)

    def tell(self, reading: Reading) -> None:
        """Keep it and pass it on."""
        with self._lock:
            self._operation = reading.operation or self._operation
            self._left = None if reading.seconds_left is None else (reading.seconds_left, time.monotonic())
            self._is_rough = reading.is_rough
            if reading.unit or reading.node:
                self._step.take(reading)
        self._target.tell(reading)

    def note(self, text: str) -> None:
        """Pass it on."""
        self._target.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Pass it on."""
        self._target.reached(point, node=node)

    def _run(self) -> None:
        signs: _Signs | None = None
        try:
            while not self._ended.wait(LOOK_SECONDS):
                with self._lock:
                    operation = self._operation
                # What is not answered now is asked again.
                with suppress(SnapshotError):
                    if signs is None or signs.operation != operation:
                        _clear(signs)
                        signs = self._begin(operation)
                    if signs is None:
                        continue
                    if not signs.is_asked and (request := read_cancel_request(signs.store, operation)):
                        signs.is_asked = True
                        self._obey(signs.store, request)
                    if time.monotonic() >= signs.due:
                        signs.store_next(self._sign(signs))
        finally:
            _clear(signs)

    def _begin(self, operation: str) -> _Signs | None:
        """The signs of an operation, after those that its earlier processes have left."""
        if not operation or not (store := self._open_store()).exists(FLEET_KEY):
            # Nothing is stored where `init` has not made a store.
            return None
        snapshot, increment, began_at = self._command.snapshot, None, self.began_at
        with suppress(ObjectMissingError):
            intent = read_intent(store, operation)
            snapshot, increment, began_at = intent.snapshot, intent.increment, intent.began_at
        numbers = sign_numbers(store.list_children(f"operations/{operation}"))
        return _Signs(store, operation, snapshot, increment, began_at, max(numbers, default=0) + 1)

    def _obey(self, store: ObjectStore, request: CancelRequest) -> None:
        if is_publishing(store, request.operation):
            self._target.note(f"asked to stop at {request.asked_at}, but the restore publishes: it only goes forward")
        else:
            self._stop(request)

    def _sign(self, signs: _Signs) -> SignOfLife:
        now = time.monotonic()
        with self._lock:
            step, left, is_rough = self._step, self._left, self._is_rough
            paces = {node: step.pace(node, now) for node in ("", *step.readings)}
        whole = paces.pop("")
        return SignOfLife(
            operation=signs.operation, kind=self._command.kind, snapshot=signs.snapshot, increment=signs.increment,
            by=self._by, began_at=signs.began_at, seen_at=current_time(), next_seconds=signs.rarer, phase=step.name,
            done=whole.reading.done, total=whole.reading.total, unit=whole.reading.unit, rate=_rounded(whole.rate),
            nodes=tuple(
                NodeSign(
                    node=node, done=one.reading.done, total=one.reading.total, unit=one.reading.unit,
                    rate=_rounded(one.rate), seconds_left=_rounded(one.seconds_left),
                )
                for node, one in sorted(paces.items())
            ),
            seconds_left=_rounded(max(left[0] - (now - left[1]), 0.0) if left else whole.seconds_left),
            is_rough=is_rough or left is None,
        )  # fmt: skip


@dataclass(slots=True)
class _Signs:
    """The signs of one operation. `number` is the next one's; `due` is when to store it, on the monotonic clock."""

    store: ObjectStore
    operation: str
    snapshot: str
    increment: int | None
    began_at: Time
    number: int
    due: float = 0.0
    every_seconds: float = field(default_factory=lambda: SIGN_SECONDS)
    is_asked: bool = False

    def store_next(self, sign: SignOfLife) -> None:
        """Store a sign, and delete the one before."""
        before, rarer = self.number - 1, self.rarer
        self.due, self.every_seconds = time.monotonic() + self.every_seconds, rarer
        self.number = store_sign(self.store, sign, self.number) + 1
        self.store.delete(operation_key(self.operation, sign_name(before)))
        self.every_seconds = SIGN_SECONDS

    @property
    def rarer(self) -> float:
        """The seconds to the sign after the next one, unless both can be stored and the one before deleted."""
        return min(self.every_seconds * RARER, SIGN_SECONDS_MAX)


def _clear(signs: _Signs | None) -> None:
    if signs is not None:
        clear_signs(signs.store, signs.operation)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
