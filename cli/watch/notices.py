"""The messages from a watch, and its notices to the command in `[notify]` about tasks that fail or recover.

A watch records its notices for its successor: in its heartbeats, in case it is killed, and in its outcome.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial

from msgspec import Struct, UnsetType, field
from msgspec.structs import replace

from cutline.cli.output.failure import INCONCLUSIVE, CommandFailure
from cutline.cli.output.renewed import gap_texts
from cutline.cli.output.tables import name_fleet, printable
from cutline.cli.process.event_programs import run_program
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.schedule import Task, TaskKind
from cutline.fleet.record import Time
from cutline.fleet.timers import calling_after
from cutline.snapshots.operations.ended_operations import list_ended, read_batches
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.under_way import WATCH, ActivityState, UnderWay, read_under_way
from cutline.snapshots.records.chain import RenewalGap
from cutline.snapshots.records.operation_records import FailingTask, Outcome, WatchState
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore

EVENT_SCHEMA = "cutline/watch-event/1"
# The ends of hints for somebody who runs a command by hand. `: it …` says what the repetition does; any other text
# after the colon is a statement that is to be run before.
REPEAT = re.compile(r"(^|[,;] (?:then )?|\. Then )repeat the command(: it [^;\n]*|(?!:))", re.MULTILINE)
BY_ITSELF = "the watch tries again by itself"


def hint_in_watch(hint: str, fleet_file: str | None) -> str:
    """Return a command's hint as the hint of a watch, which repeats its tasks by itself.

    The given fleet file is added to the commands in the hint.
    """
    hint = REPEAT.sub(lambda found: ("; " if found[1] else "") + BY_ITSELF, hint)
    return name_fleet(hint, fleet_file, is_hint=True)


def log(text: str, *, json_lines: bool, fleet_file: str | None = None, hint: str = "", **details: object) -> None:
    """Write one event with its hint; `details` appear only in JSON.

    The given fleet file is added to the commands in the hint.
    """
    hint = hint_in_watch(hint, fleet_file)
    at = Time.of(utc_now())
    if json_lines:
        line = json.dumps({"schema": EVENT_SCHEMA, "at": at, "text": text, "hint": hint, **details})
    else:
        # A hint may have several lines.
        with_hint = f"{text} (hint: {'; '.join(hint.splitlines())})" if hint else text
        line = f"{at[:19]}Z {printable(with_hint)}"
    # The watch continues even if the disk is full or the terminal was closed.
    with suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


# A step at the start of a watch that takes longer is named.
SLOW_SECONDS = 2.0


@contextmanager
def saying_if_slow(log: Callable[..., None], text: str) -> Iterator[None]:
    """Write the event `text` if the block, which blocks the main thread, takes longer than SLOW_SECONDS."""
    with calling_after(SLOW_SECONDS, partial(log, text)):
        yield


NOTIFY_SCHEMA = "cutline/notify/1"
NOTIFY_SECONDS_MAX = 30.0
# The pause before a notice is sent again doubles with each failure of the command. A notice that is a day old is given
# up, and so is the oldest if there are too many.
RESEND_SECONDS_FIRST, RESEND_SECONDS_MAX, NOTICE_SECONDS_MAX, NOTICES_MAX = 60.0, 3600.0, 86400.0, 100
# How long a watch that ends waits for the command, with all notices that it has not accepted.
END_SECONDS_MAX = 5.0


def notify(command: Sequence[str], event: dict[str, object], seconds_max: float | None = None) -> str:
    """Run the command with the event as JSON on stdin; return the problem, or "".

    The watch waits for the command, for at most NOTIFY_SECONDS_MAX or `seconds_max`.
    """
    if not command:
        return ""
    seconds_max = NOTIFY_SECONDS_MAX if seconds_max is None else seconds_max
    return run_program("[notify] command", command, {"schema": NOTIFY_SCHEMA, **event}, seconds_max)


# How many operations without an intent are read. They are sorted by start time, and a watch may run for months.
READ_MAX = 5000
OF_WATCH = (TaskKind.WATCH, TaskKind.FILE, TaskKind.AGE, TaskKind.COPIES, TaskKind.GAPS)


def state_of(tasks: Iterable[Task], *, had_turn: bool) -> WatchState:
    """Return the state of a watch with its failing `tasks`, about which it has sent notices."""
    failing = ((task, task.failing_since) for task in tasks if task.failing_since)
    told = tuple(FailingTask(task.kind.value, Time.of(at), task.problem) for task, at in failing)
    return WatchState(Time.of(utc_now()), had_turn, told)


def told_failures(store: ObjectStore, own: str, own_state: WatchState | None) -> list[FailingTask]:
    """Return the failures that watches other than `own` have reported, and have not reported as recovered since.

    Only watches that have ended count, back to the last watch that had the turn; the current watch has it now. If
    `own_state` is the newest, the current watch had the turn before: `own_state` contains the failures that it had
    reported when it lost the turn. Raises the store's errors.
    """
    documents, now = document_names(store), utc_now()
    signs = (_of_sign(way, now) for way in read_under_way(store, documents) if way.kind == WATCH and way.id != own)
    ended = list_ended(documents, has_intent=False)[:READ_MAX]
    outcomes = (operation.outcome for batch in read_batches(store, documents, ended) for operation in batch)
    states = [watch_state for watch_state in (own_state, *signs, *_recorded(outcomes)) if watch_state is not None]
    failures: list[FailingTask] = []
    for state in sorted(states, key=lambda state: datetime.fromisoformat(state.at), reverse=True):
        known = {task.task for task in failures}
        failures += [task for task in state.failing if task.task not in known]
        if state.had_turn:
            break
    return failures


def adopt_failures(told: Iterable[FailingTask], tasks: dict[TaskKind, Task]) -> dict[TaskKind, Task]:
    """Mark `tasks` as failing if their failures were reported; return the failures of the watch itself.

    Checks and drills whose last outcome was bad are already marked. A task that is never due here could not recover.
    """
    of_watch: dict[TaskKind, Task] = {}
    for task in told:
        if task.task not in set(TaskKind):
            continue
        kind, since = TaskKind(task.task), datetime.fromisoformat(task.since)
        if kind in OF_WATCH:
            of_watch[kind] = Task(kind, 0.0, failing_since=since, problem=task.problem, failures=1)
        elif kind in tasks and not tasks[kind].problem and tasks[kind].interval_seconds > 0:
            tasks[kind] = replace(tasks[kind], failing_since=since, problem=task.problem)
    return of_watch


def not_needed(told: Iterable[FailingTask], tasks: dict[TaskKind, Task]) -> list[Task]:
    """Return the reported failures of tasks that are never due: fleet.toml says so, or no chain is left to end."""
    never = {kind.value: kind for kind, task in tasks.items() if task.interval_seconds <= 0}
    return [
        Task(never[task.task], 0.0, failing_since=datetime.fromisoformat(task.since), problem=task.problem)
        for task in told
        if task.task in never
    ]


def _of_sign(under_way: UnderWay, now: datetime) -> WatchState | None:
    """Return the state in a watch's heartbeat; None for a watch that is standing by."""
    if under_way.sign is None or isinstance(under_way.sign.watch, UnsetType):
        return None
    stands_by = not under_way.sign.watch.had_turn and under_way.state(now) is not ActivityState.DEAD
    return None if stands_by else under_way.sign.watch


