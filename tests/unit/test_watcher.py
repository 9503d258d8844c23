"""What `watch` does after its tasks: what it tells, and when they are due again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from cutline.cli.output.failure import CommandFailure
from cutline.cli.watch import schedule
from cutline.cli.watch.running_command import CommandResult, RunningCommand
from cutline.cli.watch.schedule import TaskKind, idle_texts, retry_now
from cutline.cli.watch.tasks import ConcurrentTask, TaskResult, verdict_of
from cutline.cli.watch.watcher import BUSY_SECONDS, READ_SECONDS
from cutline.fleet.config import NEVER, Retention
from cutline.fleet.progress import Silent
from cutline.fleet.units import Interval
from cutline.snapshots.operations.leases import SnapshotInUseError
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, UnreachableError, UsageError
from tests.unit.watched import NAME, Watched, fails, follow, new_watched, works


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return new_watched(tmp_path, monkeypatch)


def test_a_failure_is_told_once_and_so_is_its_end(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    for _ in range(3):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 3
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]
    assert sum("node a is away" in text for text in watched.said) == 3


def test_a_restore_point_that_is_too_old_is_told_once_and_so_is_its_end(watched: Watched) -> None:
    watcher = watched.watcher
    assert watcher.chain is not None
    made_at = watcher.chain.last_at
    for age_seconds in (59, 60, 3600):
        watcher._look_at_age(made_at + timedelta(seconds=age_seconds))
    assert watched.notices() == []
    watcher.source.fleet = replace(watcher.source.fleet, retention=Retention(max_age_seconds=3600))
    for age_seconds in (3600, 3601, 7200, 10):
        watcher._look_at_age(made_at + timedelta(seconds=age_seconds))
    assert watched.notices() == [("failed", "max-age"), ("recovered", "max-age")]
    assert watched.said[-2:] == [
        f"the newest restore point, of {made_at:%Y-%m-%d %H:%M} UTC, is 1.0 h old; [retention] max_age allows 1 h",
        "the newest restore point is young enough again",
    ]


def test_another_operation_is_no_failure(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(BusyError("another operation is running"))
    for _ in range(3):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 0
    assert BUSY_SECONDS - 5 < watched.seconds_to(TaskKind.INCREMENT) <= BUSY_SECONDS
    assert watched.notices() == []
    assert len([text for text in watched.said if "is waiting" in text]) == 1


def test_a_snapshot_that_is_being_read_is_waited_for_longer_than_the_lock(watched: Watched) -> None:
    """A prune reads all snapshots under the fleet's lock before it finds that a restore or merge reads one of them."""
    in_use = CommandResult(7, {"error": SnapshotInUseError("x").slug, "message": "snapshot a is being restored"})

    def prune() -> TaskResult:
        return verdict_of("prune", in_use, watched.watcher.source.fleet)

    watched.does[TaskKind.PRUNE] = prune
    watched.run(TaskKind.PRUNE)
    assert watched.watcher.tasks[TaskKind.PRUNE].failures == 0
    assert READ_SECONDS - 5 < watched.seconds_to(TaskKind.PRUNE) <= READ_SECONDS
    assert watched.said[-1] == "prune is waiting: snapshot a is being restored"


def test_a_command_that_can_not_be_told_anything_is_said(watched: Watched) -> None:
    source = watched.watcher.source
    source.fleet = replace(source.fleet, notify=("/nowhere",))
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(TaskKind.INCREMENT)
    assert "/nowhere" in watched.said[-1]


