"""What is read of snapshots again and again: listings of those that have not changed, and all that has changed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from msgspec import structs

import cutline.snapshots.listing.metrics_gathering as module
from cutline.fleet.config import Fleet
from cutline.snapshots.listing.metrics_gathering import EntryReader, read_facts
from cutline.snapshots.operations.committing import decide
from cutline.snapshots.operations.ended_operations import EndedReader
from cutline.snapshots.operations.operation import begin, current_time, new_operation, record_outcome
from cutline.snapshots.records.end_marks import EndMark, mark_end
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.tombstones import DELETED, ONLY_FULL, Mark, put_mark
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from tests.unit.made_chains import FLEET
from tests.unit.made_fleets import new_fleet, store_chain

LISTINGS = ("list", "list_children", "inventory")
REQUESTS = (*LISTINGS, "read", "read_range", "size", "digest", "exists")
HOURS = [f"2026-11-20T{hour:02d}:00:00Z" for hour in range(4)]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the requests to stores in memory by method; one that makes others is one."""
    counts: Counter[str] = Counter()
    inside = threading.local()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*words: Any) -> Any:
            if getattr(inside, "is_one", False):
                return original(*words)
            inside.is_one = True
            counts[name] += 1
            try:
                return original(*words)
            finally:
                inside.is_one = False

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in REQUESTS:
            patch.setattr(InMemoryStore, name, counted(name, getattr(InMemoryStore, name)))
        yield counts


def fleet_with(snapshots: int) -> Fleet:
    """Snapshots of three increments each, and one operation that has failed."""
    fleet = new_fleet(FLEET)
    for number in range(snapshots):
        store_chain(fleet, f"n{number}", *HOURS)
    failed = new_operation("restore", "n0", 0, ("a",))
    begin(fleet.store.open(), failed)
    record_outcome(fleet.store.open(), failed, "failed")
    return fleet


@pytest.mark.parametrize("snapshots", [1, 4, 20])
def test_a_second_gathering_reads_one_object_and_lists_each_snapshot_twice(snapshots: int) -> None:
    fleet = fleet_with(snapshots)
    ended, reader = EndedReader(100), EntryReader()
    first = read_facts(fleet, ended, reader)
    with counting() as counts:
        second = read_facts(fleet, ended, reader)
    assert second == first
    assert len(second.entries) == snapshots
    # Whose store it is; then tombstones, names and operations, and of each snapshot its files and its increments.
    assert counts == {"read_range": 1, "list_children": 2 + snapshots, "inventory": 1 + snapshots}


def test_another_increment_lets_its_snapshot_be_read_and_no_other() -> None:
    costs = []
    for snapshots in (2, 20):
        fleet = fleet_with(snapshots)
        store, key = fleet.store.open(), commit_key("n1", 3)
        body = store.read(key)
        store.delete(key)
        reader = EntryReader()
        before = reader.read(store, fleet)
        store.create(key, body)
        with counting() as counts:
            after = reader.read(store, fleet)
        assert [len(one.summaries) for one in (before[1], after[1])] == [2, 3]
        assert before[:1] + before[2:] == after[:1] + after[2:]
        costs.append(sum(count for name, count in counts.items() if name not in LISTINGS))
    assert costs[0] == costs[1]


def a_mark(mark: str) -> Mark:
    return Mark(mark, "n1", "op-n1-0", current_time(), "cutline test", "op-n1-0", (), (), (), 0, 0)


def end_chain(store: ObjectStore, chain: str) -> None:
    mark_end(store, EndMark("n1", chain, 3, "a", current_time()))


def damage(store: ObjectStore, number: int) -> None:
    key = commit_key("n1", number)
    body = store.read(key)
    store.delete(key)
    store.create(key, body.replace(b"n1", b"nX", 1) + b" ")


CHANGES: dict[str, Callable[[ObjectStore], object]] = {
    "deleted": lambda store: put_mark(store, a_mark(DELETED)),
    "pruned": lambda store: put_mark(store, a_mark(ONLY_FULL)),
    "ended": lambda store: end_chain(store, "op-n1-0"),
    "a commit is gone": lambda store: store.delete(commit_key("n1", 2)),
    "the newest commit is gone": lambda store: store.delete(commit_key("n1", 3)),
    "the full commit is gone": lambda store: store.delete(commit_key("n1", 0)),
    "an increment is damaged": lambda store: damage(store, 3),
    "a void follows": lambda store: decide(store, new_operation("create", "n1", 4, ("a",))),
    "what is no tombstone": lambda store: store.create("deleted/n1.json", b"{}"),
    "what is no mark": lambda store: store.create("snapshots/n1/only-full.json", b"{}"),
    "another snapshot": lambda store: store.create(commit_key("n9", 0), b"{}"),
    "a name without a commit": lambda store: store.create("snapshots/n9/base/a/op/part-0.parquet", b"rows"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_noticed(change: Callable[[ObjectStore], object]) -> None:
    fleet = fleet_with(3)
    store, reader = fleet.store.open(), EntryReader()
    reader.read(store, fleet)
    change(store)
    expected = EntryReader().read(store, fleet)
    assert reader.read(store, fleet) == expected
    assert reader.read(store, fleet) == expected


def test_what_is_corrected_in_its_place_is_noticed() -> None:
    fleet = fleet_with(3)
    store, reader, key = fleet.store.open(), EntryReader(), commit_key("n1", 0)
    sound, body = EntryReader().read(store, fleet), store.read(key)
    store.delete(key)
    store.create(key, b"{" + body[1:].replace(b'"n1"', b'"nX"'))
    assert [one.state for one in reader.read(store, fleet)] == ["complete", "broken", "complete"]
    store.delete(key)
    store.create(key, body)
    assert reader.read(store, fleet) == sound


def test_the_mark_of_another_chain_of_the_name_hides_none_of_its_own() -> None:
    fleet = fleet_with(2)
    store, reader = fleet.store.open(), EntryReader()
    end_chain(store, "another")
    assert [one.state for one in reader.read(store, fleet)] == ["complete", "complete"]
    end_chain(store, "op-n1-0")
    assert [one.state for one in reader.read(store, fleet)] == ["complete", "ended"]


def test_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MAX", 2)
    fleet = new_fleet(FLEET)
    for number in range(1, 6):
        store_chain(fleet, f"n{number}", f"2026-11-{number:02d}T00:00:00Z")
    store, reader = fleet.store.open(), EntryReader()
    first = reader.read(store, fleet)
    assert set(reader._known) == {"n4", "n5"}
    assert reader.read(store, fleet) == first
    # A snapshot that is gone is not kept.
    put_mark(store, structs.replace(a_mark(DELETED), snapshot="n5"))
    for key in store.list("snapshots/n5"):
        store.delete(key)
    assert [one.name for one in reader.read(store, fleet)] == ["n1", "n2", "n3", "n4"]
    assert set(reader._known) == {"n3", "n4"}
