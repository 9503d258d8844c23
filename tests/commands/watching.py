"""A Progress that records crash points and notes, and calls a test's function at every crash point."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cutline.fleet.progress import Silent


@dataclass(frozen=True, slots=True)
class Reached:
    """A crash point that was reached: how often by now, and on which node if it is a point of every node."""

    point: str
    count: int
    node: str = ""


@dataclass(slots=True)
class Watching(Silent):
    """Records crash points and notes; `then` is called at every point, in the thread that reached it."""

    then: Callable[[Reached], None] = lambda _: None
    reached_points: list[Reached] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, text: str) -> None:
        """Record the note."""
        self.notes.append(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Record the crash point, and call `then`."""
        with self._lock:
            count = sum(one.point == point for one in self.reached_points) + 1
            self.reached_points.append(Reached(str(point), count, node))
            self.then(self.reached_points[-1])
