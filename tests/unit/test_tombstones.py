"""What remains after a deletion or a pruning, and who may still read it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from check.structure import check_listing, check_structure
from fleet.progress import Silent
from snapshots.listing.name_templates import used_names
from snapshots.operations.committing import put_commit
from snapshots.operations.leases import SnapshotInUseError
from snapshots.operations.operation import begin, new_operation, read_open_intents, record_outcome
from snapshots.operations.slot_guard import _find_kept_chain
from snapshots.records.commits import (
    SnapshotMissingError,
    check_not_pruned,
    commit_key,
    read_chain,
    snapshot_names,
)
from snapshots.records.documents import ManifestError
from snapshots.records.lost_chains import lost_key
from snapshots.records.operation_records import operation_key
from snapshots.records.tombstones import (
    DELETED,
    Mark,
    RestorePoint,
    SnapshotDeletedError,
    only_full_key,
    put_mark,
    tombstone_key,
)
from snapshots.removal.deletion import (
    is_finished,
    list_unfinished_deletions,
)
from snapshots.removal.gc import find_garbage
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


@pytest.mark.parametrize("body", [b"", b"not what was written"])
def test_what_is_no_tombstone_deletes_nothing_until_somebody_forces_it(body: bytes) -> None:
    store = memory()
    nodes = store_two_chains(store)
    begin(store, structs.replace(new_operation("create", "old", 0, ("a", "b")), operation="op-old-0"))
    store.create(tombstone_key("old"), body)
    before = read_objects(store, "old"), set(nodes.slots)
    assert snapshot_names(store) == ["new", "old"]
    with pytest.raises(ManifestError, match=r"deleted/old\.json is damaged") as raised:
        delete(store, nodes)
    assert "snapshot delete old --force" in raised.value.hint
    assert prune(store, nodes, keep_full=1).removed == ()
    assert not [one for one in find_garbage(store, 0, Silent()).garbage if one.snapshot == "old"]
    assert (read_objects(store, "old"), nodes.slots) == before
    with pytest.raises(ManifestError):
        put_commit(store, structs.replace(commit(0), snapshot="old"))
    removed = delete(store, nodes, force=True).removed
    assert removed is not None
    assert removed.is_done
    assert store.list("snapshots/old") == []
    assert nodes.slots == nodes_of("op-new-0").slots
    with pytest.raises(ManifestError):
        put_commit(store, structs.replace(commit(0), snapshot="old"))


def test_what_is_no_mark_of_pruned_increments_ends_no_chain() -> None:
    store = memory()
    nodes = store_two_chains(store)
    before = read_objects(store, "old"), set(nodes.slots)
    store.create(only_full_key("old"), b"")
    with pytest.raises(ManifestError, match=r"only-full\.json is damaged"):
        read_chain(store, "old")
    assert prune(store, nodes, keep_full=9).removed == ()
    assert not [one for one in find_garbage(store, 0, Silent()).garbage if one.snapshot == "old"]
    store.delete(only_full_key("old"))
    assert (read_objects(store, "old"), nodes.slots) == before
    assert len(read_chain(store, "old").commits) > 1


def test_what_is_no_mark_of_a_lost_chain_makes_no_segment_garbage() -> None:
    store = memory()
    nodes = store_two_chains(store)
    before = read_objects(store, "old"), set(nodes.slots)
    store.create(lost_key("old", "op-old-0"), b"")
    assert not [one for one in find_garbage(store, 0, Silent()).garbage if one.snapshot == "old"]
    store.delete(lost_key("old", "op-old-0"))
    assert (read_objects(store, "old"), nodes.slots) == before


@pytest.mark.parametrize(
    ("chain", "slot"),
    [
        ("op-old-0", "debezium_orders"),
        ("", "debezium_orders"),
        ("op-new-0", "cutline_op_new_0"),
        ("OP-NEW-0", "cutline_op_new_0"),
        ("", "cutline_op_new_0"),
    ],
    ids=["of an application", "without a chain", "of another snapshot", "by another id", "of another, without a chain"],
)
def test_a_tombstone_drops_no_slot_of_anybody_else(chain: str, slot: str) -> None:
    store = memory()
    nodes = store_two_chains(store)
    begin(store, structs.replace(new_operation("create", "new", 0, ("a", "b")), operation="op-new-0"))
    planted = Mark(
        DELETED, "old", "op-planted", "2026-11-21T10:00:00+00:00", "cutline delete old ops@db7:1", chain,
        (slot,), ("a", "b"), (), 0, 0,
    )  # fmt: skip
    put_mark(store, planted)
    before = set(nodes.slots)
    removed = delete(store, nodes).removed
    assert nodes.slots == before
    assert removed is not None
    assert removed.slots_unknown == [f"{slot}, which no create of this snapshot made"]
    assert removed.is_done


def test_a_deleted_name_is_never_used_again() -> None:
    store = memory()
    delete(store, store_two_chains(store))
    assert "old" in used_names(store)
    with pytest.raises(SnapshotDeletedError):
        put_commit(store, structs.replace(commit(0), snapshot="old"))
    # A put that was under way arrives: it is garbage, and a repeated deletion removes it.
    store.create(commit_key("old", 0), b"late")
    assert snapshot_names(store) == ["new"]
    assert not is_finished(store, "old", force=False)
    delete(store, InMemoryNodes())
    assert is_finished(store, "old", force=False)


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
    assert list_unfinished_deletions(store) == (["old"], {})


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