def test_a_notice_that_was_not_accepted_is_sent_in_a_later_round(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.cli.watch.notices.RESEND_SECONDS_FIRST", 0.0)
    watched.watcher.notices._pause_seconds = 0.0
    source = watched.watcher.source
    notify = source.fleet.notify
    source.fleet = replace(source.fleet, notify=("/nowhere",))
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(TaskKind.INCREMENT)
    source.fleet = replace(source.fleet, notify=notify)
    assert watched.notices() == []
    watched.watcher.read_file()
    assert watched.notices() == [("failed", "increment")]


def test_a_bug_ends_no_watch(watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    watched.does[TaskKind.INCREMENT] = fails(ZeroDivisionError())
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 1
    assert any("a bug: ZeroDivisionError" in text for text in watched.said)


def test_what_has_failed_is_told_to_work_again_also_after_the_watch_has_begun_anew(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(TaskKind.INCREMENT)
    # As when fleet.toml has other nodes.
    watched.watcher.begin()
    watched.run(TaskKind.INCREMENT)
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


@dataclass
class Ended:
    """A command in another process that has ended."""

    answer: CommandResult

    def result(self) -> CommandResult:
        return self.answer


def test_rules_that_change_during_a_check_hold_after_it(watched: Watched) -> None:
    follow(watched, check=Interval(86400))
    valid = cast(RunningCommand, Ended(CommandResult(0, {"result": "valid"})))
    watched.watcher._concurrent[TaskKind.CHECK] = ConcurrentTask(TaskKind.CHECK, "check", valid, utc_now())
    follow(watched, check=NEVER)
    watched.watcher.look_beside()
    check = watched.watcher.tasks[TaskKind.CHECK]
    assert (check.interval_seconds, check.done_at is not None) == (0, True)


@pytest.mark.parametrize(
    "answer", [CommandResult(1, {"result": "conflicts"}), CommandResult(6, {"message": "the store is away"})]
)
def test_a_check_that_ends_badly_after_it_was_switched_off_fails_for_a_moment(
    watched: Watched, answer: CommandResult
) -> None:
    """It is told, since it was found, and told to be over, since no check follows that could find it gone."""
    follow(watched, check=Interval(86400))
    watched.watcher._concurrent[TaskKind.CHECK] = ConcurrentTask(
        TaskKind.CHECK, "check", cast(RunningCommand, Ended(answer)), utc_now()
    )
    follow(watched, check=NEVER)
    watched.watcher.look_beside()
    check = watched.watcher.tasks[TaskKind.CHECK]
    assert (check.failing_since, check.problem, check.failures) == (None, "", 0)
    assert watched.watcher.state().failing == ()
    assert watched.notices() == [("failed", "check"), ("recovered", "check")]
    assert not any("next attempt" in text for text in watched.said)


def test_a_task_that_is_switched_off_while_it_waits_does_not_wait_for_ever(watched: Watched) -> None:
    follow(watched, check=Interval(86400))
    watched.does[TaskKind.CHECK] = fails(BusyError("operation x is a check"))
    watched.watcher._settle(watched.watcher.tasks[TaskKind.CHECK], watched.does[TaskKind.CHECK])
    assert any("check has been waiting" in text for text in idle_texts(watched.watcher.tasks.values(), None))
    follow(watched, check=NEVER)
    assert idle_texts(watched.watcher.tasks.values(), None) == ["idle"]
    assert watched.notices() == []


def test_a_check_that_can_not_be_begun_has_failed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(watched, check=Interval(86400))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cutline.cli.watch.tasks.start_command", full)
    watched.watcher._do(watched.watcher.tasks[TaskKind.CHECK])
    assert watched.watcher.tasks[TaskKind.CHECK].failures == 1
    assert "check: snapshot check can't be started: No space left on device" in watched.said[-1]
    assert watched.notices() == [("failed", "check")]


def test_a_fleet_that_stays_busy_is_told_once_and_so_is_its_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.does[TaskKind.INCREMENT] = fails(BusyError("another operation is running"))
    watched.run(TaskKind.INCREMENT)
    assert "increment has been waiting since" in idle_texts(watched.watcher.tasks.values(), None)[1]
    monkeypatch.setattr(schedule, "WAITING_SECONDS_MAX", 0.0)
    monkeypatch.setattr(schedule, "WAITING_INTERVALS_MAX", 0)
    for _ in range(2):
        watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment")]
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]
    assert idle_texts(watched.watcher.tasks.values(), None) == ["idle"]


def test_what_has_failed_is_tried_again_once_the_file_has_changed(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node a is away"))
    watched.does[TaskKind.PRUNE] = fails(BusyError("another operation is running"))
    for kind in (TaskKind.INCREMENT, TaskKind.PRUNE):
        watched.run(kind)
    retry_now(watched.watcher.tasks, datetime.now(UTC))
    assert watched.seconds_to(TaskKind.INCREMENT) <= 0
    assert watched.seconds_to(TaskKind.PRUNE) > 0


def test_a_check_that_finds_something_again_and_again_is_counted(watched: Watched) -> None:
    found = TaskResult("conflicts", finding=CommandFailure(1, "conflicts", "check of a: conflicts"))
    watched.does[TaskKind.CHECK] = lambda: found
    for number in (1, 2):
        watched.watcher._settle(watched.watcher.tasks[TaskKind.CHECK], watched.does[TaskKind.CHECK])
        assert watched.watcher.tasks[TaskKind.CHECK].failures == number
    assert watched.notices() == [("failed", "check")]


def test_a_file_that_is_refused_is_told_and_so_is_its_end(watched: Watched) -> None:
    notices = watched.watcher.notices
    for _ in range(2):
        notices.refuses_file(UsageError("fleet.toml: `every` is missing"))
    for _ in range(2):
        notices.refuses_file(None)
    assert watched.notices() == [("failed", "fleet-file"), ("recovered", "fleet-file")]


def test_status_says_what_fails_also_while_it_is_tried_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(Silent, "step", lambda _, name, **__: steps.append(name))
    # Whatever the date is, only the increment is due.
    follow(watched, full=NEVER)
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("node s2 is away"))
    for _ in range(2):
        tasks = watched.watcher.tasks
        tasks[TaskKind.INCREMENT] = structs.replace(tasks[TaskKind.INCREMENT], done_at=None, retry_at=None)
        watched.watcher.step()
    assert steps == [f"increment of {NAME}", f"increment of {NAME}; increment fails: node s2 is away"]


def test_a_full_snapshot_that_waits_for_another_operation_begins_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cutline.cli.watch.tasks.take_full", lambda *_, **__: fails(BusyError("another operation is running"))()
    )
    for _ in range(3):
        watched.watcher._settle(watched.watcher.tasks[TaskKind.FULL], watched.watcher._take_full)
    assert sum("a full snapshot is starting" in text for text in watched.said) == 1
    assert watched.watcher.tasks[TaskKind.FULL].failures == 0
