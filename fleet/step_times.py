"""How long each step of an operation takes: what its outcome records as phases."""

from __future__ import annotations

import threading
import time

from cutline.fleet.progress import Progress, Reading

# A check of all snapshots has a step for each. The shortest of more than these are recorded together.
PHASES_MAX, OTHERS = 50, "others"


class StepTimes:
    """A Progress that passes everything on to `target`, and measures the steps. A step that comes again is added up."""

    def __init__(self, target: Progress) -> None:
        self._target = target
        self._seconds: dict[str, float] = {}
        self._step, self._began = "", 0.0
        self._lock = threading.Lock()

    def phases(self) -> dict[str, float]:
        """The seconds that each step has taken until now, by name, in the order in which they began."""
        with self._lock:
            self._end(self._step)
            found = dict(self._seconds)
        others = set(sorted(found, key=lambda name: found[name], reverse=True)[PHASES_MAX:])
        phases = {name: round(seconds, 3) for name, seconds in found.items() if name not in others}
        rest = round(sum(found[name] for name in others), 3)
        return phases | {OTHERS: rest} if others else phases

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Measure it and pass it on."""
        with self._lock:
            self._end(name)
        self._target.step(name, total=total, unit=unit)

    def _end(self, following: str) -> None:
        now = time.monotonic()
        if self._step:
            self._seconds[self._step] = self._seconds.get(self._step, 0.0) + now - self._began
        self._step, self._began = following, now

    def advance(self, done: int) -> None:
        """Pass it on."""
        self._target.advance(done)

    def tell(self, reading: Reading) -> None:
        """Pass it on."""
        self._target.tell(reading)

    def note(self, text: str) -> None:
        """Pass it on."""
        self._target.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Pass it on."""
        self._target.reached(point, node=node)

    def ending(self) -> None:
        """Pass it on."""
        self._target.ending()
