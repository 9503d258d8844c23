"""What remains after a deletion or a pruning, and who may still read it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from check.structure import check_listing, check_structure
from snapshots.listing.name_templates import used_names
from snapshots.operations.committing import put_commit
from snapshots.operations.leases import SnapshotInUseError
from snapshots.operations.operation import begin, new_operation, read_open_intents, record_outcome
from snapshots.operations.slot_guard import _find_kept_chain
from snapshots.records.commits import (
    SnapshotMissingError,
    check_not_pruned,
    commit_key,
    snapshot_names,
)
from snapshots.records.operation_records import operation_key
from snapshots.records.tombstones import (
    RestorePoint,
    SnapshotDeletedError,
    tombstone_key,
)
from snapshots.removal.deletion import (
    is_finished,
    list_unfinished_deletions,
)
from storage.memory import InMemoryStore
from storage.store import ObjectStore
from tests.unit.made_chains import InMemoryNodes, nodes_of
from tests.unit.made_commits import commit, memory, unused_url
from tests.unit.made_deletions import (
    OLD,
    delete,
    prune,
    read_objects,
    store_two_chains,
)
from wal.slots.retained import Retained, RetainedAnswers
from wal.slots.slots import chain_of_slot, slot_name


def test_an_unreadable_tombstone_still_counts() -> None:
    store = memory()
    nodes = store_two_chains(store)
    begin(store, structs.replace(new_operation("create", "old", 0, ("a", "b")), operation="op-old-0"))
    store.create(tombstone_key("old"), b"not what was written")
    assert snapshot_names(store) == ["new"]
    removed = delete(store, nodes).removed
    assert removed is not None
    assert removed.is_done
    assert store.list("snapshots/old") == []
    assert nodes.slots == nodes_of("op-new-0").slots


def test_a_deleted_name_is_never_used_again() -> None:
    store = memory()
    delete(store, store_two_chains(store))
    assert "old" in used_names(store)
    with pytest.raises(SnapshotDeletedError):
        put_commit(store, structs.replace(commit(0), snapshot="old"))
    # A put that was under way arrives: it is garbage, and a repeated deletion removes it.
    store.create(commit_key("old", 0), b"late")
    assert snapshot_names(store) == ["new"]
    assert not is_finished(store, "old")
    delete(store, InMemoryNodes())
    assert is_finished(store, "old")


def test_a_snapshot_that_never_existed_can_not_be_deleted() -> None:
    store = memory()
    with pytest.raises(SnapshotMissingError):
        delete(store, store_two_chains(store), "another")
    assert read_open_intents(store) == []


def begin_lease(store: ObjectStore, minutes: int, name: str = "old") -> str:
    operation = new_operation("restore", name, 0, ("a",))
    until = datetime.now(UTC) + timedelta(minutes=minutes)
    begin(store, structs.replace(operation, expires_at=until.isoformat(), by="cutline restore old ops@db7:1"))
    return operation.id


def test_a_snapshot_that_is_being_restored_is_neither_deleted_nor_pruned() -> None:
    store = memory()
    nodes = store_two_chains(store)
    before = read_objects(store, "old"), set(nodes.slots)
    operation = begin_lease(store, minutes=5)
    for run in (
        lambda: delete(store, nodes, force=True),
        lambda: prune(store, nodes, keep_full=1, force=True),
        lambda: prune(store, nodes, keep_increments=0, force=True),
    ):
        with pytest.raises(SnapshotInUseError) as error:
            run()
        assert error.value.details["operation"] == operation
    assert (read_objects(store, "old"), nodes.slots) == before
    assert snapshot_names(store) == ["new", "old"]
    assert read_open_intents(store)[0].id == operation


def test_an_expired_lease_blocks_nobody() -> None:
    store = memory()
    nodes = store_two_chains(store)
    begin_lease(store, minutes=-1)
    assert delete(store, nodes).removed is not None
    assert read_open_intents(store) == []


def test_a_restore_that_begins_right_before_the_tombstone_keeps_its_objects() -> None:
    @dataclass(frozen=True, slots=True)
    class Meeting(InMemoryStore):
        def create(self, key: str, body: bytes) -> None:
            if key == tombstone_key("old"):
                begin_lease(self, minutes=5)
            InMemoryStore.create(self, key, body)

    store = Meeting(unused_url())
    nodes = store_two_chains(store)
    before = read_objects(store, "old"), set(nodes.slots)
    with pytest.raises(SnapshotInUseError):
        delete(store, nodes)
    assert (read_objects(store, "old"), nodes.slots) == before
    # For everybody else it is deleted, and a repeated deletion finishes once the restore has ended.
    assert snapshot_names(store) == ["new"]
    assert list_unfinished_deletions(store) == ["old"]


def test_a_pruned_chain_is_whole_and_gets_no_more_increments() -> None:
    store = memory()
    nodes = store_two_chains(store)
    prune(store, nodes, keep_increments=1)
    chain, report = check_structure(store, "fleet", "old", None, {"op-old-1": 1, "op-old-2": 2})
    assert chain is not None
    check_listing(store, chain, report)
    assert report.conflicts == []
    for ask in (
        lambda: check_not_pruned(store, "old"),
        lambda: check_structure(store, "fleet", "old", 1, {"op-old-1": 1}),
    ):
        with pytest.raises(SnapshotMissingError, match="increments of snapshot old were pruned"):
            ask()
    check_not_pruned(store, "new")


def test_a_pruned_chain_can_be_deleted() -> None:
    store = memory()
    nodes = store_two_chains(store)
    prune(store, nodes, keep_increments=1)
    removed = delete(store, nodes).removed
    assert removed is not None
    assert removed.mark.points == (RestorePoint(0, OLD[0]),)
    assert store.list("snapshots/old") == []


def test_publications_stay_while_an_unlisted_chain_of_the_store_has_slots() -> None:
    store = memory()
    chain = new_operation("create", "old", 0, ("a", "b"))
    begin(store, chain)
    nodes = store_two_chains(store)
    delete(store, nodes)
    nodes.slots |= {(slot_name(chain.id), "a")}
    removed = delete(store, nodes, "new", force=True).removed
    assert removed is not None
    assert (removed.publications, nodes.publications) == ([], {"a"})
    # Slots of another store's chains do not keep our publications.
    nodes.slots = {(slot_name(new_operation("create", "other", 0, ()).id), "a")}
    assert nodes.drop_publications(lambda slot: store.exists(operation_key(chain_of_slot(slot), "intent")))[0] == ["a"]


def test_slots_of_deleted_and_pruned_chains_are_recognised() -> None:
    store = memory()
    nodes = store_two_chains(store)
    for name in ("old", "new"):
        begin(store, structs.replace(new_operation("create", name, 0, ("a", "b")), operation=f"op-{name}-0"))
        record_outcome(
            store, structs.replace(new_operation("create", name, 0, ("a", "b")), operation=f"op-{name}-0"), "done"
        )

    def removal_text_of(name: str) -> str:
        slot = slot_name(f"op-{name}-0")
        answers = RetainedAnswers((Retained("b", slot, 1, 100),), {})
        return _find_kept_chain(store, slot, answers, f"op-{name}-0").removal_text

    assert (removal_text_of("old"), removal_text_of("new")) == ("", "")
    prune(store, nodes, keep_increments=1)
    assert removal_text_of("old") == "the increments of snapshot old are pruned"
    delete(store, nodes)
    assert (removal_text_of("old"), removal_text_of("new")) == ("snapshot old is deleted", "")
