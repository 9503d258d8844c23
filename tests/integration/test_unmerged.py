"""A chain that nothing ever merges or ends is warned of: its restore points are kept for ever."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cutline.cli.watch.tasks import take_increment
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Interval, Retention, WatchTable, load_fleet
from cutline.snapshots.listing import listing, unmerged
from cutline.snapshots.listing.listing import list_store
from cutline.storage.clock import utc_now
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import run_command
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

NAME = "daily"
WEEKLY, NEVER = Interval.parse("weekly"), Interval.parse("never")
ENDED = [
    {"retention": Retention(merge_seconds=WEEKLY)},
    {"watch": WatchTable(every=Interval.parse("5min"), full=WEEKLY)},
]


def test_a_chain_that_grows_for_ever_is_warned_of(
    shared_fleet: EmbeddedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_database(shared_fleet, tmp_path, "unmerged") as described:
        execute(described.nodes[0].dsn, "CREATE TABLE item (id int PRIMARY KEY)")
        assert run_command(described, "init")[0] == 0
        code, full = run_command(described, "create", NAME)
        assert code == 0, full
        fleet = load_fleet(described.path)
        assert increment_notes(fleet) == list_store(fleet).warnings == []

        # More than 400 days later.
        began = datetime.fromisoformat(full["cut_at"])
        move_clock(monkeypatch, timedelta(days=401))
        expected = (
            f"snapshot {NAME} has {{}} restore points since {began:%Y-%m-%d} that no rule gives up, because only what"
            ' lies before a merge can be given up; let a watch merge the chain (merge = "monthly" under [retention]),'
            f" or run: snapshot merge {NAME}"
        )
        assert list_store(fleet).warnings == [expected.format(2)]
        assert run_here(described, "list")[1]["warnings"] == [expected.format(2)]
        assert increment_notes(fleet) == [expected.format(2)]
        for ended in ENDED:
            assert list_store(replace(fleet, **ended)).warnings == []
        never = replace(fleet, watch=WatchTable(every=Interval.parse("5min"), full=NEVER))
        assert list_store(never).warnings == [expected.format(3)]

        # Few days, but many restore points.
        move_clock(monkeypatch, timedelta(days=2))
        assert list_store(fleet).warnings == []
        monkeypatch.setattr(unmerged, "POINTS_MAX", 2)
        assert list_store(fleet).warnings == [expected.format(3)]

        # Only the first increment of a day warns.
        move_clock(monkeypatch, timedelta(0))
        assert list_store(fleet).warnings == [expected.format(3)]
        assert increment_notes(fleet) == []

        # After a merge, they count from there.
        assert run_command(described, "merge", NAME)[0] == 0
        assert list_store(fleet).warnings == []
        assert increment_notes(fleet) == []


def increment_notes(fleet: Fleet) -> list[str]:
    """Take an increment as a watch does; return the notes that it logs."""
    notes: list[str] = []
    take_increment(fleet, NAME, [].append, notes.append)
    return notes


def move_clock(monkeypatch: pytest.MonkeyPatch, later: timedelta) -> None:
    for module in (unmerged, listing):
        monkeypatch.setattr(module, "utc_now", lambda: utc_now() + later)
