"""Commands that meet: the beginning of a chain is given up or its increments go, and a slot stays whose owner lives."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs

from cutline.cli.commands.prune import plan_document
from cutline.fleet.config import Retention
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.restore.plan.copies import standbys_of
from cutline.snapshots.operations.leases import hold_lease
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.operations.removed_chains import BeginningGivenUpError
from cutline.snapshots.operations.settling import _read_chain_slot
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.proven_chains import commit_key, read_continued, read_full
from cutline.snapshots.records.tombstones import is_only_full
from cutline.snapshots.removal.earlier_objects import DropPlan, drop_earlier_objects
from cutline.snapshots.removal.pruning import plan_prune
from cutline.storage.errors import SnapshotError
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import Inventory, ObjectStore
from cutline.wal.drain.slots import slot_name
from tests.unit.made_chains import FLEET
from tests.unit.made_commits import full_commit
from tests.unit.made_deletions import prune
from tests.unit.made_garbage import StoreBuilder
from tests.unit.test_pins import MeetingStore, new_store


def give_up(store: ObjectStore) -> None:
    """Give up what lies before increment 2, as if the chain had a merge there."""
    plan = DropPlan("old", 2, read_full(store, "old").operation, "digest", (0, 1), ())
    drop_earlier_objects(store, plan, Silent())


def meet_at(number: int, *, first: str) -> tuple[InMemoryStore, bool]:
    """Run one removal, and the other before a call of it; also return whether there was such a call."""
    store, nodes = new_store()
    met: list[bool] = []

    def run(removal: str, where: Any) -> None:
        with suppress(SnapshotError):
            if removal == "give up":
                give_up(where)
            else:
                prune(where, nodes, last=1, only_full="all")

    def meet(call: int) -> None:
        if call == number:
            met.append(True)
            run("prune" if first == "give up" else "give up", store)

    run(first, MeetingStore(store, meet))
    return store, bool(met)


@pytest.mark.parametrize("first", ["give up", "prune"])
def test_the_full_snapshot_and_the_increments_never_both_go(first: str) -> None:
    number, marks = 0, set[tuple[bool, bool]]()
    while True:
        number += 1
        store, has_met = meet_at(number, first=first)
        marks.add((is_only_full(store, "old"), first_increment(store, "old") == 2))
        if not has_met:
            break
    assert number > 10
    assert (True, True) not in marks
    assert {(True, False), (False, True)} <= marks


def test_prune_names_a_chain_for_which_nodes_keep_wal_because_it_cannot_be_reduced() -> None:
    store, _ = new_store()
    give_up(store)
    plan = plan_prune(store, FLEET, Retention(last=1, only_full=8), force=False)
    (warning,) = plan_document(plan)["warnings"]
    assert warning.startswith("nodes keep WAL for old,")
    assert warning.endswith(": snapshot end old")
    assert plan_prune(store, FLEET, Retention(last=2), force=False).warnings == []


def test_a_dead_increment_leaves_the_slots_of_the_one_that_was_committed_in_its_place() -> None:
    store, _ = new_store()
    chain = read_full(store, "old").operation
    committed, next_one = (
        structs.replace(new_operation("create", "old", number, ("a",)), renews={"a": "7/5"}) for number in (2, 3)
    )
    assert _read_chain_slot(store, committed) == ""
    assert _read_chain_slot(store, next_one) == slot_name(chain)


def test_rows_are_not_borrowed_from_a_copy_that_began_later() -> None:
    full = full_commit(position=100)
    for base, expected in ((100, ["b"]), (101, [])):
        assert standbys_of(Chain(structs.replace(full, base={**full.base, "b": Lsn(base)})), "a") == expected


def test_an_increment_does_not_list_those_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StoreBuilder()
    made.take_full("old")
    for _ in range(3):
        made.take_increment("old")
    listed, inventory = list[str](), InMemoryStore.inventory

    def noted(self: InMemoryStore, prefix: str, after: str = "") -> Inventory:
        found = inventory(self, prefix, after)
        listed.extend(one.key for one in found)
        return found

    before = read_continued(made.store, "old")
    assert (before.last.increment, before.is_partial) == (3, True)
    give_up(made.store)
    monkeypatch.setattr(InMemoryStore, "inventory", noted)
    assert read_continued(made.store, "old") == before
    assert {*listed} == {commit_key("old", 2), commit_key("old", 3)}


@pytest.mark.parametrize("begins_at", [0, 1])
def test_a_restore_that_was_planned_before_what_it_reads_was_given_up_says_so(begins_at: int) -> None:
    store, _ = new_store()
    give_up(store)
    with (
        pytest.raises(BeginningGivenUpError),
        hold_lease(store, new_operation("restore", "old", 3, ("a",)), Silent(), begins_at),
    ):
        pytest.fail("it has begun to read")
    with hold_lease(store, new_operation("restore", "old", 3, ("a",)), Silent(), 2) as held:
        assert held.is_stored
