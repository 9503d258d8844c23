"""What a watch that stands by tells of the one that works."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from cutline.cli.watch import turn
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.turn import SilentWatch, SilentWatchError
from cutline.fleet.record import Time
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.records.operation_records import WatchState
from cutline.storage.errors import BusyError, RefusedError, UnreachableError
from cutline.storage.ids import new_operation_id
from tests.unit.document_kinds import SIGN
from tests.unit.watched import OWN, new_watched, stand_by


def busy(node: str, process: int) -> BusyError:
    details = {"user": "ops", "host": "db7", "process": process, "session": 4711, "node": node}
    return BusyError(f"node {node}: another operation is running", details=details)


def test_only_another_process_makes_it_another_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = cast(FleetSource, None), 0

    def find(_: FleetSource, error: BusyError) -> SilentWatchError:
        nonlocal asked
        asked += 1
        return SilentWatchError("it hangs", details=error.details)

    monkeypatch.setattr(turn, "_find", find)
    looks = SilentWatch()
    first = looks.find(source, busy("s1", 7))
    assert first is not None
    assert looks.find(source, busy("s2", 7)) is first
    # It is not looked at again so soon.
    assert looks.find(source, busy("s2", 8)) is None
    assert asked == 1


@pytest.mark.parametrize(
    ("has_turn", "ago_seconds", "is_own", "told"),
    [
        (True, 0, False, []),
        # Nobody else tells it.
        (False, 0, False, [("failed", "watch")]),
        (True, 3600, False, [("failed", "watch")]),
        (True, 0, True, [("failed", "watch")]),
    ],
)
def test_a_node_that_is_away_is_told_by_the_watch_that_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_turn: bool,  # noqa: FBT001  # of a table
    ago_seconds: int,
    is_own: bool,  # noqa: FBT001  # of a table
    told: list[tuple[str, str]],
) -> None:
    watched, now = new_watched(tmp_path, monkeypatch), datetime.now(UTC)
    seen_at = Time.of(now - timedelta(seconds=ago_seconds))
    operation = OWN if is_own else new_operation_id(now)
    sign = structs.replace(SIGN, operation=operation, kind="watch", seen_at=seen_at)
    store = watched.watcher.source.fleet.store.open()
    store_sign(store, structs.replace(sign, watch=WatchState(seen_at, has_turn, ())), 1)
    watched.watcher.had_turn = True
    stand_by(watched, monkeypatch, [UnreachableError("node a is away"), KeyboardInterrupt()])
    # Else each of two watches could take the other for the one that works.
    assert watched.watcher.had_turn == bool(told)
    assert watched.notices() == told
    assert "waiting: node a is away" in watched.said


@pytest.mark.parametrize("is_another_at_work", [True, False])
def test_what_is_wrong_with_the_file_is_told_by_the_watch_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_another_at_work: bool
) -> None:
    watched = new_watched(tmp_path, monkeypatch)
    other = BusyError("another watch is active") if is_another_at_work else UnreachableError("the store is away")
    answers: list[BaseException] = [other, other, KeyboardInterrupt()]

    def reload(source: FleetSource, _: object) -> bool:
        # At the start the file is right.
        source.problem = RefusedError("fleet.toml is wrong") if len(answers) < 3 else None
        return False

    monkeypatch.setattr(FleetSource, "reload", reload)
    monkeypatch.setattr(SilentWatch, "find", lambda *_: None)
    stand_by(watched, monkeypatch, answers)
    assert (("failed", "fleet-file") in watched.notices()) == (not is_another_at_work)