def _recorded(outcomes: Iterable[Outcome | None]) -> Iterator[WatchState]:
    for outcome in outcomes:
        if outcome is not None and not isinstance(outcome.watch, UnsetType):
            yield outcome.watch


class _Notice(Struct, frozen=True):
    """A notice that the command has not accepted yet, and the time.monotonic since which it has been there."""

    event: dict[str, object]
    since_seconds: float


class Notices(Struct):
    """Sends notices to the command in the fleet file, in order; problems with that command are logged.

    A notice counts as sent once the command has ended with 0. Until then it is sent again, for up to a day.
    """

    source: FleetSource
    log: Callable[..., None]
    # Whether another watch is active. If so, it reports problems with the file, because both watches use it.
    is_beside: bool = False
    _troubles: dict[TaskKind, Task] = field(default_factory=dict)
    _unsent: list[_Notice] = field(default_factory=list)
    _resend_at: float = 0.0
    _pause_seconds: float = RESEND_SECONDS_FIRST
    _problem: str = ""

    def send(self, event: str, snapshot: str | None, task: Task, failure: CommandFailure) -> None:
        """Send a notice that a task has `failed` or `recovered`."""
        fleet = self.source.fleet
        # The notice is read in another folder, with another environment.
        failure = replace(failure, hint=hint_in_watch(failure.hint, str(self.source.path.absolute())))
        self._unsent.append(_Notice(event_of(event, fleet.name, snapshot, task, failure), time.monotonic()))
        self._send_unsent()

    def send_again(self) -> None:
        """Send the notices that the command has not accepted, if its pause is over."""
        if self._unsent and time.monotonic() >= self._resend_at:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Send the notices up to the first failure: a recovery must not be read before the failure."""
        while self._unsent:
            problem = notify(self.source.fleet.notify, self._unsent[0].event)
            if problem:
                self._postpone(problem)
                return
            del self._unsent[0]
            self._pause_seconds, self._problem = RESEND_SECONDS_FIRST, ""

    def end(self) -> None:
        """Try once more to send the notices that the command has not accepted; log those that it does not accept now.

        Waits for at most END_SECONDS_MAX. A signal ends the attempt.
        """
        deadline, problem = time.monotonic() + END_SECONDS_MAX, ""
        try:
            while self._unsent and not problem and (seconds_left := deadline - time.monotonic()) > 0:
                problem = notify(self.source.fleet.notify, self._unsent[0].event, seconds_left)
                if not problem:
                    del self._unsent[0]
        except KeyboardInterrupt:
            problem = "the watch was stopped while it waited for the [notify] command"
        for one in self._unsent:
            what = f"{one.event['task']} {one.event['event']} at {one.event['at']}: {one.event['message']}"
            self.log(f"a notice was not delivered before the watch ended: {what}")
        if self._unsent and problem:
            self.log(problem)
        self._unsent = []

    def _postpone(self, problem: str) -> None:
        now = time.monotonic()
        kept = [one for one in self._unsent[-NOTICES_MAX:] if now < one.since_seconds + NOTICE_SECONDS_MAX]
        for one in self._unsent[: len(self._unsent) - len(kept)]:
            what = f"{one.event['task']} {one.event['event']} at {one.event['at']}"
            self.log(f"a notice was given up, because the [notify] command did not accept it: {what}")
        self._unsent = kept
        if problem != self._problem:
            self.log(
                problem, hint="run it by hand, with the event on stdin; the watch sends the notice again for a day"
            )
        self._problem = problem
        self._resend_at, self._pause_seconds = (
            now + self._pause_seconds,
            min(2 * self._pause_seconds, RESEND_SECONDS_MAX),
        )

    @property
    def failures(self) -> int:
        """How many times in a row the watch could not run at all."""
        # The metrics thread reads this, too.
        trouble = self._troubles.get(TaskKind.WATCH)
        return trouble.failures if trouble else 0

    def waits(self, error: SnapshotError | None, recovered: str = "the watch is working again") -> None:
        """Report a problem that keeps the watch from running at all (only once); with None, report that it is over."""
        self._tell(TaskKind.WATCH, error, recovered)

    def adopt(self, told: dict[TaskKind, Task], not_needed: Iterable[Task]) -> None:
        """Take over an earlier watch's reports about itself; report the end of failed tasks that are `not_needed`."""
        self._troubles = told | self._troubles
        for task in not_needed:
            self.is_not_needed(task, None)

    @property
    def troubles(self) -> list[Task]:
        """The reported problems of the watch itself that have not ended."""
        return list(self._troubles.values())

    def refuses_file(self, error: SnapshotError | None) -> None:
        """Report a problem with fleet.toml (only once); with None, report that it has ended."""
        if not self.is_beside or TaskKind.FILE in self._troubles:
            self._tell(TaskKind.FILE, error, "the watch is using the current fleet.toml again")

    def ages(self, error: SnapshotError | None) -> None:
        """Report a newest restore point that is too old (only once); with None, report that it has ended."""
        self._tell(TaskKind.AGE, error, "the newest restore point is young enough again")

    def leaves_out(self, snapshot: str, absent: Mapping[str, str]) -> None:
        """Report the standbys that an increment has left out, each with the reason, whenever they change."""
        before = self._troubles.get(TaskKind.COPIES)
        problem = f"increments leave out the copies of: {', '.join(sorted(absent))}" if absent else ""
        if problem == (before.problem if before else ""):
            return
        if absent:
            failed = (before or Task(TaskKind.COPIES, 0.0)).failed(utc_now(), problem)
            self._troubles[TaskKind.COPIES] = failed
            reasons = "; ".join(f"{node}: {reason}" for node, reason in sorted(absent.items()))
            hint = f"checks are inconclusive until they are back; to see since when: snapshot show {snapshot}"
            failure = CommandFailure(INCONCLUSIVE, "copies-absent", f"{problem} ({reasons})", hint)
            self.log(failure.message, hint=failure.hint, task=TaskKind.COPIES)
            self.send("failed", snapshot, failed, failure)
        elif before is not None:
            del self._troubles[TaskKind.COPIES]
            text = f"increments leave out no copy any more; before: {before.problem}"
            self.log(text, task=TaskKind.COPIES)
            self.send("recovered", snapshot, before, CommandFailure(0, "", text))

    def leaves_gaps(self, snapshot: str, gaps: Sequence[RenewalGap]) -> None:
        """Report the gaps before an increment, each once; the next increment without one ends them.

        The increment's own notes are logged.
        """
        before = self._troubles.get(TaskKind.GAPS)
        if gaps:
            problem = "; ".join(gap_texts(gaps))
            failed = (before or Task(TaskKind.GAPS, 0.0)).failed(utc_now(), problem)
            self._troubles[TaskKind.GAPS] = failed
            hint = f"everything before and after can be restored; to see the restore points: snapshot show {snapshot}"
            self.send("failed", snapshot, failed, CommandFailure(INCONCLUSIVE, "renewal-gap", problem, hint))
        elif before is not None:
            del self._troubles[TaskKind.GAPS]
            text = f"increments follow each other without a gap again; before: {before.problem}"
            self.send("recovered", snapshot, before, CommandFailure(0, "", text))

    def is_not_needed(self, task: Task, snapshot: str | None) -> None:
        """Report that a failed task is no longer needed."""
        text = f"{task.kind} is no longer needed; it had failed: {task.problem}"
        self.log(text, task=task.kind)
        self.send("recovered", snapshot, task, CommandFailure(0, "", text))

    def _tell(self, about: TaskKind, error: SnapshotError | None, recovered: str) -> None:
        before = self._troubles.get(about)
        if error is not None:
            failed = (before or Task(about, 0.0)).failed(utc_now(), error.message)
            # Record the failure first, so that readers don't wait for the notify command.
            self._troubles[about] = failed
            if before is None:
                failure = CommandFailure(error.exit_code, error.slug, error.message, error.hint)
                self.send("failed", None, failed, failure)
        elif before is not None:
            del self._troubles[about]
            self.send("recovered", None, before, CommandFailure(0, "", f"{recovered}; it had failed: {before.problem}"))


def event_of(event: str, fleet: str, snapshot: str | None, task: Task, failure: CommandFailure) -> dict[str, object]:
    """Return a notice as JSON."""
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
