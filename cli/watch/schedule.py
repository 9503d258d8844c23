"""The schedule of `watch`: a task is due one interval after it was last done, or later after failures.

Pure values and arithmetic on them. A missed task is due once, no matter how often it was missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.hours import Hours

RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX, DOUBLINGS_MAX = 5.0, 600.0, 20
# How long another operation may block a task before this is reported: this many intervals, and at least this many
# seconds. A full snapshot has the interval of increments, for which it takes the place.
WAITING_INTERVALS_MAX, WAITING_SECONDS_MAX = 3, 600.0
# Only after this many failures over this time does the watch give up what somebody may still put right: the first
# retries follow within two minutes, and an operator needs longer to correct a file or put an object back.
FINAL_FAILURES, FINAL_SECONDS = 5, 3600.0
# A chain that ends within this time after it began is young.
YOUNG_SECONDS = 3600.0
PAUSE_SECONDS_FIRST, PAUSE_SECONDS_MAX = 60.0, 3600.0
# For how long a task waits for another one of its lane, which may be hanging: this many of its intervals, and at least
# this many seconds.
LANE_INTERVALS_MAX, LANE_SECONDS_MAX = 3, 86400.0


class TaskKind(StrEnum):
    """The kinds of tasks that `watch` does.

    When several are due, FULL and REPLACE come first, then the task that has been due the longest.

    REPLACE ends the chains that a new full snapshot has replaced. WATCH, FILE, AGE, COPIES and GAPS are never due:
    they represent problems with the watch itself, with a fleet.toml that it can't use, a newest restore point that is
    too old, standbys that increments leave out, and an increment that copied a primary again.
    """

    FULL = "full"
    REPLACE = "replace"
    INCREMENT = "increment"
    ARCHIVE = "archive"
    CHECK = "check"
    PRUNE = "prune"
    DRILL = "drill"
    MERGE = "merge"
    COPY = "copy"
    GC = "gc"
    WATCH = "watch"
    FILE = "fleet-file"
    AGE = "max-age"
    COPIES = "copies"
    GAPS = "gaps"


FIRST = (TaskKind.FULL, TaskKind.REPLACE)
# The tasks of all snapshots in the store.
OF_STORE = (TaskKind.COPY, TaskKind.GC)
# The tasks that run concurrently with others, one of each lane at a time. Those of the first lane need Spark, and much
# memory; those of the second need little, and a second store must not fall behind during a check of many hours.
LANES = ((TaskKind.CHECK, TaskKind.DRILL, TaskKind.MERGE), OF_STORE)
CONCURRENT = (*LANES[0], *LANES[1])
# The tasks that need a continuing chain, and the tasks that need any snapshot at all.
OF_CHAIN = (TaskKind.INCREMENT, TaskKind.ARCHIVE)
OF_SNAPSHOT = (TaskKind.CHECK, TaskKind.DRILL, TaskKind.MERGE, TaskKind.COPY, TaskKind.REPLACE, TaskKind.PRUNE)
# The tasks whose result is a verdict on a snapshot, which their records in the store show.
JUDGING = (TaskKind.CHECK, TaskKind.DRILL)
# The tasks that begin only within the hours of fleet.toml.
HEAVY = (TaskKind.FULL, TaskKind.CHECK, TaskKind.DRILL, TaskKind.MERGE, TaskKind.COPY)


class Task(Struct, frozen=True):
    """A task, its interval (0: never), the time when it was last done, and the number of its failures since then.

    `retry_at` is the time of the next attempt, if the interval does not determine it. `problem` says why the last
    attempt failed. `waiting_since` is the time when another operation started to block the task.
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
        """Return when the task is next due; None if never. A task that has never been done is due from `begun_at` on.

        A clock that was ahead, here or on the machine that did the task, delays the task by at most one interval.
        """
        if self.interval_seconds <= 0:
            return None
        interval = timedelta(seconds=self.interval_seconds)
        if self.retry_at is not None:
            return min(self.retry_at, now + max(interval, timedelta(seconds=RETRY_SECONDS_MAX)))
        return begun_at if self.done_at is None else min(self.done_at, now) + interval

    def done(self, now: datetime) -> Task:
        """Return the task as it is after it was done at `now`."""
        return Task(self.kind, self.interval_seconds, now)

    def last_done(self, moment: datetime) -> Task:
        """Return the task with the time of its last success in the store; this does not prove that it works again."""
        return replace(self, done_at=moment, failures=0, retry_at=None, waiting_since=None)

    def failed(self, now: datetime, problem: str) -> Task:
        """Return the task after a failed attempt: the pause doubles after each failure."""
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
        """Return the task, postponed; this does not count as a failure."""
        return replace(self, retry_at=now + timedelta(seconds=seconds))

    def waits(self, now: datetime, seconds: float) -> Task:
        """Return the task, blocked by another operation; this does not count as a failure."""
        return replace(self.put_off(now, seconds), waiting_since=self.waiting_since or now)

    def waits_too_long(self, now: datetime, interval_seconds: float) -> bool:
        """Whether another operation has been blocking the task for several of these intervals and several minutes."""
        seconds = max(WAITING_INTERVALS_MAX * interval_seconds, WAITING_SECONDS_MAX)
        return self.waiting_since is not None and now >= self.waiting_since + timedelta(seconds=seconds)

    def is_overdue(self, begun_at: datetime, now: datetime, since: datetime) -> bool:
        """Whether the task is due, and the task that has had its lane since then has kept it from beginning too long.

        The same applies to the next turn of that task itself.
        """
        due = self.due_at(begun_at, now)
        seconds = max(LANE_INTERVALS_MAX * self.interval_seconds, LANE_SECONDS_MAX)
        return due is not None and now >= max(due, since) + timedelta(seconds=seconds)


