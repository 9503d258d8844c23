"""Which chain `watch` continues, and which ones it ends."""

from __future__ import annotations

from datetime import datetime

import pytest

import cutline.cli.watch.following as module
from cutline.cli.watch.following import find_chain, find_others, matching_names
from cutline.fleet.config import Fleet
from cutline.snapshots.records.end_marks import EndMark, mark_end
from cutline.snapshots.records.proven_chains import read_full
from tests.unit.made_fleets import new_fleet, store_chain

TEMPLATE = "watch-{date}-{n}"
MONDAY, TUESDAY, WEDNESDAY = (f"2026-11-{day}T01:00:00Z" for day in (23, 24, 25))


def said(text: str, **_: object) -> None:
    """What is logged does not matter here."""


def end(fleet: Fleet, name: str) -> None:
    """Mark the chain of this snapshot as ended."""
    store = fleet.store.open()
    chain = read_full(store, name).chain
    mark_end(store, EndMark(name, chain, 0, "", WEDNESDAY, successor="next"))


def test_only_names_that_the_template_can_have_made_count_in_its_order() -> None:
    fleet = new_fleet()
    for name in ("watch-2026-11-23-10", "watch-2026-11-23-9", "nightly", "watch-2026-11-23-9b"):
        store_chain(fleet, name, MONDAY)
    assert matching_names(fleet.store.open(), TEMPLATE) == ("watch-2026-11-23-9", "watch-2026-11-23-10")


def test_the_newest_is_continued_and_older_ones_that_go_on_are_replaced() -> None:
    fleet = new_fleet()
    store_chain(fleet, "watch-2026-11-23-1", MONDAY)
    store_chain(fleet, "watch-2026-11-24-1", TUESDAY)
    store_chain(fleet, "watch-2026-11-25-1", WEDNESDAY, WEDNESDAY)
    end(fleet, "watch-2026-11-23-1")
    found = find_chain(fleet.store.open(), matching_names(fleet.store.open(), TEMPLATE), said)
    assert found is not None
    assert (found.name, found.goes_on, found.replaced) == ("watch-2026-11-25-1", True, ("watch-2026-11-24-1",))
    # The cut was made a second after the command began.
    assert found.began_at == datetime.fromisoformat("2026-11-25T01:00:01+00:00")


def test_a_name_of_a_time_that_has_not_come_yet_is_not_the_newest() -> None:
    fleet = new_fleet()
    store_chain(fleet, "watch-2099-01-01-1", MONDAY)
    store_chain(fleet, "watch-2026-11-24-1", TUESDAY)
    found = find_chain(fleet.store.open(), matching_names(fleet.store.open(), TEMPLATE), said)
    assert found is not None
    assert (found.name, found.replaced) == ("watch-2026-11-24-1", ("watch-2099-01-01-1",))


def test_a_snapshot_whose_cut_is_in_the_future_is_replaced_by_one_with_the_right_time() -> None:
    """No increment follows it until then, so a full snapshot begins a new chain, which must be continued."""
    fleet = new_fleet()
    store_chain(fleet, "watch-2098-01-01-1", "2098-01-01T01:00:00Z")
    asked: list[datetime] = []

    def now() -> datetime:
        asked.append(datetime.fromisoformat(WEDNESDAY))
        return asked[-1]

    store = fleet.store.open()
    found = find_chain(store, matching_names(store, TEMPLATE), said, now)
    assert found is not None
    assert (found.name, asked) == ("watch-2098-01-01-1", [])
    for name, at in (("watch-2026-11-23-1", MONDAY), ("watch-2026-11-24-1", TUESDAY)):
        store_chain(fleet, name, at)
    found = find_chain(store, matching_names(store, TEMPLATE), said, now)
    assert found is not None
    assert (found.name, found.replaced) == ("watch-2026-11-24-1", ("watch-2098-01-01-1", "watch-2026-11-23-1"))
    # The clocks may be right, and this machine's behind.
    found = find_chain(
        store, matching_names(store, TEMPLATE), said, lambda: datetime.fromisoformat("2099-01-01T00:00Z")
    )
    assert found is not None
    assert found.name == "watch-2098-01-01-1"


def test_a_chain_that_has_ended_gets_no_increments_and_says_why() -> None:
    fleet = new_fleet()
    store_chain(fleet, "watch-2026-11-23-1", MONDAY)
    end(fleet, "watch-2026-11-23-1")
    found = find_chain(fleet.store.open(), matching_names(fleet.store.open(), TEMPLATE), said)
    assert found is not None
    assert not found.goes_on
    assert found.ended == "its chain has ended"


