"""The merges, copies and gc runs of `watch`: when they are due, how they are reported, and when they are due again.

Also hooks and hours, as they apply to a watch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cutline.cli.watch import last_results
from cutline.cli.watch import tasks as work
from cutline.cli.watch.fleet_source import intervals_of
from cutline.cli.watch.last_results import last_copy
from cutline.cli.watch.running_command import CommandResult, RunningCommand
from cutline.cli.watch.schedule import CONCURRENT, HEAVY, OF_SNAPSHOT, TaskKind, hours_texts, next_task, trouble_texts
from cutline.cli.watch.tasks import CommandFailedError, ConcurrentTask, result_of
from cutline.fleet.config import NEVER, HooksTable, Retention, WatchTable
from cutline.fleet.hours import Hours
from cutline.fleet.record import Time
from cutline.fleet.units import Interval
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.proven_chains import read_full
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, UnreachableError
from cutline.storage.ids import new_operation_id
from cutline.storage.store import DeletionRefusedError
from tests.unit.made_fleets import new_fleet
from tests.unit.watched import APPEND, NAME, Watched, new_watched

DAY, WEEK = 86400.0, 7 * 86400.0
MERGED = CommandResult(0, {"is_new": True, "increment": 7, "bytes": 3 << 20, "seconds": 12.0})
NOT_NEW = CommandResult(0, {"is_new": False})
NOTHING = CommandResult(3, {"error": "nothing-to-merge", "message": "snapshot a has no increment", "hint": ""})
COPIED = CommandResult(0, {"increments": 4, "bytes": 5 << 20, "stores": [{"snapshots": [{"problems": []}]}]})
PROBLEM = {"object": "snapshots/a/base/x", "detail": "it is damaged"}
NOT_COPIED = CommandResult(1, {"increments": 4, "bytes": 0, "stores": [{"snapshots": [{"problems": [PROBLEM]}]}]})
AWAY = CommandResult(6, {"error": "store-unreachable", "message": "the second store is away", "hint": "try again"})
COLLECTED = CommandResult(0, {"objects": 3, "bytes": 2 << 20, "unsettled": None, "refused": []})
NO_GARBAGE = CommandResult(0, {"objects": 0, "bytes": 0, "unsettled": "a node is away", "refused": []})
REFUSED_DELETION = DeletionRefusedError(url="memory://a", key="snapshots/a/base/x", reason="it is locked")
LOCKED = {"object": "snapshots/a/base/x", "reason": REFUSED_DELETION.message}
KEPT = CommandResult(3, {"objects": 3, "bytes": 2 << 20, "unsettled": None, "refused": [LOCKED] * 2})
BUSY = CommandResult(7, {"error": "fleet-busy", "message": "another operation is running", "hint": "wait"})


@dataclass
class Ended:
    """A command in another process that has ended, or still runs (None)."""

    answer: CommandResult | None

    def result(self) -> CommandResult | None:
        return self.answer


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A watch that merges its chain once a week, and copies all snapshots once a day."""
    found = new_watched(tmp_path, monkeypatch)
    rules = WatchTable(every=Interval(60), check=NEVER, copy=Interval(DAY))
    source = found.watcher.source
    source.fleet = replace(
        source.fleet, watch=rules, retention=Retention(merge_seconds=WEEK), copies=("memory://second",)
    )
    found.watcher.begin()
    return found


def let_run(monkeypatch: pytest.MonkeyPatch, *answers: CommandResult | None) -> list[list[str]]:
    """Let commands that the watch starts end with the answers, in turn; return their words."""
    left, started = list(answers), list[list[str]]()

    def start(_: object, words: list[str]) -> RunningCommand:
        started.append([str(word) for word in words])
        return cast(RunningCommand, Ended(left.pop(0)))

    monkeypatch.setattr(work, "start_command", start)
    return started


def do(watched: Watched, kind: TaskKind) -> None:
    """Do the task, and settle the command that it started if that has ended."""
    watched.run(kind)
    watched.watcher.look_beside()


