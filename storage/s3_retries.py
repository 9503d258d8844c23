"""The retry policy for all S3 requests: puts, reads, listings and deletions.

S3 asks for fewer requests (503 SlowDown) for minutes while it splits a prefix, and restarting a store takes as long. So
retries are limited by time, not by the number of attempts, and the operator is told. The longest pause doubles each
time, and the actual pause is random between zero and that ("full jitter"), so that clients stopped by the same outage
don't all come back at the same time.

`Pace` is the state shared by all requests from a process: how many may start per second once the store has asked for
fewer, and how long none has succeeded. Once a request has waited in vain for an outage to end, later requests fail at
once. storage/s3_failures.py decides which failures are retried. Source: AWS Architecture Blog, "Exponential Backoff And
Jitter"; Amazon S3 User Guide, "Best practices design patterns".
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Mapping

from msgspec import Struct, field

from cutline.storage.s3_failures import (
    is_answer,
    is_hardly_passing,
    is_passing,
    is_too_fast,
    length_text,
    reason_of,
    retry_after_seconds,
)
from cutline.storage.waits import HURRY_SECONDS, hurried_seconds, is_urgent, tell

RETRY_SECONDS_MAX = 600.0
BYTES_PER_SECOND_MIN = 256 * 2**10  # a slower transfer is aborted
TELL_SECONDS, TELL_AGAIN_SECONDS = 2.0, 60.0
# How often a waiting request checks whether the command was stopped and whether a report is due.
LOOK_SECONDS = 0.25
# A failure counts as a new outage if the previous failure was longer ago than this.
OUTAGE_SECONDS_MAX = 120.0
# A process's requests per second: the minimum, the gain after a second of success, and the rate at which the limit is
# lifted.
RATE_MIN, RATE_GAIN, RATE_MAX = 1.0, 2.0, 200.0


class Retries(Struct, frozen=True):
    """Retry limits: a request is repeated for `seconds_max` after its first failure, plus the time its bytes may take.

    If the store has never answered, the limit is `first_seconds_max`, because a wrong address or clock is more likely
    than an outage.
    """

    seconds_max: float = RETRY_SECONDS_MAX
    first_seconds_max: float = 10.0
    attempts_max: float = math.inf
    pause_seconds: float = 0.2
    pause_seconds_max: float = 5.0
    slow_pause_seconds: float = 1.0
    slow_pause_seconds_max: float = 20.0

    def pause_after(self, attempt: int, error: BaseException) -> float:
        """Return how many seconds to wait after attempt number `attempt`, counted from 1."""
        first, most = self.pause_seconds, self.pause_seconds_max
        if is_too_fast(error):
            first, most = self.slow_pause_seconds, self.slow_pause_seconds_max
        doublings = min(attempt - 1, 20)
        return retry_after_seconds(error) + random.uniform(0, min(first * 2**doublings, most))


class Pace(Struct):
    """The state shared by all requests from a process to a store. Used in one event loop only.

    After the store has asked for fewer requests, `rate` requests may start per second: at first half as many as before,
    and gradually more while they succeed.
    """

    store: str = "the store"
    has_answered: bool = False
    rate: float = math.inf
    free_at: float = 0.0
    failing_since: float | None = None
    failed_at: float = 0.0
    told_at: float | None = None
    _began: deque[float] = field(default_factory=deque)
    _slowed_at: float = -math.inf
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def turn(self) -> None:
        """Wait until a request may start; requests start in the order of the calls, but urgent requests don't wait."""
        if is_urgent():
            return
        if self.rate < math.inf or self.free_at > time.monotonic():
            began = time.monotonic()
            async with self._turn:
                while (left := self.free_at - time.monotonic()) > 0 and hurried_seconds() is None:
                    if self.told_at is None and time.monotonic() - began >= TELL_SECONDS:
                        tell(f"{self.store} has asked for fewer requests: slowing down")
                    await asyncio.sleep(min(left, LOOK_SECONDS))
                self.free_at = max(self.free_at, time.monotonic()) + 1 / self.rate
        now = time.monotonic()
        self._began.append(now)
        while self._began[0] < now - 1:
            self._began.popleft()

    def slow_down(self, seconds: float) -> None:
        """Start no request for `seconds`, then half as many per second as before."""
        now = time.monotonic()
        # Requests in flight get the same answer, which counts only once.
        if now - self._slowed_at >= 1:
            recent = sum(1 for at in self._began if at >= now - 1)
            self.rate = max(min(self.rate, recent) / 2, RATE_MIN)
            self._slowed_at = now
        self.free_at = max(self.free_at, now + seconds)

    def worked(self) -> None:
        """Record a request that succeeded."""
        self.has_answered, self.failing_since = True, None
        if self.rate < math.inf:
            self.rate += RATE_GAIN / self.rate
            if self.rate > RATE_MAX:
                self.rate = math.inf

    def failed(self, error: BaseException) -> float:
        """Record a request that failed; return the time since which none has succeeded."""
        now = time.monotonic()
        if self.failing_since is None or now - self.failed_at > OUTAGE_SECONDS_MAX:
            self.failing_since = now
        self.failed_at = now
        self.has_answered |= not is_hardly_passing(error)
        return self.failing_since