def next_task(
    tasks: dict[TaskKind, Task], begun_at: datetime, now: datetime, hours: Hours | None = None
) -> tuple[Task | None, datetime | None]:
    """Return the task that may begin now, if any, and the time when the next task may begin.

    A task in HEAVY begins only within the `hours`, if there are any, however long it has been due.
    """
    due = {kind: at for kind, task in tasks.items() if (at := begins_at(task, begun_at, now, hours)) is not None}
    ready = [kind for kind in TaskKind if kind in due and due[kind] <= now]
    # If increments take longer than their interval, they are always due, but other tasks must get their turn.
    first = min(ready, key=lambda kind: (kind not in FIRST, due[kind]), default=None)
    return (None if first is None else tasks[first]), min(due.values(), default=None)


def begins_at(task: Task, begun_at: datetime, now: datetime, hours: Hours | None) -> datetime | None:
    """Return when the task next begins, if nothing else is in its way: when it is due, within the `hours`, if any."""
    due = task.due_at(begun_at, now)
    if due is None or hours is None or task.kind not in HEAVY:
        return due
    opens = hours.opens_at(max(due, now))
    # A task that may begin now keeps its time, which decides what begins first.
    return opens if opens > max(due, now) else due


def hours_texts(tasks: dict[TaskKind, Task], begun_at: datetime, now: datetime, hours: Hours | None) -> list[str]:
    """Describe the tasks that are due, but wait for the `hours`."""
    due = [task for task in tasks.values() if (at := task.due_at(begun_at, now)) is not None and at <= now]
    opening = ((task.kind, begins_at(task, begun_at, now, hours)) for task in due)
    return [
        f"{kind} waits until {clock_text(opens)} ([limits] hours)"
        for kind, opens in opening
        if opens is not None and opens > now
    ]


def retry_now(tasks: dict[TaskKind, Task], now: datetime) -> None:
    """Make failed tasks due now."""
    for kind, task in tasks.items():
        if task.failures and task.retry_at is not None:
            tasks[kind] = replace(task, retry_at=min(task.retry_at, now))


class FullPauses(Struct):
    """The pauses between a chain's end and the next full snapshot; they grow if several chains in a row end young."""

    _young_ends: int = 0
    _ended: str = ""

    def next_seconds(self, name: str, age_seconds: float | None) -> float:
        """Return the seconds to wait after a chain has ended at this age; None means that there was no chain.

        If the end of a chain is found again after the watch has started over, the chain counts only once.
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
    """Return the status while nothing is due: when the next task is due, and which tasks are failing or waiting."""
    return [f"idle until {clock_text(next_at)}" if next_at else "idle", *trouble_texts(tasks)]


def trouble_texts(tasks: Iterable[Task]) -> list[str]:
    """Describe the tasks that are failing, and those that are waiting for another operation."""
    tasks = list(tasks)
    waits = (
        f"{task.kind} has been waiting since {clock_text(task.waiting_since)} for another operation"
        for task in tasks
        if task.waiting_since and not task.problem
    )
    return [*(f"{task.kind} fails: {task.problem}" for task in tasks if task.problem), *waits]


def clock_text(moment: datetime | None) -> str:
    """Return a time in UTC, rounded to the second."""
    return f"{moment + timedelta(milliseconds=500):%Y-%m-%d %H:%M:%SZ}" if moment else ""
