"""The interface through which code below `cli` reports progress, and the pace of each step.

The progress bars, the JSON lines and the tests each implement `Progress`.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from msgspec import Struct, field

# Between two readings the remaining time is counted down, but not below this fraction of its value.
COUNTED_DOWN = 0.25


class Reading(Struct, frozen=True):
    """The progress of the current step, on one node or, if `node` is "", on all nodes together.

    `total` and `seconds_left` are None if they are unknown. `seconds_left` is for the whole operation; if `is_rough`,
    it may be off by more than a fifth.
    """

    done: int
    total: int | None = None
    unit: str = ""
    node: str = ""
    operation: str = ""
    seconds_left: float | None = None
    is_rough: bool = False


class News(str):
    """A note that needs no action, such as a retry, a wait or a cleanup; `--quiet` suppresses it."""

    __slots__ = ()


class Progress(Protocol):
    """Receives the steps of an operation, in order, from any thread."""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Start the step `name`, which ends the previous step; `total` is its amount of work in `unit`, if known."""

    def advance(self, done: int) -> None:
        """Add `done` units to the current step."""

    def tell(self, reading: Reading) -> None:
        """Report the progress of the current step, perhaps in different units than `advance`."""

    def note(self, text: str) -> None:
        """Report one line that matters to the operator, as `News` if it needs no action."""

    def reached(self, point: str, *, node: str = "") -> None:
        """Report that the crash point `point` was reached, on `node` if every node has this point."""

    def ending(self) -> None:
        """Report that the operation can no longer be stopped: it is done, can only finish, or is undoing its work."""


class Silent:
    """A Progress that ignores everything. A subclass overrides the methods that it needs."""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def tell(self, reading: Reading) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def reached(self, point: str, *, node: str = "") -> None:
        pass

    def ending(self) -> None:
        pass


class Forwarding:
    """A Progress that forwards all calls to `target`. A subclass overrides the methods that it handles."""

    def __init__(self, target: Progress) -> None:
        self.target = target

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.target.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        self.target.advance(done)

    def tell(self, reading: Reading) -> None:
        self.target.tell(reading)

    def note(self, text: str) -> None:
        self.target.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        self.target.reached(point, node=node)

    def ending(self) -> None:
        self.target.ending()


class Noting(Forwarding):
    """Forwards all calls to `target`, and keeps the notes, which a command's result repeats."""

    def __init__(self, target: Progress) -> None:
        super().__init__(target)
        self.notes: list[str] = []

    @property
    def warnings(self) -> list[str]:
        """The notes that need action."""
        return [note for note in self.notes if not isinstance(note, News)]

    @property
    def news(self) -> list[str]:
        """The notes that need no action."""
        return [note for note in self.notes if isinstance(note, News)]

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.target.note(text)


class NodePace(Struct, frozen=True):
    """The latest reading, the units per second since the first reading, and the seconds left at that rate.

    None means unknown.
    """

    reading: Reading
    rate: float | None
    seconds_left: float | None


class StepPace(Struct):
    """The step in progress. Times are on the monotonic clock.

    `readings` contains the latest readings, and `first` contains the units and times from which rates are computed.
    Both are keyed by node, with "" for all nodes together.
    """

    name: str
    total: int | None
    unit: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    readings: dict[str, Reading] = field(default_factory=dict)
    first: dict[str, tuple[int, float]] = field(default_factory=dict)

    def take(self, reading: Reading) -> None:
        """Use the reading for its node; a reading for all nodes replaces the step's own count."""
        self.readings[reading.node] = reading
        if not self.first.get(reading.node, (0, 0.0))[0]:
            # Measure the rate from the first unit done: a slow start says nothing about the pace afterwards.
            self.first[reading.node] = (reading.done, time.monotonic())

    def least_advanced(self, count: int) -> list[str]:
        """Return up to `count` nodes that have readings: those that have done the smallest share of their work."""

        def part(node: str) -> float:
            reading = self.readings[node]
            # A node without work counts as done.
            return reading.done / reading.total if reading.total else float(reading.total is not None)

        return sorted((node for node in self.readings if node), key=lambda node: (part(node), node))[:count]

    def pace(self, node: str, now: float) -> NodePace:
        """Return the progress and pace on one node, or on all nodes together if `node` is ""."""
        reading = self.readings.get(node) or Reading(self.done, self.total, self.unit, node)
        begun, since = self.first.get(node, (0, self.began))
        rate = (reading.done - begun) / (now - since) if reading.done > begun and now > since else None
        left = max((reading.total - reading.done) / rate, 0.0) if rate and reading.total is not None else None
        return NodePace(reading, rate, left)


# A check of all snapshots has a step for each snapshot. If there are more steps, the shortest are recorded together.
PHASES_MAX, OTHERS = 50, "others"


class StepTimes(Forwarding):
    """A Progress that forwards all calls to `target` and times the steps, adding up steps with the same name."""

    def __init__(self, target: Progress) -> None:
        super().__init__(target)
        self._seconds: dict[str, float] = {}
        self._step, self._began = "", 0.0
        self._lock = threading.Lock()

    def phases(self) -> dict[str, float]:
        """Return how many seconds each step has taken so far, by name, in the order in which the steps started."""
        with self._lock:
            self._end(self._step)
            found = dict(self._seconds)
        others = set(sorted(found, key=lambda name: found[name], reverse=True)[PHASES_MAX:])
        phases = {name: round(seconds, 3) for name, seconds in found.items() if name not in others}
        rest = round(sum(found[name] for name in others), 3)
        return phases | {OTHERS: rest} if others else phases

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            self._end(name)
        self.target.step(name, total=total, unit=unit)

    def _end(self, following: str) -> None:
        now = time.monotonic()
        if self._step:
            self._seconds[self._step] = self._seconds.get(self._step, 0.0) + now - self._began
        self._step, self._began = following, now
