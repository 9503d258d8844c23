"""How work below `cli` says how far it is, without knowing who listens.

The rich bars, the JSON lines and the tests each implement `Progress`; nothing below `cli` prints.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the steps of one operation, in order, from any thread."""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Begin the step `name`, ending the one before; `total` units of work if that is known."""

    def advance(self, done: int) -> None:
        """Add `done` units to the running step."""

    def note(self, text: str) -> None:
        """Say one line that matters to the person watching (a retry, a wait and its cause)."""

    def reached(self, point: str, *, node: str = "") -> None:
        """Say that `point` has just been done, on `node` where it is done node by node."""


class Silent:
    """A Progress that nobody watches."""

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Ignore it."""

    def advance(self, done: int) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def reached(self, point: str, *, node: str = "") -> None:
        """Ignore it."""


class Noting:
    """Passes everything on to `shown` and keeps the notes: a command's result repeats them."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.notes: list[str] = []

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Pass it on."""
        self._shown.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        """Pass it on."""
        self._shown.advance(done)

    def note(self, text: str) -> None:
        """Keep it and pass it on."""
        self.notes.append(text)
        self._shown.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Pass it on."""
        self._shown.reached(point, node=node)