def test_without_a_snapshot_there_is_no_chain() -> None:
    fleet = new_fleet()
    assert find_chain(fleet.store.open(), matching_names(fleet.store.open(), TEMPLATE), said) is None


def test_a_damaged_snapshot_is_passed_over_and_said() -> None:
    fleet, log = new_fleet(), list[str]()
    store_chain(fleet, "watch-2026-11-23-1", MONDAY)
    store_chain(fleet, "watch-2026-11-24-1", TUESDAY)
    store_chain(fleet, "watch-2026-11-25-1", WEDNESDAY)
    for name in ("watch-2026-11-23-1", "watch-2026-11-25-1"):
        replace_object(fleet, f"snapshots/{name}/snapshot.json")
    found = find_chain(
        fleet.store.open(), matching_names(fleet.store.open(), TEMPLATE), lambda text, **_: log.append(text)
    )
    assert found is not None
    assert (found.name, found.goes_on, found.replaced) == ("watch-2026-11-24-1", True, ())
    assert [text.partition(" is skipped: ")[0] for text in log] == [
        "snapshot watch-2026-11-23-1", "snapshot watch-2026-11-25-1",
    ]  # fmt: skip


def test_a_chain_whose_last_increment_is_damaged_gets_no_others() -> None:
    fleet = new_fleet()
    store_chain(fleet, "watch-2026-11-24-1", MONDAY, TUESDAY)
    folder = "snapshots/watch-2026-11-24-1/increments"
    (last,) = fleet.store.open().list_children(folder)
    replace_object(fleet, f"{folder}/{last}")
    found = find_chain(fleet.store.open(), matching_names(fleet.store.open(), TEMPLATE), said)
    assert found is not None
    assert (found.name, found.goes_on) == ("watch-2026-11-24-1", False)
    assert found.last_at == found.began_at


def test_a_damaged_mark_of_an_end_ends_that_chain_alone() -> None:
    """A mark that can't be read is one: its chain gets no increments, and others are found."""
    fleet = new_fleet()
    for name, day in (("watch-2026-11-23-1", MONDAY), ("watch-2026-11-24-1", TUESDAY), ("nightly", MONDAY)):
        store_chain(fleet, name, day)
    store = fleet.store.open()
    for name in ("watch-2026-11-23-1", "nightly"):
        end(fleet, name)
    for key in [one.key for one in store.inventory("snapshots") if "/ended/" in one.key]:
        replace_object(fleet, key)
    names = matching_names(fleet.store.open(), TEMPLATE)
    found = find_chain(fleet.store.open(), names, said)
    assert found is not None
    assert (found.name, found.goes_on, found.replaced) == ("watch-2026-11-24-1", True, ())
    assert find_others(fleet.store.open(), names, said) == ()
    end(fleet, "watch-2026-11-24-1")
    for key in [one.key for one in store.inventory("snapshots") if "/ended/" in one.key]:
        replace_object(fleet, key)
    found = find_chain(fleet.store.open(), names, said)
    assert found is not None
    assert not found.goes_on


def test_a_snapshot_that_is_deleted_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = new_fleet()
    store_chain(fleet, "watch-2026-11-24-1", MONDAY)
    names = matching_names(fleet.store.open(), TEMPLATE)
    # As if these had been deleted since the listing.
    monkeypatch.setattr(module, "snapshot_names", lambda _: ["gone", *names])
    assert find_others(fleet.store.open(), names, said) == ()
    found = find_chain(fleet.store.open(), [*names, "watch-2026-11-25-1"], said)
    assert found is not None
    assert found.name == "watch-2026-11-24-1"


def test_other_snapshots_whose_chains_go_on_are_found() -> None:
    fleet, log = new_fleet(), list[str]()
    for name in ("watch-2026-11-24-1", "nightly", "nightly-ended", "nightly-damaged", "by-hand"):
        store_chain(fleet, name, MONDAY)
    end(fleet, "nightly-ended")
    replace_object(fleet, "snapshots/nightly-damaged/snapshot.json")
    names = matching_names(fleet.store.open(), TEMPLATE)
    assert find_others(fleet.store.open(), names, lambda text, **_: log.append(text)) == ("by-hand", "nightly")
    assert [text.partition(" is skipped: ")[0] for text in log] == ["snapshot nightly-damaged"]


def replace_object(fleet: Fleet, key: str) -> None:
    store = fleet.store.open()
    store.delete(key)
    store.create(key, b"{}")
