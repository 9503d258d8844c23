"""What a watch makes of checks that others have done: it repeats none, and tells what they have found."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

from cutline.cli.watch.last_results import adopt, newer_verdict
from cutline.cli.watch.running_command import CommandResult
from cutline.cli.watch.schedule import Task, TaskKind, clock_text
from cutline.cli.watch.tasks import check_not_running, finding_of, verdict_of
from cutline.fleet.config import Fleet
from cutline.fleet.record import Time
from cutline.fleet.units import Interval
from cutline.snapshots.operations.signs import store_sign
from cutline.storage.errors import BusyError
from cutline.storage.ids import new_operation_id
from tests.unit.document_kinds import SIGN
from tests.unit.made_checks import ended, point
from tests.unit.made_fleets import new_fleet
from tests.unit.watched import NAME, Watched, follow, new_watched


@pytest.fixture
def fleet() -> Fleet:
    return new_fleet()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return new_watched(tmp_path, monkeypatch)


def at(minute: int) -> datetime:
    return datetime(2026, 11, 24, 10, minute, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("result", "problem", "told"),
    [
        ("valid", "", 0),
        ("inconclusive", "check of a: inconclusive", 0),
        ("conflicts", "check of a: conflicts", 1),
    ],
)
def test_a_watch_that_begins_knows_what_the_last_check_has_found(
    fleet: Fleet, result: str, problem: str, told: int
) -> None:
    ended(fleet.store.open(), 1, point("a", 0, "valid"))
    ended(fleet.store.open(), 2, structs.replace(point("a", 0), result=result))
    tasks = {TaskKind.CHECK: Task(TaskKind.CHECK, 86400.0)}
    assert len(adopt(fleet, "a", tasks)) == told
    task = tasks[TaskKind.CHECK]
    assert (task.done_at, task.problem, task.failures) == (at(2), problem, int(bool(problem)))
    assert task.failing_since == (at(2) if problem else None)
    # Of the same watch, after it has lost its turn.
    assert adopt(fleet, "a", tasks) == []


def test_what_is_never_checked_here_fails_for_nobody(fleet: Fleet) -> None:
    ended(fleet.store.open(), 2, point("a", 0, "conflicts"))
    tasks = {TaskKind.CHECK: Task(TaskKind.CHECK, 0.0)}
    assert adopt(fleet, "a", tasks) == []
    assert (tasks[TaskKind.CHECK].done_at, tasks[TaskKind.CHECK].problem) == (at(2), "")


def test_a_check_that_somebody_has_done_since_is_not_repeated(fleet: Fleet) -> None:
    ended(fleet.store.open(), 2, point("a", 0, "conflicts"))
    task = Task(TaskKind.CHECK, 86400.0, at(1))
    found = newer_verdict(fleet, "a", task)
    assert found is not None
    assert (found.done_at, found.finding and found.finding.code) == (at(2), 1)
    assert newer_verdict(fleet, "a", task.last_done(at(2))) is None
    assert newer_verdict(fleet, "b", task) is None


@pytest.mark.parametrize("of", [NAME, ""])
def test_no_check_begins_while_another_one_of_the_snapshot_runs(watched: Watched, of: str) -> None:
    source, now = watched.watcher.source, datetime.now(UTC)
    follow(watched, check=Interval(86400))
    running = structs.replace(SIGN, operation=new_operation_id(now), kind="check", snapshot=of, seen_at=Time.of(now))
    store_sign(source.open_store(), running, 1)
    with pytest.raises(BusyError, match=f"operation {running.operation}, a check of {NAME}, is already running"):
        check_not_running(source, TaskKind.CHECK, NAME)
    if of:
        check_not_running(source, TaskKind.CHECK, "another")
    check_not_running(source, TaskKind.DRILL, NAME)
    watched.run(TaskKind.CHECK)
    assert watched.watcher.tasks[TaskKind.CHECK].failures == 0
    assert "check is waiting" in watched.said[-1]


def test_the_notice_of_a_check_says_what_it_has_found_first() -> None:
    conflict = {"detail": "it is damaged", "node": "s1", "object": "a/b"}
    document = {"result": "conflicts", "snapshots": [{"name": "a", "conflicts": [conflict, {"detail": "another"}]}]}
    finding = verdict_of("check of a", CommandResult(1, document), new_fleet()).finding
    assert finding is not None
    assert finding.hint == (
        "2 conflicts; the first: it is damaged; node s1; object a/b; to see all, and what to do: snapshot check a"
    )
    skipped = [{"what": "node s2", "why": "it has no standby"}]
    document = {"result": "inconclusive", "snapshots": [{"name": "a", "conflicts": [], "skipped": skipped}]}
    finding = verdict_of("check of a", CommandResult(4, document), new_fleet()).finding
    assert finding is not None
    assert finding.hint == "not compared: node s2: it has no standby"


def test_a_check_that_another_process_has_ended_is_taken_over_with_what_it_has_found(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a check begins")

    monkeypatch.setattr("cutline.cli.watch.tasks.start_command", start)
    follow(watched, check=Interval(86400))
    ended(watched.watcher.source.open_store(), 2, point(NAME, 0, "conflicts"))
    watched.run(TaskKind.CHECK)
    assert watched.watcher.tasks[TaskKind.CHECK].done_at == at(2)
    assert watched.notices() == [("failed", "check")]


def test_a_drill_of_another_snapshot_was_done_but_says_nothing_of_this_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, clock = finding_of(1, "conflicts", "drill of b: conflicts", done_at=at(2)), clock_text(at(2))
    monkeypatch.setattr("cutline.cli.watch.last_results.last_drill", lambda _: ("b", found))
    for snapshot, problem in (("a", ""), ("b", "drill of b: conflicts")):
        tasks = {kind: Task(kind, 86400.0, at(1)) for kind in (TaskKind.CHECK, TaskKind.DRILL)}
        newer = newer_verdict(fleet, snapshot, tasks[TaskKind.DRILL])
        assert (newer.text if newer else "") == (f"{problem}, by another process at {clock}" if problem else "")
        adopt(fleet, snapshot, tasks)
        assert (tasks[TaskKind.DRILL].done_at, tasks[TaskKind.DRILL].problem) == (at(2), problem)
