"""Notices: what the command in `[notify]` is told of tasks that fail and work again, and of the watch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cutline.cli.output.failure import CommandFailure
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.notify import notify
from cutline.cli.watch.schedule import Task, TaskKind
from cutline.fleet.record import Time
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError


@dataclass(slots=True)
class Notices:
    """Sends notices to the command of the fleet's file; what is wrong with that is logged."""

    source: FleetSource
    log: Callable[..., None]
    # Whether another watch works: that tells what is wrong with the file of both.
    is_beside: bool = False
    _troubles: dict[TaskKind, Task] = field(default_factory=dict)

    def send(self, event: str, snapshot: str | None, task: Task, failure: CommandFailure) -> None:
        """Tell that a task has `failed`, or has `recovered`."""
        fleet = self.source.fleet
        problem = notify(fleet.notify, event_of(event, fleet.name, snapshot, task, failure))
        if problem:
            self.log(problem, hint="run it by hand, with the event on stdin")

    @property
    def failures(self) -> int:
        """How often in a row the watch could not work at all."""
        # Asked by the thread of the metrics.
        trouble = self._troubles.get(TaskKind.WATCH)
        return trouble.failures if trouble else 0

    def waits(self, error: SnapshotError | None, recovered: str = "the watch works again") -> None:
        """Tell of what keeps the watch from working at all, once, and of its end, which is None."""
        self._tell(TaskKind.WATCH, error, recovered)

    def adopt(self, told: dict[TaskKind, Task], not_needed: Iterable[Task]) -> None:
        """Take over what an earlier watch has told of itself, and tell the end of what it has told of others."""
        self._troubles = told | self._troubles
        for task in not_needed:
            self.is_not_needed(task, None)

    @property
    def troubles(self) -> list[Task]:
        """What has been told of the watch itself, and not its end."""
        return list(self._troubles.values())

    def refuses_file(self, error: SnapshotError | None) -> None:
        """Tell of what is wrong with fleet.toml, once, and of its end, which is None."""
        if not self.is_beside or TaskKind.FILE in self._troubles:
            self._tell(TaskKind.FILE, error, "the watch goes by fleet.toml again")

    def is_not_needed(self, task: Task, snapshot: str | None) -> None:
        """Tell of the end of a task that had failed, and is not needed any more."""
        text = f"{task.kind} is not needed any more; it had failed: {task.problem}"
        self.log(text, task=task.kind)
        self.send("recovered", snapshot, task, CommandFailure(0, "", text))

    def _tell(self, about: TaskKind, error: SnapshotError | None, recovered: str) -> None:
        before = self._troubles.get(about)
        if error is not None:
            failed = (before or Task(about, 0.0)).failed(utc_now(), error.message)
            # First: whoever reads it does not wait for the command that is told.
            self._troubles[about] = failed
            if before is None:
                failure = CommandFailure(error.exit_code, error.slug, error.message, error.hint)
                self.send("failed", None, failed, failure)
        elif before is not None:
            del self._troubles[about]
            self.send("recovered", None, before, CommandFailure(0, "", f"{recovered}; it had failed: {before.problem}"))


def event_of(event: str, fleet: str, snapshot: str | None, task: Task, failure: CommandFailure) -> dict[str, object]:
    """A notice as JSON."""
    return {
        "event": event,
        "at": Time.of(utc_now()),
        "fleet": fleet,
        "task": task.kind.value,
        "snapshot": snapshot,
        "since": Time.of(task.failing_since) if task.failing_since else None,
        "code": failure.code,
        "error": failure.slug,
        "message": failure.message,
        "hint": failure.hint,
    }
