"""How long the bank's transactions took and when, so that a caller can ask what a snapshot cost them."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

Window = tuple[float, float]


@dataclass(slots=True)
class LatencyLog:
    """Start and duration of every committed transaction, in seconds of time.monotonic(); for any threads.

    A transaction is entered when it has ended: ask about a window once those that ran in it have, that is,
    after `BankWorkload.pause` or `stop`.
    """

    _starts: array[float] = field(default_factory=lambda: array("d"))
    _seconds: array[float] = field(default_factory=lambda: array("d"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, start: float, seconds: float) -> None:
        """Enter one transaction that began at `start` and took `seconds`."""
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
        """What 99 of 100 transactions did not exceed, leaving out those that ran within a window (t0, t1).

        Return None if that leaves none.
        """
        left = sorted(
            seconds
            for start, seconds in self.entries()
            if not any(_overlaps(start, seconds, t0, t1) for t0, t1 in excluding)
        )
        return left[math.ceil(len(left) * 0.99) - 1] if left else None

    def longest_between(self, t0: float = -math.inf, t1: float = math.inf) -> float | None:
        """The longest transaction of those that ran, in part at least, from t0 to t1; None if none did."""
        seconds = [seconds for start, seconds in self.entries() if _overlaps(start, seconds, t0, t1)]
        return max(seconds, default=None)


def _overlaps(start: float, seconds: float, t0: float, t1: float) -> bool:
    return start <= t1 and start + seconds >= t0
