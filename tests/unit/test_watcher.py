"""What `watch` does after its tasks: with tasks that are done here, on a store with made chains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

import cli.watch.watcher as module
from cli.output import stopping
from cli.watch.fleet_source import FleetSource
from cli.watch.notices import Notices
from cli.watch.schedule import TaskKind
from cli.watch.tasks import TaskResult
from cli.watch.watcher import BUSY_SECONDS, CANCELLED_SECONDS, FINAL_FAILURES, Watcher
from fleet.durations import Interval
from fleet.fleet_file import NEVER, WatchTable
from fleet.hints import NEW_CHAIN
from fleet.progress import Silent
from snapshots.activity.activity import Activity
from snapshots.operations.operation import current_time
from snapshots.records.operation_records import CancelRequest
from storage.errors import BusyError, ChainEnd, RefusedError, SnapshotError, UnreachableError
from tests.unit.made_fleets import new_fleet, store_chain

NAME = "watch-2026-11-24-010000"
APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
OWN = "20261124T000000Z-0000000000"


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
    stopping.forget_requests()
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
