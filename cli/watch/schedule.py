"""When a task of `watch` is due: an interval after it was last done, or later after failures.

Pure values and arithmetic on them. A task that was missed, however often, is due once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 5.0, 600.0


class TaskKind(StrEnum):
    """What `watch` does. When several are due, the first of this order is done.

    REPLACE ends the chains that a new full snapshot has replaced. WATCH, the watch itself, is never due.
    """

    FULL = "full"
    REPLACE = "replace"
    INCREMENT = "increment"
    ARCHIVE = "archive"
    CHECK = "check"
    PRUNE = "prune"
    DRILL = "drill"
    WATCH = "watch"


@dataclass(frozen=True, slots=True)
class Task:
    """A task, how often it is done (0: never), when it was last done, and what has failed since.

    `retry_at` is None unless the last attempt has failed; `problem` says why.
    """

    kind: TaskKind
    interval_seconds: float
    done_at: datetime | None = None
    failures: int = 0
    retry_at: datetime | None = None
    failing_since: datetime | None = None
    problem: str = ""

    def due_at(self, begun_at: datetime) -> datetime | None:
        """When it is to be done next, None if never; what was never done is due from `begun_at` on."""
        if self.interval_seconds <= 0:
            return None
        if self.retry_at is not None:
            return self.retry_at
        return begun_at if self.done_at is None else self.done_at + timedelta(seconds=self.interval_seconds)

    def done(self, now: datetime) -> Task:
        """The task after it was done."""
        return Task(self.kind, self.interval_seconds, now)

    def failed(self, now: datetime, problem: str) -> Task:
        """The task after an attempt that failed: the next one waits twice as long as the one before."""
        longest = min(RETRY_SECONDS_MAX, max(self.interval_seconds, RETRY_SECONDS_FIRST))
        seconds = min(RETRY_SECONDS_FIRST * 2.0**self.failures, longest)
        return Task(
            self.kind, self.interval_seconds, self.done_at, self.failures + 1, now + timedelta(seconds=seconds),
            self.failing_since or now, problem,
        )  # fmt: skip

    def put_off(self, now: datetime, seconds: float) -> Task:
        """The task if another operation is in its way: no failure."""
        return Task(
            self.kind, self.interval_seconds, self.done_at, self.failures, now + timedelta(seconds=seconds),
            self.failing_since, self.problem,
        )  # fmt: skip


def next_task(tasks: dict[TaskKind, Task], begun_at: datetime, now: datetime) -> tuple[Task | None, datetime | None]:
    """The task that is due now, if any, and when the next one is."""
    due = {kind: at for kind, task in tasks.items() if (at := task.due_at(begun_at)) is not None}
    ready = [kind for kind in TaskKind if kind in due and due[kind] <= now]
    return (tasks[ready[0]] if ready else None), min(due.values(), default=None)
