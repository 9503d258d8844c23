"""The retry policy of all S3 requests: puts, reads, listings and deletions.

Retries are limited in number and in time. The pause doubles and is random from zero up ("full jitter"), so that clients
stopped by one outage do not return together. If the store asks for fewer requests, every request of the process slows
down. storage/s3_failures.py decides which failures are retried. Source: AWS Architecture Blog, "Exponential Backoff And
Jitter"; Amazon S3 User Guide, "Best practices design patterns".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.s3_failures import is_passing, is_too_fast, retry_after_seconds

BYTES_PER_SECOND_MIN = 256 * 2**10  # a slower transfer is given up


@dataclass(frozen=True, slots=True)
class Retries:
    """The limits. No retry begins after `seconds_max` plus the time that the request's bytes may take."""

    attempts_max: int = 6
    seconds_max: float = 60.0
    pause_seconds: float = 0.2
    pause_seconds_max: float = 5.0
    slow_pause_seconds: float = 1.0
    slow_pause_seconds_max: float = 20.0

    def pause_after(self, attempt: int, error: BaseException) -> float:
        """Return the seconds to wait after attempt number `attempt`, counted from 1."""
        if not is_too_fast(error):
            return random.uniform(0, min(self.pause_seconds * 2 ** (attempt - 1), self.pause_seconds_max))
        jitter = random.uniform(0, min(self.slow_pause_seconds * 2 ** (attempt - 1), self.slow_pause_seconds_max))
        return retry_after_seconds(error) + jitter


@dataclass(slots=True)
class Pace:
    """When requests may begin again after the store asked for fewer. Used in one event loop only."""

    free_at: float = 0.0
    spread_seconds: float = 0.0

    def slow_down(self, seconds: float) -> None:
        """Begin no request for `seconds`, then spread the waiting requests over the same time again."""
        self.free_at = max(self.free_at, time.monotonic() + seconds)
        self.spread_seconds = seconds

    async def turn(self) -> None:
        """Wait until a request may begin."""
        left = self.free_at - time.monotonic()
        if left > 0:
            await asyncio.sleep(left + random.uniform(0, self.spread_seconds))


@dataclass(slots=True)
class Tries:
    """The attempts at one request. `size_bytes`: the bytes to send, or to receive once that is known."""

    retries: Retries
    pace: Pace
    size_bytes: int = 0
    attempt: int = 1
    began: float = field(default_factory=time.monotonic)

    async def again(self, error: BaseException) -> bool:
        """After a failed attempt, wait and return True if it may be retried; return False at once if not."""
        if not is_passing(error):
            return False
        pause = self.retries.pause_after(self.attempt, error)
        if is_too_fast(error):
            self.pace.slow_down(min(pause, self.retries.seconds_max))
        age = time.monotonic() - self.began
        allowed = self.retries.seconds_max + self.size_bytes / BYTES_PER_SECOND_MIN
        if self.attempt >= self.retries.attempts_max or age + pause > allowed:
            return False
        self.attempt += 1
        await asyncio.sleep(pause)
        return True


def retries_of(config: Mapping[str, object]) -> Retries:
    """Return the limits, changed by what the user set as botocore's option: `retries = {total_max_attempts = 3}`."""
    given = config.get("retries")
    attempts = given.get("total_max_attempts") if isinstance(given, Mapping) else None
    return Retries(attempts_max=max(attempts, 1)) if isinstance(attempts, int) else Retries()
