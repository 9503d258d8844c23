"""A watch whose tasks are done here, on a store with made chains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

import cutline.cli.commands.watch as command
import cutline.cli.watch.watcher as module
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.notices import Notices
from cutline.cli.watch.schedule import TaskKind
from cutline.cli.watch.tasks import TaskResult
from cutline.cli.watch.turn import Turn
from cutline.cli.watch.watcher import Watcher
from cutline.fleet.config import NEVER, WatchTable
from cutline.fleet.progress import Silent
from cutline.fleet.units import Interval
from cutline.snapshots.operations.activity import Activity
from cutline.snapshots.records.operation_records import WatchState
from cutline.storage.errors import ChainEnd, RefusedError, SnapshotError
from tests.unit.made_fleets import new_fleet, store_chain

NAME = "watch-2026-11-24-010000"
APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
OWN = "20261124T000000Z-0000000000"
SECONDS_MAX = 30


class Unseen(Silent):
    """An activity that nobody sees."""

    def watches(self, state: WatchState) -> None:
        """Pass it over."""


@dataclass
class Watched:
    """A watch that has begun, what it has said, with hints, and what its tasks do: what is at their kind is called."""

    watcher: Watcher
    said: list[str]
    events: Path
    hints: list[str]
    does: dict[TaskKind, Callable[[], TaskResult]] = field(default_factory=dict)

    def run(self, kind: TaskKind) -> None:
        """Do the task now, whenever it is due."""
        self.watcher._do(self.watcher.tasks[kind])

    def seconds_to(self, kind: TaskKind) -> float:
        """How long the task waits for its next attempt, from now on."""
        at = self.watcher.tasks[kind].retry_at
        assert at is not None
        return (at - module.utc_now()).total_seconds()

    def notices(self) -> list[tuple[str, str]]:
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return [(one["event"], one["task"]) for one in map(json.loads, lines)]


def new_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A watch that has begun; its tasks do what `does` says."""
    rules = WatchTable(every=Interval(60), check=NEVER)
    notify = (sys.executable, "-c", APPEND, str(tmp_path / "events"))
    fleet = replace(new_fleet(), watch=rules, notify=notify)
    store_chain(fleet, NAME, "2026-11-24T01:00:00Z")
    said, hints = list[str](), list[str]()

    def say(text: str, **more: object) -> None:
        said.append(text)
        hints.append(str(more.get("hint", "")))

    source = FleetSource(tmp_path / "fleet.toml", fleet, b"", b"")
    watcher = Watcher(source, cast(Activity, Unseen()), OWN, say, Notices(source, say))
    watcher.begin()
    found = Watched(watcher, said, tmp_path / "events", hints)

    def run(_: Watcher, kind: TaskKind, __: str) -> TaskResult:
        return found.does[kind]()

    monkeypatch.setattr(module.Watcher, "_run", run)
    return found


def fails(error: BaseException) -> Callable[[], TaskResult]:
    def fail() -> TaskResult:
        raise error

    return fail


def works() -> TaskResult:
    return TaskResult("done")


def ending(ends_chain: ChainEnd) -> SnapshotError:
    return RefusedError("the slot is gone", hint="as any hint is worded", ends_chain=ends_chain)


def follow(watched: Watched, **rules: Any) -> None:
    """Give the watch other rules."""
    source = watched.watcher.source
    source.fleet = replace(source.fleet, watch=WatchTable(**({"every": Interval(60), "check": NEVER} | rules)))
    watched.watcher.plan()
    watched.watcher.following.rules_changed()


def stand_by(watched: Watched, monkeypatch: pytest.MonkeyPatch, answers: list[BaseException]) -> None:
    """Let the watch ask for its turn until the last of the answers, which interrupts it."""

    @contextmanager
    def take_turn(*_: object) -> Iterator[Turn]:
        raise answers.pop(0)
        yield

    monkeypatch.setattr(command, "take_turn", take_turn)
    monkeypatch.setattr(command, "STAND_BY_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        command.run_watch(watched.watcher)