def test_only_rules_make_merges_and_copies_due() -> None:
    rules = WatchTable(every=Interval(60))
    without = replace(new_fleet(), watch=rules)
    assert [intervals_of(without)[kind] for kind in (TaskKind.MERGE, TaskKind.COPY)] == [0, 0]
    # Copies need a second store, whatever the interval.
    copying = replace(without, watch=WatchTable(every=Interval(60), copy=Interval(DAY)))
    assert intervals_of(copying)[TaskKind.COPY] == 0
    assert intervals_of(replace(copying, copies=("memory://second",)))[TaskKind.COPY] == DAY
    assert intervals_of(replace(without, retention=Retention(merge_seconds=WEEK)))[TaskKind.MERGE] == WEEK


def test_a_chain_is_due_for_a_merge_an_interval_after_it_began_or_was_merged(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = watched.watcher
    assert watcher.chain is not None
    assert watcher.tasks[TaskKind.MERGE].done_at == watcher.chain.began_at
    merged_at = watcher.chain.began_at + timedelta(days=3)
    monkeypatch.setattr(last_results, "newest_merge", lambda *_: SimpleNamespace(made_at=Time.of(merged_at)))
    watcher.begin()
    merge = watcher.tasks[TaskKind.MERGE]
    assert merge.due_at(watcher.begun_at, merged_at + timedelta(days=30)) == merged_at + timedelta(days=7)


@pytest.mark.parametrize(
    ("kind", "words", "others"),
    [
        (TaskKind.MERGE, ["merge", NAME], {TaskKind.COPY, TaskKind.GC}),
        (TaskKind.COPY, ["copy", "--all"], {TaskKind.CHECK, TaskKind.DRILL, TaskKind.MERGE}),
        (TaskKind.GC, ["gc", "--yes"], {TaskKind.CHECK, TaskKind.DRILL, TaskKind.MERGE}),
    ],
)
def test_they_run_beside_increments_and_one_at_a_time_of_those_that_need_the_same(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: TaskKind, words: list[str], others: set[TaskKind]
) -> None:
    """A copy, which keeps the second store up to date, does not wait for a check of many hours."""
    started = let_run(monkeypatch, None)
    do(watched, kind)
    assert started == [words]
    assert watched.said[-1].endswith("begins")
    watcher = watched.watcher
    possible = watcher.following.possible(watcher.kept_back(utc_now()))
    assert TaskKind.INCREMENT in possible
    assert possible.keys() & {*CONCURRENT} == others


def test_a_check_that_hangs_is_told_and_keeps_no_other_from_beginning_for_ever(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = CommandResult(0, {"result": "valid"})
    hanging = Ended(None)
    watcher, source = watched.watcher, watched.watcher.source
    rules = WatchTable(every=Interval(60), check=Interval(2 * DAY), drill=Interval(WEEK))
    source.fleet = replace(source.fleet, watch=rules, retention=Retention(merge_seconds=DAY / 4))
    watcher.plan()
    monkeypatch.setattr(work, "start_command", lambda *_: cast(RunningCommand, hanging))
    do(watched, TaskKind.CHECK)
    began_at = watcher._concurrent[TaskKind.CHECK].begun_at

    def after(days: float) -> set[TaskKind]:
        """Which of the three may begin then."""
        now = began_at + timedelta(days=days)
        watcher.look_at_slow(now)
        return {TaskKind.CHECK, TaskKind.DRILL, TaskKind.MERGE} - watcher.kept_back(now)

    # A merge has been due all the time: three of its intervals are less than a day.
    assert (after(0), after(0.9), watched.notices()) == (set(), set(), [])
    assert after(1.1) == {TaskKind.MERGE}
    assert watched.notices() == [("failed", "check")]
    assert f"check of {NAME} has been running since" in watched.said[-1]
    assert "merge does not wait for it any more" in watched.said[-1]
    assert "snapshot cancel" in watched.hints[-1]
    said = len(watched.said)
    assert (after(20), after(22)) == ({TaskKind.MERGE}, {TaskKind.MERGE, TaskKind.DRILL})
    assert len(watched.said) == said
    assert "check fails: check of" in trouble_texts(watcher.tasks.values())[0]
    hanging.answer = valid
    watcher.look_beside()
    assert watched.notices() == [("failed", "check"), ("recovered", "check")]


def test_a_drill_that_hangs_is_told_though_nothing_waits_for_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, source = watched.watcher, watched.watcher.source
    source.fleet = replace(
        source.fleet,
        watch=WatchTable(every=Interval(60), check=NEVER, drill=Interval(WEEK)),
        retention=Retention(merge_seconds=0),
    )
    watcher.plan()
    let_run(monkeypatch, None)
    do(watched, TaskKind.DRILL)
    for days, notices in ((20, []), (22, [("failed", "drill")])):
        watcher.look_at_slow(watcher._concurrent[TaskKind.DRILL].begun_at + timedelta(days=days))
        assert watched.notices() == notices


@pytest.mark.parametrize(
    ("kind", "answer", "seconds"),
    [
        (TaskKind.MERGE, MERGED, WEEK),
        (TaskKind.MERGE, NOT_NEW, WEEK),
        (TaskKind.MERGE, NOTHING, WEEK),
        (TaskKind.COPY, COPIED, DAY),
        (TaskKind.GC, COLLECTED, WEEK),
        (TaskKind.GC, KEPT, WEEK),
    ],
)
def test_what_is_done_is_due_again_an_interval_later(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: TaskKind, answer: CommandResult, seconds: float
) -> None:
    let_run(monkeypatch, answer)
    before = utc_now()
    do(watched, kind)
    task = watched.watcher.tasks[kind]
    assert task.failures == 0
    due_at = task.due_at(before, utc_now())
    assert due_at is not None
    assert before <= due_at - timedelta(seconds=seconds) <= utc_now()
    assert watched.notices() == []


def test_the_log_says_what_was_merged_and_copied_and_nothing_else(watched: Watched) -> None:
    fleet = watched.watcher.source.fleet

    def text_of(kind: TaskKind, answer: CommandResult) -> str:
        task = ConcurrentTask(kind, f"{kind} of a", cast(RunningCommand, None), utc_now())
        return result_of(task, answer, fleet).text

    assert text_of(TaskKind.MERGE, MERGED) == "merge of a: it begins at increment 7 now, 3.0 MiB, 12.0 s"
    assert text_of(TaskKind.MERGE, NOT_NEW) == text_of(TaskKind.MERGE, NOTHING) == ""
    assert text_of(TaskKind.COPY, COPIED) == "copy of a: 4 restore points, 5.0 MiB"
    assert text_of(TaskKind.GC, COLLECTED) == "gc removed 3 objects, 2.0 MiB"
    assert text_of(TaskKind.GC, NO_GARBAGE) == ""
    assert text_of(TaskKind.GC, CommandResult(0, NO_GARBAGE.document | {"unsettled": None})) == "gc removed nothing"


def test_what_gc_could_not_do_is_a_note(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    let_run(monkeypatch, NO_GARBAGE, KEPT)
    do(watched, TaskKind.GC)
    assert watched.said[-1] == "note: gc did not settle earlier operations: a node is away"
    do(watched, TaskKind.GC)
    refused = (
        "note: gc left 2 objects that the store refuses to delete; the first: store memory://a: object"
        " snapshots/a/base/x can't be deleted: it is locked"
    )
    assert watched.said[-2:] == [refused, "gc removed 3 objects, 2.0 MiB"]
    assert watched.notices() == []


@pytest.mark.parametrize("kind", [TaskKind.MERGE, TaskKind.COPY, TaskKind.GC])
def test_a_failure_is_told_once_repeated_soon_and_so_is_its_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: TaskKind
) -> None:
    works = {TaskKind.MERGE: MERGED, TaskKind.COPY: COPIED, TaskKind.GC: COLLECTED}[kind]
    let_run(monkeypatch, AWAY, AWAY, works)
    for number in (1, 2):
        do(watched, kind)
        assert watched.watcher.tasks[kind].failures == number
        assert watched.seconds_to(kind) <= 5 * number
    assert "the second store is away" in watched.said[-1]
    do(watched, kind)
    assert watched.notices() == [("failed", kind), ("recovered", kind)]
    assert watched.watcher.tasks[kind].failures == 0
    # An increment takes its turn meanwhile: neither ends the chain.
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.goes_on


@pytest.mark.parametrize("kind", [TaskKind.MERGE, TaskKind.COPY])
def test_another_operation_is_waited_for(watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: TaskKind) -> None:
    let_run(monkeypatch, BUSY)
    do(watched, kind)
    assert watched.watcher.tasks[kind].failures == 0
    assert watched.watcher.tasks[kind].waiting_since is not None
    assert watched.notices() == []


def test_what_could_not_be_copied_is_a_finding_that_is_not_repeated_soon(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_run(monkeypatch, NOT_COPIED, COPIED)
    do(watched, TaskKind.COPY)
    task = watched.watcher.tasks[TaskKind.COPY]
    assert (task.failures, task.retry_at) == (1, None)
    assert "object snapshots/a/base/x: it is damaged" in watched.said[-1]
    do(watched, TaskKind.COPY)
    assert watched.notices() == [("failed", "copy"), ("recovered", "copy")]


def test_damage_that_a_copy_found_before_it_failed_is_told_with_the_failure(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = AWAY.document | {"details": {"stores": NOT_COPIED.document["stores"] * 2}}
    let_run(monkeypatch, CommandResult(6, document))
    do(watched, TaskKind.COPY)
    problem = watched.watcher.tasks[TaskKind.COPY].problem
    assert problem == (
        "the second store is away; besides, 2 problems, the first: object snapshots/a/base/x: it is damaged"
    )
    assert watched.notices() == [("failed", "copy")]


def test_a_task_that_fleet_toml_switches_off_does_not_fail_any_more(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_run(monkeypatch, AWAY)
    do(watched, TaskKind.GC)
    watcher = watched.watcher
    watcher.source.fleet = replace(watcher.source.fleet, watch=WatchTable(every=Interval(60), check=NEVER, gc=NEVER))
    watcher.plan()
    assert watcher.tasks[TaskKind.GC].problem == ""
    assert watched.notices() == [("failed", "gc"), ("recovered", "gc")]


def test_garbage_is_removed_at_any_hour_and_without_a_snapshot(watched: Watched) -> None:
    assert TaskKind.GC not in {*HEAVY, *OF_SNAPSHOT}


def test_a_copy_without_a_document_has_failed() -> None:
    task = ConcurrentTask(TaskKind.COPY, "copy of all snapshots", cast(RunningCommand, None), utc_now())
    with pytest.raises(CommandFailedError, match="ended by signal 9"):
        result_of(task, CommandResult(-9, {}), new_fleet())


def test_a_copy_of_all_snapshots_counts_for_the_next_watch(watched: Watched) -> None:
    source, ended_at = watched.watcher.source, utc_now()
    for snapshot, code in ((NAME, 0), ("", 6), ("", 0)):
        command = Command("copy", snapshot, new_operation_id(ended_at))
        ending = Ending("failed" if code else "done", code=code)
        record_without_intent(source.open_store(), command, Time.of(ended_at), "", ending)
    name, result = last_copy(source.fleet)
    assert (name, result is not None) == ("", True)
    watched.watcher.begin()
    done_at = watched.watcher.tasks[TaskKind.COPY].done_at
    assert done_at is not None
    assert abs((done_at - ended_at).total_seconds()) < 60


@pytest.mark.parametrize(
    ("state", "code", "counted"), [("done", 0, 1), ("done", 3, 1), ("failed", 3, 0), ("failed", 6, 0)]
)
def test_a_gc_by_anybody_counts_for_the_next_watch(watched: Watched, state: str, code: int, counted: int) -> None:
    source, ended_at = watched.watcher.source, utc_now()
    command = Command("gc", "", new_operation_id(ended_at))
    record_without_intent(source.open_store(), command, Time.of(ended_at), "", Ending(state, code=code))
    watched.watcher.begin()
    assert (watched.watcher.tasks[TaskKind.GC].done_at is not None) == bool(counted)


def test_copies_that_failed_or_of_one_snapshot_do_not_count(watched: Watched) -> None:
    source, ended_at = watched.watcher.source, utc_now()
    for snapshot, code in ((NAME, 0), ("", 6), ("", 1)):
        command = Command("copy", snapshot, new_operation_id(ended_at))
        ending = Ending("failed" if code else "done", code=code)
        record_without_intent(source.open_store(), command, Time.of(ended_at), "", ending)
    assert last_copy(source.fleet) == ("", None)


def test_merges_and_copies_begin_only_within_the_hours(watched: Watched) -> None:
    hours = Hours.parse("22:00-06:00")
    noon, night = (datetime(2026, 11, 29, hour, tzinfo=UTC) for hour in (12, 22))
    tasks = {kind: watched.watcher.tasks[kind] for kind in (TaskKind.MERGE, TaskKind.COPY)}
    begun_at = noon - timedelta(days=30)
    tasks = {kind: task.last_done(begun_at) for kind, task in tasks.items()}
    assert next_task(tasks, begun_at, noon, hours) == (None, night)
    assert hours_texts(tasks, begun_at, noon, hours) == [
        f"{kind} waits until 2026-11-29 22:00:00Z ([limits] hours)" for kind in tasks
    ]
    # Of two that are due, the one that has been due the longer.
    assert next_task(tasks, begun_at, night, hours)[0] == tasks[TaskKind.COPY]


def hook(tmp_path: Path, name: str, code: str = APPEND) -> tuple[str, ...]:
    return (sys.executable, "-c", code, str(tmp_path / name))


def run_increment(watched: Watched, monkeypatch: pytest.MonkeyPatch, create: Callable[..., Any]) -> None:
    """Let the watch take an increment itself, with `create` in the place of create_increment."""
    monkeypatch.setattr(work, "create_increment", create)
    watcher = watched.watcher
    watcher._settle(
        watcher.tasks[TaskKind.INCREMENT],
        lambda: work.take_increment(watcher.source.fleet, NAME, watcher.log, watcher.log)[1],
    )


def test_a_hook_that_fails_keeps_an_increment_from_beginning(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, begun = watched.watcher.source, list[object]()
    fails = HooksTable(before=hook(tmp_path, "before", "import sys; sys.exit('the disk is in maintenance')"))
    source.fleet = replace(source.fleet, hooks=fails)
    for _ in range(2):
        run_increment(watched, monkeypatch, lambda *arguments: begun.append(arguments))
    assert begun == []
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 2
    assert "the disk is in maintenance" in watched.said[-1]
    assert watched.notices() == [("failed", "increment")]
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.goes_on


def test_the_hook_after_an_increment_gets_its_failure_and_changes_nothing(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = watched.watcher.source
    both = HooksTable(before=hook(tmp_path, "hooked"), after=hook(tmp_path, "hooked"))
    source.fleet = replace(source.fleet, hooks=both)

    def busy(*_: object) -> None:
        raise BusyError("another operation is running")

    run_increment(watched, monkeypatch, busy)
    before, after = map(json.loads, (tmp_path / "hooked").read_text().splitlines())
    assert (before["event"], after["event"], before["run"]) == ("before", "after", after["run"])
    assert (after["command"], after["snapshot"], after["incremental"], after["code"]) == ("create", NAME, True, 7)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 0
    assert watched.notices() == []


@pytest.mark.parametrize("is_done", [True, False])
def test_an_interrupt_during_the_hook_after_an_increment_ends_the_watch(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    """Whether the increment was committed or has failed: the watch would otherwise go on after a SIGTERM."""
    source = watched.watcher.source
    interrupts = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    source.fleet = replace(source.fleet, hooks=HooksTable(after=hook(tmp_path, "after", interrupts)))
    commit = read_full(source.open_store(), NAME)

    def create(*_: object) -> FullSnapshot:
        if is_done:
            return commit
        raise UnreachableError("node a is away")

    with pytest.raises(KeyboardInterrupt):
        run_increment(watched, monkeypatch, create)
    assert watched.said[-1] == "increment was stopped"
