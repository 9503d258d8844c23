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
