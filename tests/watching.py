"""A Progress that notes everything it is told, and does what a test wants at a point."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reached:
    """A point that was reached: the how manieth of its name, from 1, and on which node, where it is done by node."""

    point: str
    count: int
    node: str = ""


@dataclass(slots=True)
class Watching:
    """Notes points and lines; `then` is called at every point, in the thread that reached it."""

    then: Callable[[Reached], None] = lambda _: None
    reached_points: list[Reached] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Ignore it."""

    def advance(self, done: int) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Keep the line."""
        self.notes.append(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Keep the point, and do what is wanted there."""
        with self._lock:
            count = sum(one.point == point for one in self.reached_points) + 1
            self.reached_points.append(Reached(str(point), count, node))
            self.then(self.reached_points[-1])
