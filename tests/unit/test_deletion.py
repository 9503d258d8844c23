"""Deleting and pruning: wherever the process dies, no partial snapshot is listed, and a repeat finishes the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import starmap

import pytest

from cutline.check.structure import names_to_check
from cutline.fleet.config import Retention
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.under_way import ActivityState, read_under_way
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.proven_chains import commit_key, read_chain, snapshot_names
from cutline.snapshots.records.tombstones import (
    is_deleted,
    only_full_key,
    read_mark,
    tombstone_key,
)
from cutline.snapshots.removal.deletion import (
    LastSnapshotError,
    SnapshotUnreadableError,
    is_finished,
    list_unfinished_deletions,
    plan_deletion,
)
from cutline.snapshots.removal.pruning import plan_prune
from cutline.storage.clock import utc_now
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import DeletionRefusedError, ObjectStore
from cutline.wal.drain.slots import slot_name
from tests.unit.made_chains import FLEET, InMemoryNodes, nodes_of, store_chain
from tests.unit.made_commits import memory, point, unused_url
from tests.unit.made_deletions import (
    OLD,
    crash_everywhere,
    delete,
    prune,
    read_chain_lists,
    store_two_chains,
)


def test_a_deletion_that_dies_anywhere_is_finished_by_a_repeat() -> None:
    def run(store: ObjectStore, nodes: InMemoryNodes) -> None:
        if not is_finished(store, "old", force=False):
            delete(store, nodes)

    def check_end(store: InMemoryStore, nodes: InMemoryNodes, _before: object, others: dict[str, bytes]) -> None:
        assert store.list("snapshots/old") == []
        assert is_finished(store, "old", force=False)
        assert list_unfinished_deletions(store) == ([], {})
        assert read_open_intents(store) == []
        assert read_mark(store, tombstone_key("old")).points == tuple(starmap(point, enumerate(OLD)))
        assert read_chain_lists(store, "new") == others
        assert nodes.slots == nodes_of("op-new-0").slots
        assert nodes.publications
        assert snapshot_names(store) == ["new"]

    assert crash_everywhere(run, check_end) > 20


def test_a_prune_that_dies_anywhere_is_finished_by_a_repeat() -> None:
    def check_end(
        store: InMemoryStore, nodes: InMemoryNodes, before: dict[str, bytes], others: dict[str, bytes]
    ) -> None:
        full = read_chain(store, "old").full
        kept = {commit_key("old", 0), *full.object_sizes}
        expected = {key: body for key, body in before.items() if key in kept}
        left = {key: body for key, body in read_chain_lists(store, "old").items() if key != only_full_key("old")}
        assert left == expected
        assert read_chain(store, "old").increments == ()
        assert read_mark(store, only_full_key("old")).points == (point(1, OLD[1]), point(2, OLD[2]))
        assert read_chain_lists(store, "new") == others
        assert nodes.slots == nodes_of("op-new-0").slots
        assert read_open_intents(store) == []
        assert plan_prune(store, FLEET, Retention(last=1, only_full="all"), force=False).steps == ()

    assert crash_everywhere(lambda store, nodes: prune(store, nodes, last=1, only_full="all"), check_end) > 20


def test_pruning_removes_whole_snapshots_oldest_first() -> None:
    store = memory()
    nodes = store_two_chains(store)
    store_chain(store, "newest", "2020-03-01T00:00:00Z")
    pruned = prune(store, nodes, last=1)
    assert [one.mark.snapshot for one in pruned.removed] == ["old", "new"]
    assert snapshot_names(store) == ["newest"]
    assert nodes.slots == set()
    # All that the plan announces was freed.
    assert [(one.objects, one.bytes) for one in pruned.removed] == [
        (step.mark.objects, step.mark.bytes) for step in pruned.plan.steps
    ]
    assert prune(store, nodes, last=1).removed == ()


def test_a_prune_finishes_an_unfinished_deletion() -> None:
    store = memory()
    nodes = store_two_chains(store)
    nodes.unreachable = {"b"}
    delete(store, nodes)
    assert list_unfinished_deletions(store) == (["old"], {})
    nodes.unreachable = set()
    (removed,) = prune(store, nodes, last=9).removed
    assert (removed.mark.snapshot, removed.is_done) == ("old", True)
    assert is_finished(store, "old", force=False)


def test_an_unreachable_node_keeps_its_slot_and_the_rest_is_deleted() -> None:
    store = memory()
    nodes = store_two_chains(store)
    nodes.unreachable = {"b"}
    removed = delete(store, nodes).removed
    assert removed is not None
    slot = slot_name("op-old-0")
    assert removed.slots_left == [f"{slot} on b"]
    assert not removed.is_done
    assert store.list("snapshots/old") == []
    assert not is_finished(store, "old", force=False)
    nodes.unreachable = set()
    (unfinished,) = read_under_way(store)
    assert unfinished.dead_text == "has not finished (slots or publications are left on nodes that can't be reached)"
    # Its slot keeps WAL when the node is back, so the alert on dead operations is for it, too.
    assert unfinished.state(utc_now()) is ActivityState.DEAD
    assert unfinished.settled_by(utc_now()) == "to resume it: snapshot delete old"
    again = delete(store, nodes).removed
    assert again is not None
    assert again.is_done
    assert (slot, "b") not in nodes.slots
    assert read_open_intents(store) == []


@dataclass(frozen=True, slots=True)
class LockingStore(InMemoryStore):
    """A store that refuses to delete the keys that contain a string of `locked`."""

    locked: tuple[str, ...] = ()

    def delete(self, key: str) -> None:
        if any(part in key for part in self.locked):
            raise DeletionRefusedError(url=self.url, key=key, reason="object lock until 2030")
        InMemoryStore.delete(self, key)


def test_a_deletion_that_the_store_refuses_and_that_leaves_a_slot_is_dead() -> None:
    store = LockingStore(unused_url(), locked=("/base/",))
    nodes = store_two_chains(store)
    nodes.unreachable = {"b"}
    delete(store, nodes)
    (dead,) = read_under_way(store)
    assert dead.state(utc_now()) is ActivityState.DEAD
    nodes.unreachable = set()
    delete(store, nodes)
    (unfinished,) = read_under_way(store)
    assert unfinished.state(utc_now()) is ActivityState.UNFINISHED


@pytest.mark.parametrize("part", ["/base/", "snapshot.json", "/increments/"])
def test_every_object_that_the_store_keeps_is_named_and_the_rest_is_deleted(part: str) -> None:
    store = LockingStore(unused_url(), locked=(part,))
    nodes = store_two_chains(store)
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
    assert is_finished(store, "old", force=False)
    assert read_mark(store, tombstone_key("old")).operation == removed.operation


def test_a_deletion_that_the_store_refuses_day_after_day_is_open_once() -> None:
    store = LockingStore(unused_url(), locked=("/base/",))
    nodes = store_two_chains(store)
    operations = [removed.operation for _ in range(3) if (removed := delete(store, nodes).removed)]
    assert [one.id for one in read_open_intents(store)] == operations[-1:]
    assert len(set(operations)) == 3
    (found,) = read_under_way(store)
    assert found.state(utc_now()) is ActivityState.UNFINISHED
    assert found.settled_by(utc_now()) == "to resume it: snapshot delete old"
    assert found.dead_text == "has not finished (the store refused to delete 2 objects)"
    first = read_outcome(store, operations[0])
    assert first is not None
    assert (first.state, first.reason) == ("failed", f"continued by {operations[1]}")
    again = delete(replace(store, locked=()), nodes).removed
    assert again is not None
    assert again.is_done
    assert read_open_intents(store) == []


def test_commit_files_are_deleted_first_the_newest_before_the_others() -> None:
    deleted: list[str] = []

    @dataclass(frozen=True, slots=True)
    class WatchedStore(InMemoryStore):
        def delete(self, key: str) -> None:
            deleted.append(key)
            InMemoryStore.delete(self, key)

    store = WatchedStore(unused_url())
    delete(store, store_two_chains(store))
    assert deleted[:3] == [commit_key("old", number) for number in (2, 1, 0)]
    assert len(deleted) > 3


def test_the_last_restorable_snapshot_is_deleted_only_by_force() -> None:
    store = memory()
    nodes = store_two_chains(store)
    # A snapshot that lacks an object can't be restored instead.
    store.delete("snapshots/new/base/a/op-new-0/part-0.parquet")
    with pytest.raises(LastSnapshotError) as error:
        delete(store, nodes)
    assert error.value.exit_code == 3
    assert error.value.hint.endswith("snapshot delete old --force\nafter that, nothing can be restored any more")
    assert [plan_deletion(store, FLEET, name, force=True).is_last_restorable for name in ("old", "new")] == [
        True,
        False,
    ]
    assert not is_deleted(store, "old")
    assert read_open_intents(store) == []
    assert delete(store, nodes, force=True).removed is not None
    # A damaged snapshot needs no force: nothing that could be restored is lost.
    removed = delete(store, nodes, "new").removed
    assert removed is not None
    assert removed.publications == ["a"]
    assert nodes.slots == set()


def test_a_chain_with_a_damaged_increment_can_be_restored_up_to_there() -> None:
    store = memory()
    nodes = store_two_chains(store)
    store.delete("snapshots/new/wal/a/op-new-0/00000000000000000002.parquet")
    assert delete(store, nodes).removed is not None
    with pytest.raises(LastSnapshotError):
        delete(store, nodes, "new")


@pytest.mark.parametrize("number", [0, 1])
def test_an_unreadable_snapshot_and_its_slots_are_deleted_only_by_force(number: int) -> None:
    store = memory()
    nodes = store_two_chains(store)
    key = commit_key("old", number)
    store.delete(key)
    store.create(key, bytes(2000))
    with pytest.raises(SnapshotUnreadableError, match=key):
        delete(store, nodes)
    plan = plan_prune(store, FLEET, Retention(last=1), force=True)
    assert plan.steps == ()
    assert key in plan.problems["old"]
    removed = delete(store, nodes, force=True).removed
    assert removed is not None
    assert removed.mark.points == tuple(starmap(point, enumerate(OLD)))[:number]
    assert store.list("snapshots/old") == []
    assert nodes.slots == nodes_of("op-new-0").slots
