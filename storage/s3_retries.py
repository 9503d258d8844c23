"""When an S3 request is repeated, and when no longer: the numbers, for puts, reads, listings and deletions alike.

Bounded in number and in time, with a pause that doubles and is drawn whole at random ("full jitter"), so that
those whom one outage stopped do not come back together. A store that says it is asked too much is asked less,
by every request of the process. Which failures merit a repetition says storage/s3_failures.py. Source: AWS
Architecture Blog, "Exponential Backoff And Jitter"; Amazon S3 User Guide, "Best practices design patterns".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.s3_failures import is_passing, is_too_fast, retry_after_seconds

BYTES_PER_SECOND_MIN = 256 * 2**10  # what is slower than that, sent or read, is given up


@dataclass(frozen=True, slots=True)
class Retries:
    """The numbers. `seconds_max` is the age at which a request isn't begun again, besides what its bytes may take."""

    attempts_max: int = 6
    seconds_max: float = 60.0
    pause_seconds: float = 0.2
    pause_seconds_max: float = 5.0
    slow_pause_seconds: float = 1.0
    slow_pause_seconds_max: float = 20.0

    def pause_after(self, attempt: int, error: BaseException) -> float:
        """Return the seconds to wait before the attempt after number `attempt`, counted from 1."""
        if not is_too_fast(error):
            return random.uniform(0, min(self.pause_seconds * 2 ** (attempt - 1), self.pause_seconds_max))
        drawn = random.uniform(0, min(self.slow_pause_seconds * 2 ** (attempt - 1), self.slow_pause_seconds_max))
        return retry_after_seconds(error) + drawn


@dataclass(slots=True)
class Pace:
    """When the store may be asked again after it has said that it is asked too much. Used in one event loop only."""

    free_at: float = 0.0
    spread_seconds: float = 0.0

    def slow_down(self, seconds: float) -> None:
        """Let no request begin for `seconds`, and those that wait begin over as long a time again."""
        self.free_at = max(self.free_at, time.monotonic() + seconds)
        self.spread_seconds = seconds

    async def turn(self) -> None:
        """Wait until the store may be asked."""
        left = self.free_at - time.monotonic()
        if left > 0:
            await asyncio.sleep(left + random.uniform(0, self.spread_seconds))


@dataclass(slots=True)
class Tries:
    """The attempts at one request. `size_bytes` is what it sends, or once that is known, what it is to receive."""

    retries: Retries
    pace: Pace
    size_bytes: int = 0
    attempt: int = 1
    began: float = field(default_factory=time.monotonic)

    async def again(self, error: BaseException) -> bool:
        """After an attempt that failed: wait, and say that another is due; or at once that none is."""
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
    """Return the numbers with what the user gave in botocore's own terms: `retries = {total_max_attempts = 3}`."""
    given = config.get("retries")
    attempts = given.get("total_max_attempts") if isinstance(given, Mapping) else None
    return Retries(attempts_max=max(attempts, 1)) if isinstance(attempts, int) else Retries()
