"""What a watch has told of tasks that failed, the next one tells the end of."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

from cutline.cli.watch.notices import adopt_failures, state_of, told_failures
from cutline.cli.watch.schedule import Task, TaskKind
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.cancelling import forget
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.operations.under_way import WATCH, read_one
from cutline.snapshots.records.operation_records import WatchState
from cutline.storage.errors import UnreachableError
from cutline.storage.ids import new_operation_id
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import SIGN
from tests.unit.made_commits import memory
from tests.unit.watched import OWN, Watched, fails, new_watched, works

NOW = datetime(2026, 11, 25, 10, tzinfo=UTC)
INCREMENT, PRUNE = TaskKind.INCREMENT, TaskKind.PRUNE


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return new_watched(tmp_path, monkeypatch)


def state(minute: int, *kinds: TaskKind, had_turn: bool = True) -> WatchState:
    """What a watch has told by then."""
    at = NOW + timedelta(minutes=minute)
    told = state_of([Task(kind, 60.0).failed(at, f"{kind} away since {minute}") for kind in kinds], had_turn=had_turn)
    return structs.replace(told, at=Time.of(at))


def stopped(store: InMemoryStore, told: WatchState) -> None:
    """A watch that has ended."""
    command = Command(WATCH, "", new_operation_id(NOW))
    record_without_intent(store, command, Time.of(NOW), "", Ending("done", "", 0, watch=told))


def signed(store: InMemoryStore, told: WatchState, *, seen_at: datetime = NOW) -> str:
    """A watch that was killed, or is at work; its operation."""
    sign = structs.replace(SIGN, kind=WATCH, operation=new_operation_id(NOW), seen_at=Time.of(seen_at), watch=told)
    store_sign(store, sign, 1)
    return sign.operation


def tasks_told(store: InMemoryStore) -> list[str]:
    return [one.task for one in told_failures(store, OWN, None)]


def test_the_last_watch_that_had_the_turn_counts_and_what_others_told_since() -> None:
    store = memory()
    assert tasks_told(store) == []
    stopped(store, state(1, INCREMENT))
    assert tasks_told(store) == ["increment"]
    stopped(store, state(2, PRUNE))
    assert tasks_told(store) == ["prune"]
    stopped(store, state(3, TaskKind.WATCH, had_turn=False))
    assert tasks_told(store) == ["watch", "prune"]
    stopped(store, state(4))
    assert tasks_told(store) == []


def test_one_that_was_killed_says_it_in_its_sign_and_in_its_record_once_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cutline.snapshots.operations.cancelling.ANSWER_SECONDS_MAX", 0.0)
    store = memory()
    stopped(store, state(1, PRUNE))
    killed = signed(store, state(2, INCREMENT))
    assert tasks_told(store) == ["increment"]
    one = read_one(store, killed)
    assert one is not None
    forget(store, one, Silent())
    assert read_one(store, killed) is None
    assert tasks_told(store) == ["increment"]
    # One that is forgotten later has not told it later.
    earlier = signed(store, state(0, PRUNE))
    one = read_one(store, earlier)
    assert one is not None
    forget(store, one, Silent())
    assert tasks_told(store) == ["increment"]


def test_one_that_stands_by_tells_the_end_itself() -> None:
    store = memory()
    stopped(store, state(1, PRUNE))
    now = datetime.now(UTC)
    signed(store, state(2, TaskKind.WATCH, had_turn=False), seen_at=now)
    assert tasks_told(store) == ["prune"]
    # It had the turn until now: it is suspended, or waits for a node.
    signed(store, state(3, INCREMENT), seen_at=now)
    assert tasks_told(store) == ["increment"]


def test_tasks_that_are_never_done_here_and_unknown_ones_are_passed_over() -> None:
    told = state(1, INCREMENT, PRUNE, TaskKind.CHECK, TaskKind.DRILL, TaskKind.FILE).failing
    tasks = {kind: Task(kind, 60.0) for kind in (INCREMENT, TaskKind.CHECK)} | {PRUNE: Task(PRUNE, 0.0)}
    # By its last outcome.
    tasks[TaskKind.DRILL] = Task(TaskKind.DRILL, 60.0, problem="the drill failed")
    of_watch = adopt_failures([*told, structs.replace(told[0], task="\x1b[2J")], tasks)
    assert {kind for kind, one in tasks.items() if one.failing_since} == {INCREMENT, TaskKind.CHECK}
    assert list(of_watch) == [TaskKind.FILE]
    assert tasks[INCREMENT].due_at(NOW, NOW) == NOW


def test_the_next_watch_tells_that_it_works_again(watched: Watched) -> None:
    watched.does[INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(INCREMENT)
    watcher = watched.watcher
    watcher.had_turn = True
    store = watcher.source.open_store()
    assert isinstance(store, InMemoryStore)
    stopped(store, watcher.state())
    for kind, one in watcher.tasks.items():
        watcher.tasks[kind] = Task(one.kind, one.interval_seconds)
    watcher.had_turn = False
    watcher.begin()
    assert watcher.tasks[INCREMENT].problem == "node a is away"
    watched.run(INCREMENT)
    watched.does[INCREMENT] = works
    for _ in range(2):
        watched.run(INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


def test_the_next_watch_tells_that_a_chain_need_not_be_ended_any_more(watched: Watched) -> None:
    store = watched.watcher.source.open_store()
    assert isinstance(store, InMemoryStore)
    stopped(store, state(1, TaskKind.REPLACE))
    watched.watcher.begin()
    assert watched.notices() == [("recovered", "replace")]


def test_a_watch_that_begins_anew_adopts_nothing_twice(watched: Watched) -> None:
    watcher = watched.watcher
    store = watcher.source.open_store()
    assert isinstance(store, InMemoryStore)
    stopped(store, state(1, INCREMENT))
    watcher.begin()
    watcher.had_turn = True
    watched.does[INCREMENT] = works
    watched.run(INCREMENT)
    # The nodes of the file have changed, or its session was lost.
    watcher.begin()
    watched.run(INCREMENT)
    # Its own former session was in its way: nobody else has told anything since.
    watcher.hand_over()
    watcher.begin()
    watched.run(INCREMENT)
    assert watched.notices() == [("recovered", "increment")]


def test_a_watch_that_has_its_turn_again_knows_what_it_had_told(watched: Watched) -> None:
    watcher = watched.watcher
    watcher.had_turn = True
    watched.does[INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(INCREMENT)
    watcher.hand_over()
    watcher.begin()
    watched.does[INCREMENT] = works
    watched.run(INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


def test_what_kept_an_earlier_watch_from_working_is_over_once_one_works(watched: Watched) -> None:
    watcher = watched.watcher
    store = watcher.source.open_store()
    assert isinstance(store, InMemoryStore)
    stopped(store, state(1, TaskKind.WATCH, TaskKind.FILE, had_turn=False))
    watcher.begin()
    watcher.notices.waits(None)
    watcher.notices.refuses_file(None)
    watcher.notices.waits(None)
    assert watched.notices() == [("recovered", "watch"), ("recovered", "fleet-file")]


def test_whoever_hands_over_has_nothing_failing_any_more(watched: Watched) -> None:
    watched.does[INCREMENT] = fails(UnreachableError("node a is away"))
    watched.run(INCREMENT)
    # As it knows it from when it had the turn.
    assert watched.watcher.state().failing == ()
    watched.watcher.had_turn = True
    assert [one.task for one in watched.watcher.state().failing] == ["increment"]
    watched.watcher.hand_over()
    assert watched.watcher.state().failing == ()
    assert not watched.watcher.state().had_turn
