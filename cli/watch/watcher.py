"""The loop of `watch`: it does each task when it is due, waits longer after each failure, and reports its work.

An interrupted task leaves the same state behind as an interrupted command, and the next attempt settles it. So the loop
keeps no state on disk: when it starts, it reads its state from the store. A failure never ends the loop. A signal ends
the loop at once between two tasks, and during a task as soon as the task has cleaned up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from msgspec.structs import replace

from cutline.cli.output.failure import CANCELLED, REFUSED, CommandFailure, failure_of
from cutline.cli.process.stopping import cancel_request, forget_requests, is_asked_to_stop, is_signalled
from cutline.cli.watch import tasks as work
from cutline.cli.watch.fleet_source import FleetSource, intervals_of
from cutline.cli.watch.following import Following, WatchedChain, chain_end_of
from cutline.cli.watch.last_results import adopt, last_merge, newer_verdict
from cutline.cli.watch.notices import Notices, adopt_failures, not_needed, state_of, told_failures
from cutline.cli.watch.running_command import RunningCommand
from cutline.cli.watch.schedule import (
    CONCURRENT,
    JUDGING,
    LANES,
    OF_CHAIN,
    OF_STORE,
    Task,
    TaskKind,
    clock_text,
    hours_texts,
    idle_texts,
    next_task,
    retry_now,
    trouble_texts,
)
from cutline.cli.watch.tasks import ConcurrentTask, TaskResult, with_finding
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.listing.listing import age_problem, is_ahead
from cutline.snapshots.operations.activity import Activity
from cutline.snapshots.records.chain import gaps_of
from cutline.snapshots.records.commit import UNLISTED
from cutline.snapshots.records.operation_records import WatchState
from cutline.snapshots.records.proven_chains import cut_time
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, ChainEnd, SnapshotError, find_behind

TICK_SECONDS = 1.0
# The pause if another operation holds the fleet's lock.
BUSY_SECONDS = 15.0
# The pause if an operation reads a snapshot that a prune has to change: every attempt takes the lock and reads all
# snapshots, and a restore may take hours.
READ_SECONDS = 300.0
# The pause after a task was cancelled: the user does not want it to start again at once.
CANCELLED_SECONDS = 300.0

TOO_OLD_HINT = "see: snapshot status   and: snapshot history"
SLOW_HINT = "see: snapshot status   to stop it: snapshot cancel OPERATION"

Log = Callable[..., None]


class RestorePointTooOldError(SnapshotError):
    """The newest restore point is older than `[retention] max_age` allows."""

    exit_code = REFUSED


@dataclass(slots=True)
class Watcher:
    """The state of `watch` between two tasks."""

    source: FleetSource
    activity: Activity
    operation: str
    log: Log
    notices: Notices
    begun_at: datetime = field(default_factory=utc_now)
    tasks: dict[TaskKind, Task] = field(default_factory=dict)
    following: Following = field(init=False)
    # Whether this watch has the turn; otherwise it stands by.
    is_active: bool = False
    # Whether this watch had the turn and no other watch has had it since, so that its own view of the tasks is current.
    had_turn: bool = False
    _told: WatchState | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"done": 0, "failed": 0})
    # The tasks that run concurrently, and those of them that were reported because they take too long.
    _concurrent: dict[TaskKind, ConcurrentTask] = field(default_factory=dict)
    _slow: set[TaskKind] = field(default_factory=set)
    # The process that copies large standbys.
    _copies: RunningCommand | None = None
    _busy_texts: dict[TaskKind, str] = field(default_factory=dict)
    _phase: str = ""
    _age_problem: str = ""
    _waiting: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.following = Following(self.source, self.log, self.tasks, self.notices)

    @property
    def chain(self) -> WatchedChain | None:
        """The chain that the watch continues."""
        return self.following.chain

    def begin(self) -> None:
        """Find the chain, and the time when each task was last done; raises the store's errors."""
        self.following.find()
        self.plan()
        self.following.plan()
        name = self.chain.name if self.chain else ""
        if self.chain is not None and self.tasks[TaskKind.MERGE].interval_seconds > 0:
            # The full snapshot of the chain is as good as a merge.
            merged_at = last_merge(self.source.fleet, name) or self.chain.began_at
            self.tasks[TaskKind.MERGE] = self.tasks[TaskKind.MERGE].last_done(merged_at)
        for task, finding in adopt(self.source.fleet, name, self.tasks):
            self._tell("failed", task, finding)
        if not self.had_turn:
            told = told_failures(self.source.open_store(), self.operation, self._told)
            self.notices.adopt(adopt_failures(told, self.tasks), not_needed(told, self.tasks))

    def plan(self) -> None:
        """Take the intervals of tasks from the rules; keep the times when they were last done."""
        for kind, seconds in intervals_of(self.source.fleet).items():
            task = self.tasks.get(kind, Task(kind, seconds))
            if seconds <= 0:
                # It will never be done, so it could not recover, and its wait could not end.
                if task.failing_since is not None:
                    self.notices.is_not_needed(task, self.chain.name if self.chain else None)
                task = Task(kind, seconds, task.done_at)
                self._busy_texts.pop(kind, None)
            self.tasks[kind] = replace(task, interval_seconds=seconds)

    def step(self) -> None:
        """Do the task that is due, or wait briefly."""
        self.read_file()
        self.look_beside()
        now = utc_now()
        self._look_at_age(now)
        self.look_at_slow(now)
        possible, hours = self.following.possible(self.kept_back(now)), self.source.fleet.hours
        task, next_at = next_task(possible, self.begun_at, now, hours)
        if task is None:
            self._say_idle(next_at, hours_texts(possible, self.begun_at, now, hours))
            self.following.look_for_chain()
            time.sleep(TICK_SECONDS)
            return
        is_of_chain = task.kind in (*OF_CHAIN, *CONCURRENT) and task.kind not in OF_STORE
        of_chain = f" of {self.chain.name}" if self.chain and is_of_chain else ""
        self.say("; ".join([f"{task.kind}{of_chain}", *trouble_texts(self.tasks.values())]))
        self._do(task)

    def read_file(self) -> None:
        """Read fleet.toml again if it has changed, and retry failed tasks at once; send unsent notices again."""
        is_new = self.source.reload(self.log)
        self.notices.refuses_file(self.source.problem)
        self.notices.send_again()
        # Before `begin`, there are no tasks to plan.
        if is_new and self.tasks:
            self.plan()
            # The old file may have caused the failures.
            retry_now(self.tasks, utc_now())
            self.following.rules_changed()

    def look_beside(self) -> None:
        """Settle the concurrent checks, drills, merges, copies and gc runs that have ended."""
        for kind, running in list(self._concurrent.items()):
            if (ended := running.command.result()) is None:
                continue
            del self._concurrent[kind]
            self._slow.discard(kind)
            self._settle(self.tasks[kind], partial(work.result_of, running, ended, self.source.fleet))
            if self.tasks[kind].interval_seconds <= 0:
                # It was switched off while it ran: a failure that was just reported can't be followed by a success.
                self.plan()

    def kept_back(self, now: datetime) -> set[TaskKind]:
        """Return the tasks that can't begin because they, or another task of their lane, are running.

        A task that has waited too long does not wait any more: the other one may be hanging.
        """
        kept = set(self._concurrent)
        for lane, since in self._taken_lanes():
            kept |= {kind for kind in lane if not self.tasks[kind].is_overdue(self.begun_at, now, since)}
        return kept

    def _taken_lanes(self) -> Iterator[tuple[tuple[TaskKind, ...], datetime]]:
        """Yield each lane in which a task is running, with the time when the last one began."""
        for lane in LANES:
            if begun := [self._concurrent[kind].begun_at for kind in lane if kind in self._concurrent]:
                yield lane, max(begun)

    def look_at_slow(self, now: datetime) -> None:
        """Report concurrent tasks that have kept others, or their own next turn, waiting for too long."""
        for lane, since in self._taken_lanes():
            late = [kind for kind in lane if self.tasks[kind].is_overdue(self.begun_at, now, since)]
            for kind in lane if late else ():
                if kind in self._concurrent and kind not in self._slow:
                    self._slow.add(kind)
                    overtaking = [other for other in late if other not in self._concurrent]
                    self._report_slow(self._concurrent[kind], overtaking, now)

    def _report_slow(self, running: ConcurrentTask, overtaking: list[TaskKind], now: datetime) -> None:
        text = f"{running.what} has been running since {clock_text(running.begun_at)}"
        waiting = f"; {' and '.join(overtaking)} does not wait for it any more" if overtaking else ""
        self.log(f"{text}{waiting}", hint=SLOW_HINT, task=running.kind)
        task = self.tasks[running.kind]
        if task.failing_since is None:
            self.tasks[running.kind] = replace(task, failing_since=now, problem=text)
            failure = CommandFailure(BusyError.exit_code, "task-slow", text, SLOW_HINT)
            self._tell("failed", self.tasks[running.kind], failure)

    def _look_at_age(self, now: datetime) -> None:
        """Report a newest restore point that is older than fleet.toml allows, or that it is young enough again."""
        # Without any restore point, the age is that of this watch.
        newest = self.chain.last_at if self.chain else self.begun_at
        if self.chain and is_ahead(newest, now):
            # A clock was wrong. No increment follows until then, so the full snapshot's time says more.
            newest = self.chain.began_at
        problem = age_problem(newest, self.source.fleet.retention, now)
        if problem and not self._age_problem:
            self.log(problem, hint=TOO_OLD_HINT)
        elif self._age_problem and not problem:
            self.log("the newest restore point is young enough again")
        self._age_problem = problem
        self.notices.ages(RestorePointTooOldError(problem, hint=TOO_OLD_HINT) if problem else None)

    def _do(self, task: Task) -> None:
        name = self.chain.name if self.chain else ""

        def run() -> TaskResult | None:
            # Make sure that it is still the same store: the contents of a different store must not end or begin a
            # chain.
            self.source.open_store()
            return self._start_concurrent(task.kind, name) if task.kind in CONCURRENT else self._run(task.kind, name)

        self._settle(task, run)

    def _start_concurrent(self, kind: TaskKind, name: str) -> TaskResult | None:
        work.check_not_running(self.source, kind, name)
        if kind in JUDGING and (verdict := newer_verdict(self.source.fleet, name, self.tasks[kind])):
            return verdict
        self._concurrent[kind] = running = work.start_concurrent(self.source, kind, name)
        self.log(f"{running.what} begins", task=kind)
        return None

    def _settle(self, task: Task, run: Callable[[], TaskResult | None]) -> None:
        """Run the task and record its result; a result of None means that the task continues."""
        try:
            result = run()
        except BusyError as error:
            seconds = READ_SECONDS if isinstance(error, work.SnapshotReadError) else BUSY_SECONDS
            self._put_off(task, error.message, seconds)
        # However a task ends, the next task gets its turn: only a signal ends the loop.
        except BaseException as error:  # noqa: BLE001  # raised again if it is a signal
            self._after_error(task, error)
        else:
            self._busy_texts.pop(task.kind, None)
            if result is not None:
                self._after_success(task, result)

    def _run(self, kind: TaskKind, name: str) -> TaskResult | None:
        if kind is TaskKind.FULL:
            return self._take_full()
        if kind is TaskKind.REPLACE:
            self.following.end_replaced()
            return TaskResult("")
        if kind is TaskKind.INCREMENT:
            # Somebody, or a command that an earlier watch left running, may have taken a full snapshot.
            self.following.follow_newest()
            # Its chain may have ended meanwhile; a full snapshot is then due.
            if self.chain is None or not self.chain.goes_on:
                return None
            note = partial(self._note, TaskKind.INCREMENT)
            commit, result = work.take_increment(self.source.fleet, self.chain.name, self.log, note)
            self.following.chain = replace(self.chain, last_at=cut_time(commit))
            absent = {
                out.name: out.why
                for out in commit.left_out
                if out.kind == LeftOutKind.ABSENT_COPY and UNLISTED not in out.why
            }
            self.notices.leaves_out(self.chain.name, absent)
            self.notices.leaves_gaps(self.chain.name, gaps_of(commit))
            if commit.copying:
                self._copy_standbys(note)
            return result
        if kind is TaskKind.ARCHIVE:
            return self._archive_ahead(name)
        return work.prune(self.source)

    def _copy_standbys(self, note: Callable[[str], None]) -> None:
        """Have another process copy large standbys, unless one does."""
        is_running = self._copies is not None and self._copies.result() is None
        if self.chain is None or is_running or not self.source.fleet.background_seconds:
            return
        try:
            self._copies = work.start_copies(self.source, self.chain.name, note)
        except OSError as error:
            note(f"the copies of standbys go on after the next increment: no other process could be started: {error}")

    def _archive_ahead(self, name: str) -> TaskResult:
        increment = self.tasks[TaskKind.INCREMENT]
        needs_increment, result = work.archive(self.source.fleet, name, increment)
        if needs_increment:
            self.tasks[TaskKind.INCREMENT] = increment.put_off(utc_now(), 0.0)
        return result

    def _take_full(self) -> TaskResult:
        """Take a full snapshot, unless there is a new one already, perhaps from an attempt whose answer was lost."""
        if self.following.follow_newest() and self.following.goes_on:
            return TaskResult("")
        # Log this only once, although the task is retried while another operation blocks it.
        if TaskKind.FULL not in self._busy_texts:
            self.log("a full snapshot is starting; increments will wait until it ends")
        note = partial(self._note, TaskKind.FULL)
        result = work.take_full(self.source, note, gives_up=self.following.gives_up_full)
        self.following.follow_newest()
        return result

    def _note(self, kind: TaskKind, text: str) -> None:
        self.log(f"note: {text}", task=kind)

    def _after_success(self, task: Task, result: TaskResult) -> None:
        now = utc_now()
        self.counts["done"] += 1
        self.following.doubts.pop(task.kind, None)
        for note in result.notes:
            self._note(task.kind, note)
        if result.text:
            self.log(result.text, task=task.kind, snapshot=self.chain.name if self.chain else None)
        done = task.done(result.done_at or now)
        if task.kind is TaskKind.INCREMENT and self.chain is not None:
            done = task.done(self.chain.last_at)
        if result.finding is not None:
            done = with_finding(done, result, task)
            if result.finding.hint:
                self.log(result.finding.hint, task=task.kind)
            if task.problem != result.finding.message:
                self._tell("failed", done, result.finding)
        elif task.failing_since is not None:
            self.log(
                f"{task.kind} is working again; it had been failing since {clock_text(task.failing_since)}",
                task=task.kind,
            )
            text = f"{task.kind} is working again; it had failed: {task.problem}"
            self._tell("recovered", task, CommandFailure(0, "", text))
        # If the task has been replanned since, keep the new plan.
        if task.kind is TaskKind.INCREMENT or self.tasks[task.kind] is task:
            self.tasks[task.kind] = done

    def _after_error(self, task: Task, error: BaseException) -> None:
        interrupt = find_behind(error, KeyboardInterrupt)
        # A signal from elsewhere, perhaps together with a request to stop this task.
        if interrupt is not None and (is_signalled() or cancel_request() is None):
            self.log(f"{task.kind} was stopped", task=task.kind)
            raise error
        failure = failure_of(error)
        forget_requests(kept=self.operation)
        if is_asked_to_stop(self.operation):
            raise error
        now, is_cancelled = utc_now(), failure.code == CANCELLED
        failed = task.put_off(now, CANCELLED_SECONDS) if is_cancelled else task.failed(now, failure.message)
        self.counts["failed"] += 1
        self.tasks[task.kind] = failed
        ends_chain = ChainEnd.NO if interrupt is not None else chain_end_of(error)
        if task.kind is TaskKind.FULL:
            self.following.full_failed(is_refused=work.is_refused(error))
        if self.following.is_over(task.kind, ends_chain):
            self._end_chain(task, failed, failure)
            return
        is_repeated = failed.retry_at is not None and failed.interval_seconds > 0
        again = f"; next attempt at {clock_text(failed.retry_at)}" if is_repeated else ""
        text = f"{task.kind}: {failure.message}{again}"
        self.log(text, task=task.kind, hint=failure.hint, code=failure.code, error=failure.slug)
        if task.failing_since is None and not is_cancelled:
            self._tell("failed", failed, failure)

    def _end_chain(self, before: Task, failed: Task, failure: CommandFailure) -> None:
        told = failure
        if self.source.rules.full > 0:
            told = replace(failure, hint="nothing to do: the watch will begin a new chain with a full snapshot")
        if before.failing_since is None:
            self._tell("failed", failed, told)
        self.following.end(failure.message)

    def _put_off(self, task: Task, text: str, seconds: float) -> None:
        now = utc_now()
        put_off = task.waits(now, seconds)
        self.tasks[task.kind] = put_off
        paced_by = TaskKind.INCREMENT if task.kind is TaskKind.FULL else task.kind
        if task.failing_since is None and put_off.waits_too_long(now, self.tasks[paced_by].interval_seconds):
            # The blocking operation may be hanging. The task counts as recovered once it is done.
            self.tasks[task.kind] = replace(put_off, failing_since=put_off.waiting_since, problem=text)
            failure = CommandFailure(BusyError.exit_code, "fleet-busy", text, "see: snapshot status")
            self._tell("failed", self.tasks[task.kind], failure)
        if text != self._busy_texts.get(task.kind):
            self.log(f"{task.kind} is waiting: {text}", task=task.kind)
        self._busy_texts[task.kind] = text
        self.say(f"{task.kind} is waiting: another operation is running")

    def _say_idle(self, next_at: datetime | None, waiting: list[str]) -> None:
        if waiting and waiting != self._waiting:
            self.log("; ".join(waiting))
        self._waiting = waiting
        more = [] if self.following.goes_on else ["no snapshot is getting increments"]
        more += [self.source.problem.message] if self.source.problem else []
        more += [self._age_problem] if self._age_problem else []
        self.say("; ".join([*idle_texts(self.tasks.values(), next_at), *waiting, *more]))

    def say(self, phase: str) -> None:
        """Show the current work, or the failing tasks, in `status`."""
        self.activity.watches(self.state())
        if phase != self._phase:
            self.activity.step(phase)
        self._phase = phase

    def hand_over(self) -> None:
        """Give up the turn: from now on, another watch will report failures."""
        self._told, self.had_turn = self.state(), False
        for kind, task in self.tasks.items():
            # The results of checks and drills are in the store.
            if kind not in JUDGING:
                self.tasks[kind] = replace(task, failing_since=None, problem="")

    def state(self) -> WatchState:
        """Return the failures that this watch has reported, for its successor."""
        tasks = [*self.notices.troubles, *(self.tasks.values() if self.had_turn else ())]
        return state_of(tasks, had_turn=self.had_turn)

    def _tell(self, event: str, task: Task, failure: CommandFailure) -> None:
        self.notices.send(event, self.chain.name if self.chain else None, task, failure)
