"""When the bank's transactions ran and how long they took, to measure what a snapshot costs them."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

Window = tuple[float, float]


@dataclass(slots=True)
class LatencyLog:
    """Start and duration of every committed transaction, in seconds of time.monotonic(). Thread-safe.

    A transaction is added when it has ended: query a window only after all transactions in it have, that is, after
    `BankWorkload.pause` or `stop`.
    """

    _starts: array[float] = field(default_factory=lambda: array("d"))
    _seconds: array[float] = field(default_factory=lambda: array("d"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, start: float, seconds: float) -> None:
        """Add a transaction that began at `start` and took `seconds`."""
        with self._lock:
            self._starts.append(start)
            self._seconds.append(seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def entries(self) -> list[tuple[float, float]]:
        """All (start, seconds) so far, in the order in which they ended."""
        with self._lock:
            return list(zip(self._starts, self._seconds, strict=True))

    def p99_seconds(self, excluding: Sequence[Window] = ()) -> float | None:
        """The 99th percentile of the durations, without transactions that overlap a window (t0, t1).

        None if no transactions remain.
        """
        durations = sorted(
            seconds
            for start, seconds in self.entries()
            if not any(_overlaps(start, seconds, t0, t1) for t0, t1 in excluding)
        )
        return durations[math.ceil(len(durations) * 0.99) - 1] if durations else None

    def longest_between(self, t0: float = -math.inf, t1: float = math.inf) -> float | None:
        """The longest duration of the transactions that overlap t0 to t1; None if there are none."""
        seconds = [seconds for start, seconds in self.entries() if _overlaps(start, seconds, t0, t1)]
        return max(seconds, default=None)


def _overlaps(start: float, seconds: float, t0: float, t1: float) -> bool:
    return start <= t1 and start + seconds >= t0
