"""What `watch` does after its tasks: with tasks that are done here, on a store with made chains."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

import cli.commands.watch as command
import cli.main
import cli.watch.watcher as module
from cli.output import stopping
from cli.watch.fleet_source import FleetSource
from cli.watch.notices import Notices
from cli.watch.running_command import CommandResult, RunningCommand
from cli.watch.schedule import TaskKind
from cli.watch.tasks import Beside, TaskResult
from cli.watch.turn import Turn
from cli.watch.watcher import BUSY_SECONDS, CANCELLED_SECONDS, FINAL_FAILURES, Watcher
from fleet.durations import Interval
from fleet.fleet_file import NEVER, WatchTable
from fleet.hints import NEW_CHAIN
from fleet.progress import Silent
from snapshots.activity.activity import Activity
from snapshots.between_cuts.archive_ahead import ArchivedAhead
from snapshots.operations.operation import current_time
from snapshots.records.commits import read_full
from snapshots.records.documents import ManifestError
from snapshots.records.lost_chains import LostChain, mark_lost
from snapshots.records.operation_records import CancelRequest
from storage.errors import BusyError, ChainEnd, RefusedError, SnapshotError, UnreachableError
from tests.unit.made_fleets import new_fleet, store_chain

NAME = "watch-2026-11-24-010000"
APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
OWN = "20261124T000000Z-0000000000"
SECONDS_MAX = 30


@dataclass
class Watched:
    """A watch that has begun, what it has said, and what its tasks do: what is at their kind is called."""

    watcher: Watcher
    said: list[str]
    events: Path
    does: dict[TaskKind, Callable[[], TaskResult]] = field(default_factory=dict)

    def run(self, kind: TaskKind) -> None:
        """Do the task now, whenever it is due."""
        self.watcher._do(self.watcher.tasks[kind])

    def seconds_to(self, kind: TaskKind) -> float:
        """How long the task waits for its next attempt, from now on."""
        at = self.watcher.tasks[kind].retry_at
        assert at is not None
        return (at - module.datetime.now(module.UTC)).total_seconds()

    def notices(self) -> list[tuple[str, str]]:
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return [(one["event"], one["task"]) for one in map(json.loads, lines)]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    rules = WatchTable(every=Interval(60), check=NEVER)
    notify = (sys.executable, "-c", APPEND, str(tmp_path / "events"))
    fleet = replace(new_fleet(), watch=rules, notify=notify)
    store_chain(fleet, NAME, "2026-11-24T01:00:00Z")
    said: list[str] = []

    def say(text: str, **_: object) -> None:
        said.append(text)

    source = FleetSource(tmp_path / "fleet.toml", fleet, b"", b"")
    watcher = Watcher(source, cast(Activity, Silent()), OWN, say, Notices(source, say))
    watcher.begin()
    found = Watched(watcher, said, tmp_path / "events")

    def run(_: Watcher, kind: TaskKind, __: str) -> TaskResult:
        return found.does[kind]()

    monkeypatch.setattr(module.Watcher, "_run", run)
    stopping.forget_requests(kept="")
    stopping._is_signalled.clear()
    return found


def fails(error: BaseException) -> Callable[[], TaskResult]:
    def fail() -> TaskResult:
        raise error

    return fail


def works() -> TaskResult:
    return TaskResult("done")


def test_a_failure_is_told_once_and_so_is_its_end(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    for _ in range(3):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 3
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]
    assert sum("node a is away" in text for text in watched.said) == 3


def test_another_operation_is_no_failure(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(BusyError("another operation is running"))
    for _ in range(3):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 0
    assert BUSY_SECONDS - 5 < watched.seconds_to(TaskKind.INCREMENT) <= BUSY_SECONDS
    assert watched.notices() == []
    assert len([text for text in watched.said if "waits" in text]) == 1


def ending(ends_chain: ChainEnd) -> SnapshotError:
    return RefusedError("the slot is gone", hint="as any hint is worded", ends_chain=ends_chain)


def test_a_chain_that_can_not_go_on_is_followed_by_a_full_snapshot_at_once(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.ended == "the slot is gone"
    assert watched.seconds_to(TaskKind.FULL) <= 0
    assert TaskKind.INCREMENT not in watched.watcher._possible()
    assert watched.notices() == [("failed", "increment")]


def test_what_may_still_mend_the_chain_has_some_time_for_it(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for number in range(1, FINAL_FAILURES + 1):
        assert watched.watcher.chain is not None
        assert watched.watcher.chain.goes_on, number
        watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.chain.goes_on


def test_what_a_hint_says_of_a_new_chain_ends_none(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(RefusedError("the slot is gone", hint=NEW_CHAIN))
    for _ in range(FINAL_FAILURES + 1):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.goes_on


def test_a_chain_ends_only_by_what_keeps_it_from_going_on(watched: Watched) -> None:
    watched.does[TaskKind.PRUNE] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.PRUNE)
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.goes_on


def interrupted(*operations: str) -> Callable[[], TaskResult]:
    """A task that these requests have interrupted, as a signal does."""

    def stop() -> TaskResult:
        for one in operations:
            stopping._requests.append(CancelRequest(one, "cutline cancel ops@db7:4711", current_time()))
        raise KeyboardInterrupt(15)

    return stop


def test_a_task_that_is_cancelled_waits_and_is_no_failure(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = interrupted("the increment's")
    watched.run(TaskKind.INCREMENT)
    assert CANCELLED_SECONDS - 5 < watched.seconds_to(TaskKind.INCREMENT) <= CANCELLED_SECONDS
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 0
    assert watched.notices() == []
    assert stopping.cancel_request() is None
    # Nor is one told again that had failed before.
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(TaskKind.INCREMENT)
    watched.does[TaskKind.INCREMENT] = interrupted("the increment's")
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment")]


def test_a_command_that_can_not_be_told_anything_is_said(watched: Watched) -> None:
    source = watched.watcher.source
    source.fleet = replace(source.fleet, notify=("/nowhere",))
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(TaskKind.INCREMENT)
    assert "/nowhere" in watched.said[-1]


@pytest.mark.parametrize("operations", [(), (OWN,), ("the increment's", OWN)], ids=["signal", "watch", "both"])
def test_a_signal_and_a_request_to_the_watch_end_it(watched: Watched, operations: tuple[str, ...]) -> None:
    watched.does[TaskKind.INCREMENT] = interrupted(*operations)
    with pytest.raises(KeyboardInterrupt):
        watched.run(TaskKind.INCREMENT)


def test_a_bug_ends_no_watch(watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    watched.does[TaskKind.INCREMENT] = fails(ZeroDivisionError())
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 1
    assert any("a bug: ZeroDivisionError" in text for text in watched.said)


def test_a_snapshot_that_somebody_takes_is_continued_and_replaces_the_one_before(watched: Watched) -> None:
    watcher = watched.watcher
    assert not watcher.following.follow_newest()
    store_chain(watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    assert watcher.following.follow_newest()
    assert watcher.chain is not None
    assert (watcher.chain.name, watcher.chain.replaced) == ("watch-2026-11-24-020000", (NAME,))
    assert TaskKind.REPLACE in {kind for kind, one in watcher.tasks.items() if one.interval_seconds}


@pytest.mark.parametrize(
    ("left", "rest"), [([], ""), (["b", "b-1"], "; its slot may be left on b, b-1: the next create drops it")]
)
def test_nodes_on_which_a_replaced_chain_may_leave_its_slot_are_named(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, left: list[str], rest: str
) -> None:
    following, newest = watched.watcher.following, "watch-2026-11-24-020000"
    store_chain(watched.watcher.source.fleet, newest, "2026-11-24T02:00:00Z")
    assert following.follow_newest()
    monkeypatch.setattr("cli.watch.following.supersede", lambda *_: left)
    following.end_replaced()
    assert watched.said[-1] == f"snapshot {NAME} gets no more increments: {newest} has taken its place{rest}"


def test_full_never_means_never(watched: Watched) -> None:
    source = watched.watcher.source
    assert source.fleet.watch is not None
    source.fleet = replace(source.fleet, watch=WatchTable(every=Interval(60), full=NEVER, check=NEVER))
    watched.watcher.plan()
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    possible: dict[TaskKind, Any] = watched.watcher._possible()
    assert not any(one.interval_seconds for kind, one in possible.items() if kind is TaskKind.FULL)
    assert "[watch] full is never" in watched.said[-1]


def follow(watched: Watched, **rules: Any) -> None:
    """Give the watch other rules."""
    source = watched.watcher.source
    source.fleet = replace(source.fleet, watch=WatchTable(**({"every": Interval(60), "check": NEVER} | rules)))
    watched.watcher.plan()
    watched.watcher.following.rules_changed()


def test_what_has_failed_is_told_to_work_again_also_on_the_next_chain(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    store_chain(watched.watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    assert watched.watcher.following.follow_newest()
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


def test_what_has_failed_is_told_to_work_again_also_after_the_watch_has_begun_anew(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(TaskKind.INCREMENT)
    # As when fleet.toml has other nodes.
    watched.watcher.begin()
    watched.run(TaskKind.INCREMENT)
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


def test_the_end_of_a_chain_counts_once_however_often_the_watch_begins_anew(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    due_at = watched.watcher.tasks[TaskKind.FULL].retry_at
    assert due_at is not None
    end_chain(watched)
    for _ in range(3):
        watched.watcher.begin()
    assert watched.watcher.tasks[TaskKind.FULL].retry_at == due_at


def end_chain(watched: Watched) -> None:
    store = watched.watcher.source.fleet.store.open()
    mark_lost(store, LostChain(NAME, read_full(store, NAME).chain, 0, "", 0, 0, current_time()))


def test_a_full_snapshot_is_due_once_the_rules_ask_for_one(watched: Watched) -> None:
    follow(watched, full=NEVER)
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    follow(watched, full=Interval(7 * 86400))
    now = module.datetime.now(module.UTC)
    due_at = watched.watcher.tasks[TaskKind.FULL].due_at(watched.watcher.begun_at, now)
    assert due_at is not None
    assert due_at <= now


class EndedCheck:
    """A check in another process that has ended."""

    def result(self) -> CommandResult:
        return CommandResult(0, {"result": "valid"})


def test_rules_that_change_during_a_check_hold_after_it(watched: Watched) -> None:
    follow(watched, check=Interval(86400))
    watched.watcher._beside = Beside(TaskKind.CHECK, "check", cast(RunningCommand, EndedCheck()))
    follow(watched, check=NEVER)
    watched.watcher._look_beside()
    assert watched.watcher.tasks[TaskKind.CHECK].interval_seconds == 0


def test_a_check_that_can_not_be_begun_has_failed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(watched, check=Interval(86400))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cli.watch.tasks.start_command", full)
    watched.watcher._do(watched.watcher.tasks[TaskKind.CHECK])
    assert watched.watcher.tasks[TaskKind.CHECK].failures == 1
    assert "check: snapshot check can't be started: No space left on device" in watched.said[-1]
    assert watched.notices() == [("failed", "check")]


def test_a_signal_that_comes_while_a_cancelled_task_is_undone_ends_the_watch(watched: Watched) -> None:
    def cancelled_then_signalled() -> TaskResult:
        try:
            stopping.stop_process(CancelRequest("the increment's", "cutline cancel ops@db7:4711", current_time()))
            time.sleep(SECONDS_MAX)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SECONDS_MAX)
        return works()

    before = signal.signal(signal.SIGTERM, cli.main._unwind)
    try:
        watched.does[TaskKind.INCREMENT] = cancelled_then_signalled
        with pytest.raises(KeyboardInterrupt):
            watched.run(TaskKind.INCREMENT)
        assert stopping.is_signalled()
    finally:
        signal.signal(signal.SIGTERM, before)
        cli.main._signals.clear()


def test_changed_tables_make_an_increment_due_unless_that_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "archive_ahead", lambda *_: ArchivedAhead(needs_increment=True))
    watcher = watched.watcher
    watcher.tasks[TaskKind.INCREMENT] = watcher.tasks[TaskKind.INCREMENT].done(module.datetime.now(module.UTC))
    assert "have changed" in watcher._archive_ahead(NAME).text
    found, _ = module.next_task(watcher._possible(), watcher.begun_at, module.datetime.now(module.UTC))
    assert found is not None
    assert found.kind is TaskKind.INCREMENT
    failed = watcher.tasks[TaskKind.INCREMENT].failed(module.datetime.now(module.UTC), "away")
    watcher.tasks[TaskKind.INCREMENT] = failed
    assert watcher._archive_ahead(NAME).text == ""
    assert watcher.tasks[TaskKind.INCREMENT] is failed


@pytest.mark.parametrize("first", [BusyError("another watch works"), UnreachableError("node a is away")])
def test_what_is_refused_after_the_start_is_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, first: SnapshotError
) -> None:
    stop = KeyboardInterrupt(signal.SIGTERM)
    answers: list[BaseException] = [first, RefusedError("node a is a standby"), BusyError("another works"), stop]

    @contextmanager
    def take_turn(*_: object) -> Iterator[Turn]:
        raise answers.pop(0)
        yield

    monkeypatch.setattr(command, "take_turn", take_turn)
    monkeypatch.setattr(command, "STAND_BY_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        command.run_watch(watched.watcher)
    assert "waiting: node a is a standby" in watched.said
    # Standing by is no trouble.
    assert watched.notices() == [("failed", "watch"), ("recovered", "watch")]
    answers += [RefusedError("node a is a standby")]
    with pytest.raises(RefusedError):
        command.run_watch(watched.watcher)


def test_a_chain_whose_newest_commit_stays_damaged_is_followed_by_a_full_snapshot(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ManifestError("object increments/1.json is damaged"))
    for _ in range(FINAL_FAILURES - 1):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.following.goes_on
    watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.following.goes_on
    assert "a full snapshot follows" in watched.said[-1]
