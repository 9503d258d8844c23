"""What remains after a deletion or a pruning, and who may still read it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from cutline.check.stored_entries import check_listing
from cutline.check.structure import check_structure
from cutline.fleet.progress import Silent
from cutline.snapshots.listing.name_templates import used_names
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.leases import SnapshotInUseError
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import begin, new_operation
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.end_marks import end_key
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    check_not_pruned,
    commit_key,
    read_chain,
    snapshot_names,
)
from cutline.snapshots.records.tombstones import (
    SnapshotDeletedError,
    only_full_key,
    tombstone_key,
)
from cutline.snapshots.removal.deletion import is_finished, list_unfinished_deletions
from cutline.snapshots.removal.gc import find_garbage
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectExistsError, ObjectStore
from tests.unit.made_chains import InMemoryNodes, nodes_of
from tests.unit.made_commits import commit, memory, named, point, unused_url
from tests.unit.made_deletions import (
    OLD,
    delete,
    prune,
    read_chain_lists,
    store_two_chains,
)


@pytest.mark.parametrize("body", [b"", b"not what was written"])
def test_what_is_no_tombstone_deletes_nothing_until_somebody_forces_it(body: bytes) -> None:
    store = memory()
    nodes = store_two_chains(store)
    store.create(tombstone_key("old"), body)
    before = read_chain_lists(store, "old"), set(nodes.slots)
    assert snapshot_names(store) == ["new", "old"]
    with pytest.raises(ManifestError, match=r"deleted/old\.json is damaged") as raised:
        delete(store, nodes)
    assert "snapshot delete old --force" in raised.value.hint
    assert prune(store, nodes, last=1).removed == ()
    assert not [one for one in find_garbage(store, 0, Silent()).garbage if one.snapshot == "old"]
    assert (read_chain_lists(store, "old"), nodes.slots) == before
    with pytest.raises(ManifestError):
        put_commit(store, named(commit(0), "old"))
    removed = delete(store, nodes, force=True).removed
    assert removed is not None
    assert removed.is_done
    assert store.list("snapshots/old") == []
    assert nodes.slots == nodes_of("op-new-0").slots
    with pytest.raises(ManifestError):
        put_commit(store, named(commit(0), "old"))


@pytest.mark.parametrize("key", [tombstone_key("old"), only_full_key("old")])
def test_what_takes_the_place_of_a_mark_after_the_plan_ends_the_removal(key: str) -> None:
    @dataclass(frozen=True, slots=True)
    class Meeting(InMemoryStore):
        def create(self, created: str, body: bytes) -> None:
            InMemoryStore.create(self, created, b"planted" if created == key else body)
            if created == key:
                raise ObjectExistsError(url=self.url, key=key)

    store = Meeting(unused_url())
    nodes = store_two_chains(store)
    before = read_chain_lists(store, "old"), set(nodes.slots)
    with pytest.raises(ManifestError, match="is damaged"):
        _ = delete(store, nodes) if key == tombstone_key("old") else prune(store, nodes, last=1, only_full="all")
    store.delete(key)
    assert (read_chain_lists(store, "old"), nodes.slots) == before


def test_what_is_no_mark_of_pruned_increments_ends_no_chain() -> None:
    store = memory()
    nodes = store_two_chains(store)
    before = read_chain_lists(store, "old"), set(nodes.slots)
    store.create(only_full_key("old"), b"")
    with pytest.raises(ManifestError, match=r"only-full\.json is damaged"):
        check_not_pruned(store, "old")
    assert [one.increment for one in read_chain(store, "old").commits] == [0, 1, 2]
    # What is not there may have been pruned.
    with pytest.raises(ManifestError, match=r"only-full\.json is damaged"):
        read_chain(store, "old", 3)
    assert prune(store, nodes, last=9).removed == ()
    assert not [one for one in find_garbage(store, 0, Silent()).garbage if one.snapshot == "old"]
    store.delete(only_full_key("old"))
    assert (read_chain_lists(store, "old"), nodes.slots) == before


@pytest.mark.parametrize("key", [only_full_key("old"), end_key("old", "op-old-0")])
def test_a_snapshot_with_a_damaged_mark_is_kept_and_why_is_said(key: str) -> None:
    store = memory()
    nodes = store_two_chains(store)
    before = read_chain_lists(store, "old"), set(nodes.slots)
    store.create(key, b"{")
    for rules in ({"last": 1}, {"last": 1, "only_full": "all"}, {"within_seconds": 86400}):
        pruned = prune(store, nodes, **rules)
        assert pruned.removed == ()
        assert key in pruned.plan.problems["old"]
        (verdict,) = (one for one in pruned.plan.verdicts if one.name == "old")
        assert verdict.why == ("it is damaged, so it is not known what would be lost",)
    store.delete(key)
    assert (read_chain_lists(store, "old"), nodes.slots) == before
    assert [one.mark.snapshot for one in prune(store, nodes, last=1).removed] == ["old"]


@pytest.mark.parametrize("key", [only_full_key("old"), end_key("old", "op-old-0")])
def test_a_check_compares_all_that_a_damaged_mark_leaves_and_names_it(key: str) -> None:
    store = memory()
    store_two_chains(store)
    store.create(key, b"{")
    for increment in (None, 1, 0):
        chain, report = check_structure(store, "fleet", "old", increment, {"op-old-1": 1, "op-old-2": 2})
        assert chain is not None
        assert chain.last.increment == (2 if increment is None else increment)
        check_listing(store, chain, report)
        assert [(one.kind, one.object) for one in report.conflicts] == [("mark", key)]
        assert report.compared.objects == sum(1 for one in chain.commits for _ in one.named)


def test_an_increment_that_may_have_been_pruned_is_not_said_to_be_lost() -> None:
    store = memory()
    store_two_chains(store)
    store.create(only_full_key("old"), b"{")
    store.delete(commit_key("old", 1))
    with pytest.raises(ManifestError, match=r"only-full\.json is damaged"):
        read_chain(store, "old")


def test_what_is_no_mark_of_an_ended_chain_makes_no_segment_garbage() -> None:
    store = memory()
    nodes = store_two_chains(store)
    before = read_chain_lists(store, "old"), set(nodes.slots)
    store.create(end_key("old", "op-old-0"), b"")
    assert not [one for one in find_garbage(store, 0, Silent()).garbage if one.snapshot == "old"]
    store.delete(end_key("old", "op-old-0"))
    assert (read_chain_lists(store, "old"), nodes.slots) == before


def test_a_deleted_name_is_never_used_again() -> None:
    store = memory()
    delete(store, store_two_chains(store))
    assert "old" in used_names(store)
    with pytest.raises(SnapshotDeletedError):
        put_commit(store, named(commit(0), "old"))
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
    before = read_chain_lists(store, "old"), set(nodes.slots)
    operation = begin_lease(store, minutes=5)
    for run in (
        lambda: delete(store, nodes, force=True),
        lambda: prune(store, nodes, last=1, force=True),
        lambda: prune(store, nodes, last=1, only_full="all", force=True),
    ):
        with pytest.raises(SnapshotInUseError) as error:
            run()
        assert error.value.details["operation"] == operation
    assert (read_chain_lists(store, "old"), nodes.slots) == before
    assert snapshot_names(store) == ["new", "old"]
    assert read_open_intents(store)[0].id == operation


def test_an_expired_lease_blocks_nobody() -> None:
    store = memory()
    nodes = store_two_chains(store)
    begin_lease(store, minutes=-1)
    assert delete(store, nodes).removed is not None
    assert [one.kind for one in read_open_intents(store)] == ["restore"]


def test_a_restore_that_begins_right_before_the_tombstone_keeps_its_objects() -> None:
    @dataclass(frozen=True, slots=True)
    class Meeting(InMemoryStore):
        def create(self, key: str, body: bytes) -> None:
            if key == tombstone_key("old"):
                begin_lease(self, minutes=5)
            InMemoryStore.create(self, key, body)

    store = Meeting(unused_url())
    nodes = store_two_chains(store)
    before = read_chain_lists(store, "old"), set(nodes.slots)
    with pytest.raises(SnapshotInUseError):
        delete(store, nodes)
    assert (read_chain_lists(store, "old"), nodes.slots) == before
    # For everybody else it is deleted, and a repeated deletion finishes once the restore has ended.
    assert snapshot_names(store) == ["new"]
    assert list_unfinished_deletions(store) == (["old"], {})


def test_a_pruned_chain_is_whole_and_gets_no_more_increments() -> None:
    store = memory()
    nodes = store_two_chains(store)
    prune(store, nodes, last=1, only_full="all")
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
    prune(store, nodes, last=1, only_full="all")
    removed = delete(store, nodes).removed
    assert removed is not None
    assert removed.mark.points == (point(0, OLD[0]),)
    assert store.list("snapshots/old") == []
