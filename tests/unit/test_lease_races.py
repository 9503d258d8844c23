"""Of a restore and a deletion of the same snapshot, the second one always sees the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cutline.fleet.progress import Silent
from cutline.snapshots.operations.leases import SnapshotInUseError, check_not_in_use, hold_lease
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.proven_chains import SnapshotMissingError
from cutline.snapshots.records.tombstones import SnapshotDeletedError, only_full_key, tombstone_key
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectMissingError
from tests.unit.made_commits import mark, memory, unused_url
from tests.unit.made_operations import new_restore


def delete(store: InMemoryStore) -> None:
    """Take the two steps of a deletion in order: store the tombstone, then look for leases."""
    store.create(tombstone_key("daily"), seal(mark()))
    check_not_in_use(store, "daily")


def restore(store: InMemoryStore, meanwhile: Callable[[], None] = lambda: None) -> None:
    with hold_lease(store, new_restore(), Silent()):
        meanwhile()


def test_the_second_of_a_restore_and_a_deletion_gives_way() -> None:
    store = memory()
    delete(store)
    with pytest.raises(SnapshotDeletedError):
        restore(store)
    assert read_open_intents(store) == []
    store = memory()
    with pytest.raises(SnapshotInUseError):
        restore(store, lambda: delete(store))


@dataclass(frozen=True, slots=True)
class Meeting(InMemoryStore):
    """A store in which a whole deletion runs between a restore's lease and its look for a tombstone."""

    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body)
        if key.endswith("intent.json"):
            with pytest.raises(SnapshotInUseError):
                delete(self)


def test_both_give_way_if_each_stores_its_record_before_the_other_looks() -> None:
    store = Meeting(unused_url())
    with pytest.raises(SnapshotDeletedError):
        restore(store)
    # The restore has ended, so a repeated deletion succeeds.
    check_not_in_use(store, "daily")


def test_a_pruned_increment_is_not_restored() -> None:
    store = memory()
    store.create(only_full_key("daily"), seal(mark(only_full=True)))
    with hold_lease(store, new_restore(), Silent()):
        pass
    with pytest.raises(SnapshotMissingError, match="pruned"), hold_lease(store, new_restore(1), Silent()):
        pass


def read_missing_object(store: InMemoryStore, *, is_deleted: bool) -> None:
    with hold_lease(store, new_restore(), Silent()):
        if is_deleted:
            store.create(tombstone_key("daily"), seal(mark()))
        store.read("snapshots/daily/base/a")


def test_an_object_that_is_missing_because_its_snapshot_was_deleted_is_not_called_damaged() -> None:
    store = memory()
    with pytest.raises(ObjectMissingError):
        read_missing_object(store, is_deleted=False)
    with pytest.raises(SnapshotDeletedError):
        read_missing_object(store, is_deleted=True)
    assert read_open_intents(store) == []
