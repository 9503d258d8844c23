"""The interface through which work below `cli` reports its progress; nothing below `cli` prints.

The rich bars, the JSON lines and the tests each implement `Progress`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Between two readings the time that is left is counted down to this part of what it was.
COUNTED_DOWN = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """How far the current step is, on one node, or on all together if `node` is "".

    `total` is None if it is not known. `seconds_left` is for the whole operation; None: it is not known. If it
    `is_rough`, it may be off by more than a fifth.
    """

    done: int
    total: int | None = None
    unit: str = ""
    node: str = ""
    operation: str = ""
    seconds_left: float | None = None
    is_rough: bool = False


class Progress(Protocol):
    """Receives the steps of one operation, in order, from any thread."""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Begin the step `name`, which ends the step before; `total` is its units of work, if known."""

    def advance(self, done: int) -> None:
        """Add `done` units to the current step."""

    def tell(self, reading: Reading) -> None:
        """Report how far the current step is, in other units than those of `advance`."""

    def note(self, text: str) -> None:
        """Report one line that matters to the operator (a retry, a wait and its cause)."""

    def reached(self, point: str, *, node: str = "") -> None:
        """Report that the crash point `point` is reached, on `node` if it is a point of every node."""

    def ending(self) -> None:
        """Report that the operation is done, only goes forward, or undoes what it began: nobody may stop it now."""


class Silent:
    """A Progress that ignores everything."""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Ignore it."""

    def advance(self, done: int) -> None:
        """Ignore it."""

    def tell(self, reading: Reading) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def reached(self, point: str, *, node: str = "") -> None:
        """Ignore it."""

    def ending(self) -> None:
        """Ignore it."""


class Noting:
    """Passes everything on to `target` and keeps the notes, which a command's result repeats."""

    def __init__(self, target: Progress) -> None:
        self._target = target
        self.notes: list[str] = []

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Pass it on."""
        self._target.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        """Pass it on."""
        self._target.advance(done)

    def tell(self, reading: Reading) -> None:
        """Pass it on."""
        self._target.tell(reading)

    def note(self, text: str) -> None:
        """Keep it and pass it on."""
        self.notes.append(text)
        self._target.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Pass it on."""
        self._target.reached(point, node=node)

    def ending(self) -> None:
        """Pass it on."""
        self._target.ending()
