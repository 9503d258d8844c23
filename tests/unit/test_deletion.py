"""Deleting and pruning: wherever it ends, nothing half is listed, and a repeat comes to the same end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import starmap

import pytest
from msgspec import structs

from check.structure import names_to_check
from fleet.config import Retention
from snapshots.operations.operation import begin, new_operation, pending_operations
from snapshots.records.commits import (
    commit_key,
    read_chain,
    snapshot_names,
)
from snapshots.records.tombstones import (
    RestorePoint,
    is_deleted,
    only_full_key,
    read_mark,
    tombstone_key,
)
from snapshots.removal.deletion import (
    LastSnapshotError,
    SnapshotUnreadableError,
    is_finished,
    list_unfinished_deletions,
)
from snapshots.removal.pruning import plan_prune
from storage.memory import InMemoryStore
from storage.store import DeletionRefusedError, ObjectStore
from tests.unit.made_chains import FLEET, HeldNodes, nodes_of, take
from tests.unit.made_commits import memory, own_url
from tests.unit.made_deletions import (
    OLD,
    contents,
    crash_everywhere,
    delete,
    prune,
    two_chains,
)
from wal.slots.slots import slot_name


def test_a_deletion_that_dies_anywhere_is_finished_by_a_repeat() -> None:
    def run(store: ObjectStore, nodes: HeldNodes) -> None:
        if not is_finished(store, "old"):
            delete(store, nodes)

    def check_end(store: InMemoryStore, nodes: HeldNodes, _before: object, others: dict[str, bytes]) -> None:
        assert store.list("snapshots/old") == []
        assert is_finished(store, "old")
        assert list_unfinished_deletions(store) == []
        assert pending_operations(store) == []
        assert read_mark(store, tombstone_key("old")).points == tuple(starmap(RestorePoint, enumerate(OLD)))
        assert contents(store, "new") == others
        assert nodes.slots == nodes_of("op-new-0").slots
        assert nodes.publications
        assert snapshot_names(store) == ["new"]

    assert crash_everywhere(run, check_end) > 20


def test_a_pruning_that_dies_anywhere_is_finished_by_a_repeat() -> None:
    def check_end(store: InMemoryStore, nodes: HeldNodes, before: dict[str, bytes], others: dict[str, bytes]) -> None:
        full = read_chain(store, "old").full
        kept = {commit_key("old", 0), *full.object_sizes}
        expected = {key: body for key, body in before.items() if key in kept}
        assert {key: body for key, body in contents(store, "old").items() if key != only_full_key("old")} == expected
        assert read_chain(store, "old").increments == ()
        assert read_mark(store, only_full_key("old")).points == (RestorePoint(1, OLD[1]), RestorePoint(2, OLD[2]))
        assert contents(store, "new") == others
        assert nodes.slots == nodes_of("op-new-0").slots
        assert pending_operations(store) == []
        assert plan_prune(store, FLEET, Retention(keep_increments=1), force=False).steps == ()

    assert crash_everywhere(lambda store, nodes: prune(store, nodes, keep_increments=1), check_end) > 20


def test_pruning_takes_whole_snapshots_the_oldest_first() -> None:
    store = memory()
    nodes = two_chains(store)
    take(store, "newest", "2020-03-01T00:00:00Z")
    pruned = prune(store, nodes, keep_full=1)
    assert [one.mark.snapshot for one in pruned.removed] == ["old", "new"]
    assert snapshot_names(store) == ["newest"]
    assert nodes.slots == set()
    # Of what the plan says is freed, all was.
    assert [(one.objects, one.bytes) for one in pruned.removed] == [
        (step.mark.objects, step.mark.bytes) for step in pruned.plan.steps
    ]
    assert prune(store, nodes, keep_full=1).removed == ()


def test_a_prune_finishes_what_a_deletion_has_left() -> None:
    store = memory()
    nodes = two_chains(store)
    nodes.away = {"b"}
    delete(store, nodes)
    assert list_unfinished_deletions(store) == ["old"]
    nodes.away = set()
    (removed,) = prune(store, nodes, keep_full=9).removed
    assert (removed.mark.snapshot, removed.is_done) == ("old", True)
    assert is_finished(store, "old")


def test_a_node_that_is_away_keeps_its_slot_and_the_rest_goes() -> None:
    store = memory()
    nodes = two_chains(store)
    nodes.away = {"b"}
    removed = delete(store, nodes).removed
    assert removed is not None
    slot = slot_name("op-old-0")
    assert removed.slots_left == [f"{slot} on b"]
    assert not removed.is_done
    assert store.list("snapshots/old") == []
    assert not is_finished(store, "old")
    nodes.away = set()
    again = delete(store, nodes).removed
    assert again is not None
    assert again.is_done
    assert (slot, "b") not in nodes.slots
    assert pending_operations(store) == []


@dataclass(frozen=True, slots=True)
class Locked(InMemoryStore):
    """A store that keeps some objects for as long as `locked` names them."""

    locked: tuple[str, ...] = ()

    def delete(self, key: str) -> None:
        if any(part in key for part in self.locked):
            raise DeletionRefusedError(url=self.url, key=key, reason="object lock until 2030")
        InMemoryStore.delete(self, key)


@pytest.mark.parametrize("part", ["/base/", "snapshot.json", "/increments/"])
def test_what_the_store_keeps_is_named_object_by_object_and_the_rest_goes(part: str) -> None:
    store = Locked(own_url(), locked=(part,))
    nodes = two_chains(store)
    kept = [key for key in store.list("snapshots/old") if part in key]
    removed = delete(store, nodes).removed
    assert removed is not None
    assert sorted(removed.refused) == kept
    assert all("object lock until 2030" in why for why in removed.refused.values())
    assert store.list("snapshots/old") == kept
    assert snapshot_names(store) == ["new"]
    assert names_to_check(store, {"old": {"op-old-0": 0}}) == ["new"]
    again = delete(replace(store, locked=()), nodes).removed
    assert again is not None
    assert (again.is_done, again.objects) == (True, len(kept))
    assert is_finished(store, "old")
    assert read_mark(store, tombstone_key("old")).operation == removed.operation


def test_the_newest_commit_file_goes_first_and_all_before_any_other_object() -> None:
    gone: list[str] = []

    @dataclass(frozen=True, slots=True)
    class Watched(InMemoryStore):
        def delete(self, key: str) -> None:
            gone.append(key)
            InMemoryStore.delete(self, key)

    store = Watched(own_url())
    delete(store, two_chains(store))
    assert gone[:3] == [commit_key("old", number) for number in (2, 1, 0)]
    assert len(gone) > 3


def test_the_last_snapshot_that_can_be_restored_stays_unless_it_is_asked_for() -> None:
    store = memory()
    nodes = two_chains(store)
    # A snapshot of which an object is gone is none that could be restored instead.
    store.delete("snapshots/new/base/a/op-new-0/part-0.parquet")
    with pytest.raises(LastSnapshotError) as error:
        delete(store, nodes)
    assert error.value.exit_code == 3
    assert not is_deleted(store, "old")
    assert pending_operations(store) == []
    assert delete(store, nodes, force=True).removed is not None
    # What is damaged goes without a word: nothing is lost that could be restored.
    removed = delete(store, nodes, "new").removed
    assert removed is not None
    assert removed.publications == ["a"]
    assert nodes.slots == set()


def test_a_chain_of_which_an_increment_is_damaged_can_be_restored_up_to_there() -> None:
    store = memory()
    nodes = two_chains(store)
    store.delete("snapshots/new/wal/a/op-new-0/00000000000000000002.parquet")
    assert delete(store, nodes).removed is not None
    with pytest.raises(LastSnapshotError):
        delete(store, nodes, "new")


@pytest.mark.parametrize("number", [0, 1])
def test_what_can_not_be_read_goes_only_by_force_and_its_slots_with_it(number: int) -> None:
    store = memory()
    nodes = two_chains(store)
    operation = structs.replace(new_operation("create", "old", 0, ("a", "b")), operation="op-old-0")
    begin(store, operation)
    key = commit_key("old", number)
    store.delete(key)
    store.create(key, bytes(2000))
    with pytest.raises(SnapshotUnreadableError, match=key):
        delete(store, nodes)
    plan = plan_prune(store, FLEET, Retention(keep_full=1), force=True)
    assert plan.steps == ()
    assert key in plan.problems["old"]
    removed = delete(store, nodes, force=True).removed
    assert removed is not None
    assert removed.mark.points == tuple(starmap(RestorePoint, enumerate(OLD)))[:number]
    assert store.list("snapshots/old") == []
    assert nodes.slots == nodes_of("op-new-0").slots