class Tries(Struct):
    """The attempts at one request. `size_bytes` is the number of bytes to send or, once it is known, to receive."""

    retries: Retries
    pace: Pace
    size_bytes: int = 0
    attempt: int = 1
    failed_at: float | None = None

    async def again(self, error: BaseException) -> bool:
        """After a failed attempt, return False at once if it may not be retried; otherwise wait and return True."""
        if not is_passing(error):
            if is_answer(error):
                self.worked()
            return False
        now = time.monotonic()
        self.failed_at = now if self.failed_at is None else self.failed_at
        left = self._seconds_left(error, min(self.pace.failed(error), self.failed_at))
        pause = self.retries.pause_after(self.attempt, error)
        if self.attempt >= self.retries.attempts_max or left <= 0 or retry_after_seconds(error) > left:
            # The caller reports the failure.
            self.pace.told_at = None
            return False
        if is_too_fast(error):
            self.pace.slow_down(min(pause, left))
        self.attempt += 1
        until = now + min(pause, left)
        while time.monotonic() < until:
            self._tell(error)
            if self._seconds_left(error, self.failed_at) <= 0:
                return False
            await asyncio.sleep(min(LOOK_SECONDS, max(until - time.monotonic(), 0)))
        return True

    def worked(self) -> None:
        """Record that the request succeeded, and report the end of an outage."""
        self.pace.worked()
        if self.failed_at is not None and self.pace.told_at is not None:
            self.pace.told_at = None
            tell(f"{self.pace.store} answers again, after {length_text(time.monotonic() - self.failed_at)}")

    def _limit(self, error: BaseException) -> float:
        """Return for how many seconds the request is repeated after this failure."""
        if is_hardly_passing(error) and not self.pace.has_answered:
            return min(self.retries.first_seconds_max, self.retries.seconds_max)
        return self.retries.seconds_max

    def _seconds_left(self, error: BaseException, since: float) -> float:
        left = self._limit(error) + self.size_bytes / BYTES_PER_SECOND_MIN - (time.monotonic() - since)
        hurried = hurried_seconds()
        return left if hurried is None else min(left, HURRY_SECONDS - hurried)

    def _tell(self, error: BaseException) -> None:
        now = time.monotonic()
        if self.failed_at is None or now - self.failed_at < TELL_SECONDS:
            return
        if self.pace.told_at is None or now - self.pace.told_at >= TELL_AGAIN_SECONDS:
            self.pace.told_at = now
            limit = length_text(self._limit(error))
            tell(f"{self.pace.store}: {reason_of(error)}; the request will be retried for up to {limit}")


def retries_of(config: Mapping[str, object], seconds_max: float | None = None) -> Retries:
    """Return the limits with the user's options applied: `retry_for`, and `retries = {total_max_attempts = 3}`."""
    given = config.get("retries")
    attempts = given.get("total_max_attempts") if isinstance(given, Mapping) else None
    return Retries(
        seconds_max=RETRY_SECONDS_MAX if seconds_max is None else seconds_max,
        attempts_max=max(attempts, 1) if isinstance(attempts, int) else math.inf,
    )
