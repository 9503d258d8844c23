"""The activity of this process: forward its progress, store signs of life, and stop the command on request.

A thread stores the signs and looks for requests to stop every few seconds. Its errors are ignored. A command that ends
within the first seconds stores nothing.

A command may itself be an operation without an intent while it works on other operations: a prune runs one removal
after another. In that case both operations have signs, and a request to stop either of them stops the command.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, Self

from msgspec import UNSET, Struct, UnsetType, field

from cutline.fleet.own_process import own_label, own_process
from cutline.fleet.progress import Forwarding, Progress, Reading, StepPace
from cutline.fleet.record import Time
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.operations.signs import (
    SIGN_SECONDS,
    clear_signs,
    next_number,
    request_numbers,
    sign_name,
    sign_numbers,
    store_sign,
)
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import (
    CancelRequest,
    CheckedPoint,
    CopiedPoint,
    NodeSign,
    Outcome,
    SignOfLife,
    WatchState,
    operation_key,
    outcome_name,
    read_cancel_request,
    read_intent,
    write_operation_record,
)
from cutline.snapshots.records.unfinished_records import last_run, resumption_name
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.waits import urgent_requests


class Command(Struct, frozen=True):
    """A running command. `snapshot` is "" for all snapshots, and `operation` is "" until the command reports its id."""

    kind: str
    snapshot: str = ""
    operation: str = ""


class Ending(Struct, frozen=True):
    """The end of an operation without an intent; see Outcome. `code` is None if its process could not report it."""

    state: Literal["done", "failed"]
    reason: str = ""
    code: int | None = None
    volumes: Mapping[str, int] = field(default_factory=dict)
    checked: tuple[CheckedPoint, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    watch: WatchState | UnsetType = UNSET
    copied: tuple[CopiedPoint, ...] = ()


def record_without_intent(store: ObjectStore, command: Command, began_at: Time, by: str, ending: Ending) -> None:
    """Store the outcome of an operation without an intent, unless it already has one; raises StoreUnreachableError."""
    outcome = Outcome(
        operation=command.operation,
        kind=command.kind,
        snapshot=command.snapshot,
        increment=UNSET,
        state=ending.state,
        reason=ending.reason,
        ended_at=current_time(),
        by=by,
        began_at=began_at,
        code=UNSET if ending.code is None else ending.code,
        volumes=dict(ending.volumes),
        checked=ending.checked or UNSET,
        copied=ending.copied or UNSET,
        phases=dict(ending.phases) or UNSET,
        watch=ending.watch,
    )
    with suppress(ObjectExistsError):
        write_operation_record(store, outcome_name(ending.checked), outcome)


# How often the thread looks for requests to stop.
LOOK_SECONDS = 2.0
# If signs can't be stored, or old signs can't be deleted, the interval doubles, so that few signs are left behind.
RARER, SIGN_SECONDS_MAX = 2.0, 300.0
END_SECONDS_MAX = 5.0
# A sign contains the progress of at most this many nodes: those that have made the least progress.
SIGN_NODES_MAX = 20
# Read the clock when the module is loaded, because a restore is planned before its activity begins.
PROCESS_BEGAN_AT = current_time()


class Activity(Forwarding):
    """A Progress that forwards all calls to `target`, and keeps the command's current progress for its signs of life.

    `open_store` opens the store, and raises if it belongs to a different fleet. `stop` stops the process. It is called
    at most once, and never after `ending`. `begun` is called with the id of each operation once its intent is stored.
    """

    def __init__(
        self,
        target: Progress,
        command: Command,
        open_store: Callable[[], ObjectStore],
        stop: Callable[[CancelRequest], None],
        begun: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(target)
        self._command, self._open_store, self._stop = command, open_store, stop
        self._begun = begun
        self._shown: list[_Signs] = []
        self._by, self.began_at = own_label(command.kind, command.snapshot), current_time()
        self._step = StepPace("begin", None, "")
        self._left: tuple[float, float] | None = None
        self._is_rough = False
        self._watch: WatchState | UnsetType = UNSET
        self._own = command.operation
        # The operations that the command has worked on since it last looked for requests.
        self._operations: list[str] = []
        # The number of each operation's next request.
        self._requests: dict[str, int] = {}
        self._is_ending = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="activity", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.ending()
        self._ended.set()
        # The wait is bounded, because the store may not answer.
        self._thread.join(END_SECONDS_MAX)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            self._step = StepPace(name, total, unit)
        self.target.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        with self._lock:
            self._step.done += done
        self.target.advance(done)

    def tell(self, reading: Reading) -> None:
        with self._lock:
            is_new = bool(reading.operation) and reading.operation not in (self._own, *self._operations[-1:])
            if is_new:
                self._operations.append(reading.operation)
                # `ending` was called for the previous operation.
                self._is_ending = False
            self._left = None if reading.seconds_left is None else (reading.seconds_left, time.monotonic())
            self._is_rough = reading.is_rough
            if reading.unit or reading.node:
                self._step.take(reading)
        if is_new and self._begun is not None:
            self._begun(reading.operation)
        self.target.tell(reading)

    def watches(self, state: WatchState) -> None:
        """Include a watch's reports on its tasks in its signs of life."""
        with self._lock:
            self._watch = state

    def ending(self) -> None:
        """Ignore requests to stop from now on."""
        with self._lock:
            self._is_ending = True
        self.target.ending()

    def show(self, operation: str) -> None:
        """Store a sign of life of the command's own operation at once; raises the store's errors."""
        signs = self._signs_of(operation)
        signs.store_next(self._sign(signs))
        with self._lock:
            self._shown.append(signs)

    def become(self, operation: str) -> None:
        """Treat the command itself as this operation from now on."""
        with self._lock:
            self._own = operation

    def _run(self) -> None:
        # Otherwise signs of life, and requests to stop, would wait behind what the command's own tasks store.
        with urgent_requests():
            self._follow_operations()

    def _follow_operations(self) -> None:
        signs: list[_Signs] = []
        while not self._ended.wait(LOOK_SECONDS):
            # If this fails, the next round tries again.
            with suppress(Exception):
                signs = self._follow(signs)
            for sign in signs:
                # When the command ends, it waits for this loop, which waits for the store.
                if not self._ended.is_set() and time.monotonic() >= sign.due:
                    # Store the sign before looking for requests, so that `cancel` sees that there is a process to stop.
                    with suppress(Exception):
                        # Check the store again: if it has been removed, a sign stored in its place would never be
                        # found.
                        self._open_store()
                        sign.store_next(self._sign(sign))
            if signs and not self._ended.is_set():
                with suppress(Exception):
                    self._look(signs[0].store)
        for sign in [*signs, *(shown for shown in self._shown if shown not in signs)]:
            sign.clear()

    def _follow(self, signs: list[_Signs]) -> list[_Signs]:
        """Return the signs of life of the command's own operation and of its current operation, if it has them."""
        with self._lock:
            wanted = [operation for operation in (self._own, *self._operations[-1:]) if operation]
            known = {sign.operation: sign for sign in (*self._shown, *signs)}
        for sign in signs:
            if sign.operation not in wanted:
                sign.clear()
        return [known.get(operation) or self._signs_of(operation) for operation in wanted]

    def _signs_of(self, operation: str) -> _Signs:
        """Return new signs of life for an operation, numbered after those from earlier processes."""
        store = self._open_store()
        created = {
            entry.key.rpartition("/")[2]: entry.created_at for entry in store.inventory(f"operations/{operation}")
        }
        kind, snapshot, increment, began_at = self._command.kind, self._command.snapshot, None, self.began_at
        with suppress(ObjectMissingError):
            intent = read_intent(store, operation)
            kind, snapshot, increment, began_at = intent.kind, intent.snapshot, intent.increment, intent.began_at
        if datetime.fromisoformat(began_at) < datetime.fromisoformat(PROCESS_BEGAN_AT):
            # Earlier requests were meant for a previous process; this command resumes its restore or full snapshot. As
            # soon as a full snapshot is resumed, requests are for this process.
            resumed_at = created.get(f"{resumption_name(last_run(created) - 1)}.json", datetime.max.replace(tzinfo=UTC))
            earlier = [name for name, created_at in created.items() if created_at < resumed_at]
            self._requests[operation] = next_number(request_numbers(earlier))
        number = next_number(sign_numbers(created))
        is_clean = number == 1
        return _Signs(store, operation, Command(kind, snapshot, operation), increment, began_at, number, is_clean)

    def _look(self, store: ObjectStore) -> None:
        """Stop the command if anyone has asked to stop one of its operations since the last look."""
        with self._lock:
            own, looked = self._own, list(self._operations)
        for operation in (*([own] if own else []), *looked):
            if (request := self._request_of(store, operation)) is not None:
                self._obey(request)
                break
        with self._lock:
            # The current operation stays in the list for the next look.
            self._operations = self._operations[max(len(looked) - 1, 0) :]

    def _request_of(self, store: ObjectStore, operation: str) -> CancelRequest | None:
        """Read the next request to stop; an unreadable request is ignored."""
        while True:
            number = self._requests.get(operation, 1)
            try:
                return read_cancel_request(store, operation, number)
            except ManifestError:
                self._requests[operation] = number + 1

    def _obey(self, request: CancelRequest) -> None:
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
            self._stop(request)

    def _sign(self, signs: _Signs) -> SignOfLife:
        now = time.monotonic()
        with self._lock:
            step, left, is_rough, watch = self._step, self._left, self._is_rough, self._watch
            shown = step.least_advanced(SIGN_NODES_MAX)
            others = len(step.readings.keys() - {"", *shown})
            paces = {node: step.pace(node, now) for node in ("", *shown)}
        whole, about = paces.pop(""), signs.about
        return SignOfLife(
            operation=signs.operation,
            kind=about.kind,
            snapshot=about.snapshot,
            increment=signs.increment,
            by=self._by,
            began_at=signs.began_at,
            seen_at=current_time(),
            next_seconds=signs.rarer,
            phase=step.name,
            done=whole.reading.done,
            total=whole.reading.total,
            unit=whole.reading.unit,
            rate=_rounded(whole.rate),
            nodes=tuple(
                NodeSign(
                    node=node,
                    done=pace.reading.done,
                    total=pace.reading.total,
                    unit=pace.reading.unit,
                    rate=_rounded(pace.rate),
                    seconds_left=_rounded(pace.seconds_left),
                )
                for node, pace in sorted(paces.items())
            ),
            other_nodes=others or UNSET,
            seconds_left=_rounded(max(left[0] - (now - left[1]), 0.0) if left else whole.seconds_left),
            is_rough=is_rough or left is None,
            watch=watch,
            process=own_process() or UNSET,
        )


