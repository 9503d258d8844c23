"""What ends a watch, or only one of its tasks: signals, requests, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec import structs

import cutline.cli.commands.watch as command
import cutline.cli.main
import cutline.cli.watch.watcher as module
from cutline.cli.process import stopping
from cutline.cli.watch import notices
from cutline.cli.watch.schedule import TaskKind
from cutline.cli.watch.tasks import TaskResult
from cutline.cli.watch.turn import DeadWatches, SilentWatch, SilentWatchError
from cutline.cli.watch.watcher import CANCELLED_SECONDS, Watcher
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.operations.under_way import read_under_way
from cutline.snapshots.records.operation_records import CancelRequest
from cutline.storage.errors import BusyError, RefusedError, SnapshotError, UnreachableError
from cutline.storage.ids import new_operation_id
from tests.unit.document_kinds import SIGN
from tests.unit.watched import OWN, SECONDS_MAX, Watched, fails, new_watched, stand_by, works


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return new_watched(tmp_path, monkeypatch)


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


@pytest.mark.parametrize("operations", [(), (OWN,), ("the increment's", OWN)], ids=["signal", "watch", "both"])
def test_a_signal_and_a_request_to_the_watch_end_it(watched: Watched, operations: tuple[str, ...]) -> None:
    watched.does[TaskKind.INCREMENT] = interrupted(*operations)
    with pytest.raises(KeyboardInterrupt):
        watched.run(TaskKind.INCREMENT)


@pytest.fixture
def unwinding() -> Iterator[None]:
    """SIGTERM does what it does in the command line."""
    before = signal.signal(signal.SIGTERM, cutline.cli.main._unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def cancel_increment() -> TaskResult:
    """Be stopped as by somebody who cancels the increment."""
    stopping.stop_process(CancelRequest("the increment's", "cutline cancel ops@db7:4711", current_time()))
    time.sleep(SECONDS_MAX)
    return works()


@pytest.mark.usefixtures("unwinding")
def test_the_signal_behind_a_request_ends_only_the_task(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = cancel_increment
    for _ in range(2):
        watched.run(TaskKind.INCREMENT)
    assert not stopping.is_signalled()
    assert watched.watcher.counts["failed"] == 2


@pytest.mark.usefixtures("unwinding")
@pytest.mark.parametrize("_test", ["one", "the next"])
def test_a_signal_that_comes_while_a_cancelled_task_is_undone_ends_the_watch(watched: Watched, _test: str) -> None:
    def cancelled_then_signalled() -> TaskResult:
        try:
            return cancel_increment()
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SECONDS_MAX)
        return works()

    watched.does[TaskKind.INCREMENT] = cancelled_then_signalled
    with pytest.raises(KeyboardInterrupt):
        watched.run(TaskKind.INCREMENT)
    assert stopping.is_signalled()


@pytest.mark.parametrize("first", [BusyError("another watch is active"), UnreachableError("node a is away")])
def test_what_is_refused_after_the_start_is_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, first: SnapshotError
) -> None:
    stop = KeyboardInterrupt(signal.SIGTERM)
    answers: list[BaseException] = [first, RefusedError("node a is a standby"), BusyError("another works"), stop]

    stand_by(watched, monkeypatch, answers)
    assert "waiting: node a is a standby" in watched.said
    # Standing by is no trouble.
    assert watched.notices() == [("failed", "watch"), ("recovered", "watch")]
    assert "another watch is active; it had failed: node a is a standby" in watched.events.read_text()
    answers += [RefusedError("node a is a standby")]
    with pytest.raises(RefusedError):
        command.run_watch(watched.watcher)


def test_status_shows_what_a_watch_does_after_it_has_waited(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is what it did before."""
    steps: list[str] = []
    monkeypatch.setattr(Silent, "step", lambda _, name, **__: steps.append(name))
    answers: list[BaseException | None] = [None, UnreachableError("node a is away"), None, KeyboardInterrupt()]

    class OneStep:
        """A turn that is lost after one step."""

        is_kept = True

        def keep(self) -> bool:
            kept, self.is_kept = self.is_kept, False
            return kept

    @contextmanager
    def take_turn(*_: object) -> Iterator[OneStep]:
        if (error := answers.pop(0)) is not None:
            raise error
        yield OneStep()

    monkeypatch.setattr(command, "take_turn", take_turn)
    monkeypatch.setattr(command, "STAND_BY_SECONDS", 0.0)
    monkeypatch.setattr(Watcher, "step", lambda watcher: watcher.say("idle"))
    with pytest.raises(KeyboardInterrupt):
        command.run_watch(watched.watcher)
    assert steps == ["idle", "waiting: node a is away", "idle"]


@pytest.mark.parametrize(("seconds", "said"), [(0.3, ["asking the primaries for the turn"]), (0.0, [])])
def test_a_slow_start_says_what_it_waits_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, seconds: float, said: list[str]
) -> None:
    @contextmanager
    def take_turn(*_: object) -> Iterator[None]:
        time.sleep(seconds)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(command, "take_turn", take_turn)
    monkeypatch.setattr(notices, "SLOW_SECONDS", 0.1)
    with pytest.raises(KeyboardInterrupt):
        command.run_watch(watched.watcher)
    time.sleep(0.2)
    assert watched.said == said


def test_an_earlier_watch_that_was_killed_is_forgotten_and_nothing_else(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.snapshots.operations.cancelling.ANSWER_SECONDS_MAX", 0.0)
    fleet, now = watched.watcher.source.fleet, module.utc_now()
    store, long_ago = fleet.store.open(), Time.of(now - timedelta(hours=1))
    found = {"dead": ("watch", long_ago), "alive": ("watch", Time.of(now)), "check": ("check", long_ago)}
    ids = {}
    for name, (kind, seen_at) in found.items():
        ids[name] = new_operation_id(now)
        store_sign(store, structs.replace(SIGN, operation=ids[name], kind=kind, began_at=seen_at, seen_at=seen_at), 1)
    DeadWatches().forget_when_due(watched.watcher.source, watched.watcher.log)
    assert len(read_under_way(store)) == len(found)
    monkeypatch.setattr("cutline.cli.watch.turn.FORGET_SECONDS", 0.0)
    DeadWatches().forget_when_due(watched.watcher.source, watched.watcher.log)
    assert {one.id for one in read_under_way(store)} == {ids["alive"], ids["check"]}
    assert ids["dead"] in watched.said[-1]


def test_a_watch_that_hangs_is_told_by_the_one_that_waits_and_so_is_its_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [SilentWatchError("no sign of life", hint="end it"), None]
    answers: list[BaseException] = [BusyError("another works"), BusyError("another works"), KeyboardInterrupt()]

    monkeypatch.setattr(SilentWatch, "find", lambda *_: found.pop(0))
    stand_by(watched, monkeypatch, answers)
    assert watched.said[-2:] == ["standing by: no sign of life", "standing by: another works"]
    assert watched.notices() == [("failed", "watch"), ("recovered", "watch")]
