"""Limit how many bytes per second are read from nodes, stored, or loaded ([limits] in fleet.toml).

A process has one RateLimit for each limit, or each of its tasks has a RateLimit with a share of the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cutline.storage.store import Inventory, Keys, Leftovers, ObjectStore, Unfinished, check_not_stopped

# Time in which no bytes were spent is made up for by at most this much: otherwise a task that had to wait would then
# run without a limit.
CREDIT_SECONDS = 1.0
# How soon a waiting thread notices that its task was stopped.
LOOK_SECONDS = 0.2


@dataclass(slots=True)
class RateLimit:
    """Limits the rate at which any number of threads spend bytes; None means no limit.

    `spent` is called with the bytes before they are waited for, if there is a limit.
    """

    bytes_per_second: float | None
    spent: Callable[[int], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _free_at: float = field(default_factory=time.monotonic, init=False)

    def spend(self, size_bytes: int) -> None:
        """Wait until these bytes, and all bytes that were spent before, fit into the rate.

        Raises RequestStoppedError if this thread's requests are ended (`stoppable_requests`).
        """
        if self.bytes_per_second is None:
            return
        if self.spent is not None:
            self.spent(size_bytes)
        with self._lock:
            begin = max(self._free_at, time.monotonic() - CREDIT_SECONDS)
            self._free_at = free_at = begin + size_bytes / self.bytes_per_second
        while (seconds := free_at - time.monotonic()) > 0:
            check_not_stopped()
            time.sleep(min(seconds, LOOK_SECONDS))


@dataclass(frozen=True, slots=True)
class PacedStore:
    """An ObjectStore that stores objects in `raw` at a limited rate; reading is not limited.

    An object waits for its turn, and is then stored at full speed.
    """

    raw: ObjectStore
    pace: RateLimit = field(compare=False)

    @property
    def url(self) -> str:
        return self.raw.url

    def expect_answers(self) -> None:
        self.raw.expect_answers()

    def create(self, key: str, body: bytes) -> None:
        self.pace.spend(len(body))
        self.raw.create(key, body)

    def read(self, key: str) -> bytes:
        return self.raw.read(key)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self.raw.read_range(key, start, length)

    def size(self, key: str) -> int:
        return self.raw.size(key)

    def digest(self, key: str) -> str:
        return self.raw.digest(key)

    def exists(self, key: str) -> bool:
        return self.raw.exists(key)

    def list(self, prefix: str) -> Keys:
        return self.raw.list(prefix)

    def list_children(self, prefix: str) -> Keys:
        return self.raw.list_children(prefix)

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        return self.raw.inventory(prefix, after)

    def delete(self, key: str) -> None:
        self.raw.delete(key)

    def unfinished(self) -> Leftovers:
        return self.raw.unfinished()

    def abandon(self, leftover: Unfinished) -> None:
        self.raw.abandon(leftover)