class _Signs(Struct):
    """The signs of life of an operation. `number` is the next sign's number, `due` its time on the monotonic clock.

    `is_clean` is set if only the last sign can be left in the store.
    """

    store: ObjectStore
    operation: str
    about: Command
    increment: int | None
    began_at: Time
    number: int
    is_clean: bool
    due: float = 0.0
    every_seconds: float = field(default_factory=lambda: SIGN_SECONDS)

    def store_next(self, sign: SignOfLife) -> None:
        before, rarer, is_clean = self.number - 1, self.rarer, self.is_clean
        # If one of the next steps fails, it is not known which signs are left.
        self.is_clean = False
        self.due, self.every_seconds = time.monotonic() + self.every_seconds, rarer
        self.number = store_sign(self.store, sign, self.number) + 1
        if before:
            self.store.delete(operation_key(self.operation, sign_name(before)))
        self.every_seconds, self.is_clean = SIGN_SECONDS, is_clean

    def clear(self) -> None:
        """Delete the signs, ignoring the store's errors. Makes one request if all earlier requests succeeded."""
        if self.is_clean:
            if last := self.number - 1:
                with suppress(SnapshotError):
                    self.store.delete(operation_key(self.operation, sign_name(last)))
        else:
            clear_signs(self.store, self.operation)

    @property
    def rarer(self) -> float:
        """The interval to the next sign if storing this sign or deleting its predecessor fails."""
        return min(self.every_seconds * RARER, SIGN_SECONDS_MAX)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
