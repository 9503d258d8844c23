"""`check --newest` checks the newest snapshot, and any newer one that has been lost."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from cutline.check import verify
from cutline.check.primaries import check_primaries
from cutline.check.report import Conflict
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.listing.name_templates import find_newest
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.store_identity import ensure_identity, read_identity
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from tests.unit.document_kinds import FLEET
from tests.unit.made_fleets import new_fleet, store_chain
from tests.unit.made_garbage import StoreBuilder


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "store").mkdir()
    fleet = replace(FLEET, store=StoreLocation(f"file://{tmp_path}/store"))
    ensure_identity(fleet.store.open(), fleet)
    return fleet


def checked(fleet: Fleet) -> list[str]:
    request = CheckRequest(newest=True, metadata_only=True)
    return [one.name for one in check_snapshots(fleet, request, cast("Any", None), Silent()).snapshots]


def test_only_the_newest_is_checked_unless_a_newer_one_is_lost(fleet: Fleet) -> None:
    made = StoreBuilder(fleet.store.open())
    assert find_newest(made.store) == (None, ())
    assert checked(fleet) == []
    # Their cuts are made at the same time, and of these the first by name is taken for the newest.
    made.take_full("daily")
    made.take_full("weekly")
    assert checked(fleet) == ["daily"]
    made.store.delete(commit_key("weekly", 0))
    assert checked(fleet) == ["daily", "weekly"]


def test_a_snapshot_that_can_not_be_read_may_be_the_newest(fleet: Fleet, tmp_path: Path) -> None:
    made = StoreBuilder(fleet.store.open())
    made.take_full("daily")
    made.take_full("weekly")
    store = LocalStore(tmp_path / "store")
    store.delete(commit_key("weekly", 0))
    store.create(commit_key("weekly", 0), b"{" * 1000)
    newest = find_newest(store)
    assert (newest.full and newest.full.snapshot, newest.unread) == ("daily", ("weekly",))
    request = CheckRequest(newest=True, metadata_only=True)
    report = check_snapshots(fleet, request, cast("Any", None), Silent())
    assert [one.name for one in report.snapshots] == ["daily", "weekly"]
    broken = ("commit", commit_key("weekly", 0))
    assert [broken in [(one.kind, one.object) for one in each.conflicts] for each in report.snapshots] == [False, True]
    assert report.exit_code == 1


def test_a_cut_in_the_future_is_not_the_newest() -> None:
    fleet = new_fleet()
    for name, at in (
        ("ahead", "2098-01-01T00:00:00Z"),
        ("daily", "2026-11-20T00:00:00Z"),
        ("old", "2026-11-19T00:00:00Z"),
    ):
        store_chain(fleet, name, at)
    newest = find_newest(fleet.store.open())
    assert newest.full is not None
    assert newest.full.snapshot == "daily"


def test_a_check_of_all_does_not_hold_their_commits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StoreBuilder(fleet.store.open())
    for number in range(4):
        made.take_full(f"daily-{number}")
    held: list[int] = []

    def count(*given: Any) -> list[Conflict]:
        gc.collect()
        held.append(sum(isinstance(one, FullSnapshot) for one in gc.get_objects()) - before)
        return check_primaries(*given)

    identity = structs.replace(read_identity(made.store, fleet), fleet_id="fleet")
    monkeypatch.setattr(verify, "read_identity", lambda *_: identity)
    monkeypatch.setattr(verify, "check_primaries", count)
    gc.collect()
    before = sum(isinstance(one, FullSnapshot) for one in gc.get_objects())
    report = check_snapshots(fleet, CheckRequest(metadata_only=True), cast("Any", None), Silent())
    assert len(report.snapshots) == 4
    # At most that of the last.
    assert held[0] <= 1
