"""When a task of `watch` is due: an interval after it was last done, or later after failures.

Pure values and arithmetic on them. A task that was missed, however often, is due once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX, DOUBLINGS_MAX = 5.0, 600.0, 20
# How long another operation may be in a task's way before that is told: intervals, and at least seconds.
WAITING_INTERVALS_MAX, WAITING_SECONDS_MAX = 3, 600.0
# A chain that ends this soon after it began is young.
YOUNG_SECONDS = 3600.0
PAUSE_SECONDS_FIRST, PAUSE_SECONDS_MAX = 60.0, 3600.0


class TaskKind(StrEnum):
    """The kinds of tasks of `watch`.

    When several are due, FULL and REPLACE come first, then the task that has been due for longest.

    REPLACE ends the chains that a new full snapshot has replaced. WATCH (the watch itself) and FILE (that it uses the
    current fleet.toml) are never due.
    """

    FULL = "full"
    REPLACE = "replace"
    INCREMENT = "increment"
    ARCHIVE = "archive"
    CHECK = "check"
    PRUNE = "prune"
    DRILL = "drill"
    WATCH = "watch"
    FILE = "fleet-file"


FIRST = (TaskKind.FULL, TaskKind.REPLACE)
# They run concurrently with the others; they need a chain that continues, or any snapshot.
BESIDE = (TaskKind.CHECK, TaskKind.DRILL)
OF_CHAIN = (TaskKind.INCREMENT, TaskKind.ARCHIVE)
OF_SNAPSHOT = (*BESIDE, TaskKind.REPLACE, TaskKind.PRUNE)


@dataclass(frozen=True, slots=True)
class Task:
    """A task, how often it is done (0: never), when it was last done, and its failures since then.

    `retry_at`: when it is tried next, if not by its interval. `problem` says why the last attempt has failed.
    `waiting_since`: another operation has been in its way from then on.
    """

    kind: TaskKind
    interval_seconds: float
    done_at: datetime | None = None
    failures: int = 0
    retry_at: datetime | None = None
    failing_since: datetime | None = None
    problem: str = ""
    waiting_since: datetime | None = None

    def due_at(self, begun_at: datetime, now: datetime) -> datetime | None:
        """The time when it is due next, None if never; a task that was never done is due from `begun_at` on.

        A clock that was ahead, here or on the machine that did the task, delays the task by at most one interval.
        """
        if self.interval_seconds <= 0:
            return None
        interval = timedelta(seconds=self.interval_seconds)
        if self.retry_at is not None:
            return min(self.retry_at, now + max(interval, timedelta(seconds=RETRY_SECONDS_MAX)))
        return begun_at if self.done_at is None else min(self.done_at, now) + interval

    def done(self, now: datetime) -> Task:
        """The task after it was done."""
        return Task(self.kind, self.interval_seconds, now)

    def last_done(self, moment: datetime) -> Task:
        """The task if the store says that it was done at `moment`: it is not known to work again."""
        return replace(self, done_at=moment, failures=0, retry_at=None, waiting_since=None)

    def failed(self, now: datetime, problem: str) -> Task:
        """The task after an attempt that failed: each attempt waits twice as long as the one before."""
        longest = min(RETRY_SECONDS_MAX, max(self.interval_seconds, RETRY_SECONDS_FIRST))
        seconds = min(RETRY_SECONDS_FIRST * 2.0 ** min(self.failures, DOUBLINGS_MAX), longest)
        return Task(
            self.kind,
            self.interval_seconds,
            self.done_at,
            self.failures + 1,
            now + timedelta(seconds=seconds),
            self.failing_since or now,
            problem,
        )

    def put_off(self, now: datetime, seconds: float) -> Task:
        """The task if it is to be done later: no failure."""
        return replace(self, retry_at=now + timedelta(seconds=seconds))

    def waits(self, now: datetime, seconds: float) -> Task:
        """The task if another operation is in its way: no failure."""
        return replace(self.put_off(now, seconds), waiting_since=self.waiting_since or now)

    def waits_too_long(self, now: datetime) -> bool:
        """Whether another operation has been in its way for some intervals, and for some minutes."""
        seconds = max(WAITING_INTERVALS_MAX * self.interval_seconds, WAITING_SECONDS_MAX)
        return self.waiting_since is not None and now >= self.waiting_since + timedelta(seconds=seconds)


def next_task(tasks: dict[TaskKind, Task], begun_at: datetime, now: datetime) -> tuple[Task | None, datetime | None]:
    """The task that is due now, if any, and when the next one is."""
    due = {kind: at for kind, task in tasks.items() if (at := task.due_at(begun_at, now)) is not None}
    ready = [kind for kind in TaskKind if kind in due and due[kind] <= now]
    # If increments take longer than their interval, one is always due, and others must have their turn.
    first = min(ready, key=lambda kind: (kind not in FIRST, due[kind]), default=None)
    return (None if first is None else tasks[first]), min(due.values(), default=None)


def retry_now(tasks: dict[TaskKind, Task], now: datetime) -> None:
    """Make failed tasks due now."""
    for kind, task in tasks.items():
        if task.failures and task.retry_at is not None:
            tasks[kind] = replace(task, retry_at=min(task.retry_at, now))


@dataclass(slots=True)
class FullPauses:
    """How long a full snapshot waits after a chain has ended: ever longer if one chain after the other ends young."""

    _young_ends: int = 0
    _ended: str = ""

    def next_seconds(self, name: str, age_seconds: float | None) -> float:
        """The seconds to wait after the end of a chain that began so long ago; None: there was no chain.

        A chain that is seen to have ended again, after the watch has begun anew, counts once.
        """
        if name and name == self._ended:
            return self._seconds
        self._ended = name
        is_young = age_seconds is not None and age_seconds < YOUNG_SECONDS
        self._young_ends = self._young_ends + 1 if is_young else 0
        return self._seconds

    @property
    def _seconds(self) -> float:
        if self._young_ends < 2:
            return 0.0
        return min(PAUSE_SECONDS_FIRST * 2.0 ** min(self._young_ends - 2, DOUBLINGS_MAX), PAUSE_SECONDS_MAX)


def idle_texts(tasks: Iterable[Task], next_at: datetime | None) -> list[str]:
    """The log lines while nothing is due: until when, and which tasks fail."""
    return [f"idle until {clock_text(next_at)}" if next_at else "idle", *trouble_texts(tasks)]


def trouble_texts(tasks: Iterable[Task]) -> list[str]:
    """What fails, and what waits for another operation."""
    tasks = list(tasks)
    waits = (
        f"{task.kind} waits since {clock_text(task.waiting_since)} for another operation"
        for task in tasks
        if task.waiting_since and not task.problem
    )
    return [*(f"{task.kind} fails: {task.problem}" for task in tasks if task.problem), *waits]


def clock_text(moment: datetime | None) -> str:
    """A moment, to the second."""
    return f"{moment + timedelta(milliseconds=500):%Y-%m-%d %H:%M:%SZ}" if moment else ""
