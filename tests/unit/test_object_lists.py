"""Object lists: a commit that names them is as good as one that lists everything."""

from __future__ import annotations

import pytest
from msgspec import structs

from cutline.snapshots.create.chain_objects import ChainObjectMissingError, check_objects
from cutline.snapshots.operations import object_lists
from cutline.snapshots.operations.committing import ObjectsNotStoredError
from cutline.snapshots.operations.object_lists import (
    check_commit_stored,
    read_chain_lists,
    read_lists,
    store_lists_above,
)
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, DefinitionChanges, LostList, split_entries
from cutline.snapshots.records.documents import base_prefix, seal
from cutline.snapshots.records.proven_chains import read_full, read_newest_part
from cutline.snapshots.removal.survey import survey_snapshot
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError
from tests.stores.listed import objects_of
from tests.unit.made_commits import commit, memory
from tests.unit.made_garbage import StoreBuilder, garbage_of
from tests.unit.made_lists import (
    NAME,
    OPERATION,
    PARTS,
    SIZE,
    base_copies,
    listed,
    listed_full,
    put_listed,
    shorten_lists,
    with_copies,
)


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any base copy goes into a list, and a list has at most three."""
    shorten_lists(monkeypatch)


def document_bytes(store: ObjectStore) -> int:
    return store.size(f"snapshots/{NAME}/snapshot.json")


def test_a_commit_with_lists_has_the_same_objects() -> None:
    store, new = memory(), with_copies()
    found = put_listed(store, new)
    # Seven objects of each node in lists of three.
    assert [one.objects for one in found.lists] == [3, 3, 1, 3, 3, 1]
    assert [stored.kind for stored in found.own_objects] == ["archive"]
    read = read_chain_lists(store, Chain(found)).full
    assert {one.key: one for one in objects_of(read)} == {one.key: one for one in objects_of(new)}
    lists = store.inventory(f"snapshots/{NAME}/lists")
    assert read.object_sizes == new.object_sizes | {one.key: one.size for one in lists}
    # 14 base copies, the DDL, 6 lists and 2 segments; 10 bytes are in each segment.
    assert (read.counts["objects"], len(lists)) == (14 + 1 + 6 + 2, 6)
    assert read.counts["bytes"] == 14 * SIZE + 5 + 2 * 10 + sum(one.size for one in lists)


def test_the_document_grows_by_an_entry_per_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lists, "LIST_OBJECTS_MAX", 10_000)
    sizes, lists = [], []
    for parts in (10, 10_000, 20_001):
        store = memory()
        lists.append(len(put_listed(store, with_copies(parts=parts)).lists))
        sizes.append(document_bytes(store))
    assert lists == [2, 2, 6]
    assert sizes[1] - sizes[0] < 100
    assert sizes[2] - sizes[1] < 4 * 500


def test_lists_that_tasks_stored_stay_beside_those_of_the_rest() -> None:
    store = memory()
    _, by_tasks = split_entries(store_lists_above(store, NAME, OPERATION, base_copies("a"), 0))
    found = put_listed(store, structs.replace(with_copies("b"), lists=by_tasks))
    read = read_chain_lists(store, Chain(found)).full
    expected = {one.key for node in "ab" for one in base_copies(node)}
    assert {one.key for one in objects_of(read) if one.kind == BASE} == expected


def test_lists_of_tables_that_were_copied_again_stay_too() -> None:
    store = memory()
    (first,) = base_copies("a", 1)
    _, by_tasks = split_entries(store_lists_above(store, NAME, OPERATION, [first], 0))
    changes = DefinitionChanges(objects=tuple(base_copies("b", 2)), lists=by_tasks)
    found = listed(store, structs.replace(commit(1), definition_changes=changes))
    assert found.own_objects == ()
    assert [(one.node, one.objects) for one in found.object_lists] == [("a", 1), ("b", 2)]


def test_a_commit_without_lists_has_no_key_for_them() -> None:
    changed = structs.replace(commit(1), definition_changes=DefinitionChanges(gone={"a": (1,)}))
    for document in (seal(changed), seal(with_copies())):
        assert b'"lists"' not in document


def test_few_objects_stay_in_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    store, new = memory(), with_copies()
    monkeypatch.setattr(object_lists, "OWN_OBJECTS_MAX", 2 * PARTS)
    assert listed(store, new) is new
    assert store.inventory("") == []
    monkeypatch.setattr(object_lists, "OWN_OBJECTS_MAX", 2 * PARTS - 1)
    assert len(listed(store, new).own_objects) == 1


def test_objects_of_a_list_that_was_not_read_are_never_taken_for_none() -> None:
    store = memory()
    found = put_listed(store, with_copies())
    for read in (lambda: found.named_and_listed, lambda: found.object_sizes):
        with pytest.raises(RuntimeError, match="was not read"):
            list(read())


def test_lists_are_read_once_to_look_up_what_they_list(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    found = put_listed(store, with_copies())
    sizes = read_chain_lists(store, Chain(found)).full.object_sizes
    for key in sizes.keys() - set(store.list("snapshots")):
        store.create(key, bytes(sizes[key]))
    # Only lists that are kept are compressed.
    monkeypatch.setattr(object_lists, "compress_content", lambda _: pytest.fail("compressed"))
    check_commit_stored(store, found)
    lost = base_copies("b")[4].key
    store.delete(lost)
    with pytest.raises(ObjectsNotStoredError, match=lost):
        check_commit_stored(store, found)


@pytest.mark.parametrize("kind", ["missing", "digest"])
def test_a_damaged_list_is_named_with_its_node(kind: str) -> None:
    store = memory()
    found = put_listed(store, with_copies())
    one = found.lists[-1]
    body = store.read(one.key)
    store.delete(one.key)
    if kind == "digest":
        store.create(one.key, body.replace(b"1000", b"1001", 1))
    with pytest.raises(ObjectDamagedError) as caught:
        read_lists(store, found)
    assert caught.value.details == {"object": one.key, "kind": kind, "node": "b"}
    lost = read_chain_lists(store, Chain(found)).full.lists[-1]
    assert isinstance(lost, LostList)
    assert (lost.key, lost.node, lost.damage) == (one.key, "b", kind)


def test_create_continues_a_chain_without_reading_its_lists() -> None:
    builder = StoreBuilder()
    listed_full(builder, "other")
    store = builder.store
    # What only a list names is not asked for.
    store.delete(store.list("snapshots/other/base")[0])
    check_objects(store, read_newest_part(store, "other"))
    lost = read_full(store, "other").lists[0].key
    store.delete(lost)
    with pytest.raises(ChainObjectMissingError) as caught:
        check_objects(store, read_newest_part(store, "other"))
    assert caught.value.details["object"] == lost


def test_gc_keeps_what_lists_list_and_the_lists() -> None:
    builder = StoreBuilder()
    new = listed_full(builder, NAME)
    assert new.object_lists
    assert garbage_of(builder.store) == {}
    assert survey_snapshot(builder.store, NAME).problem == ""
    stray = f"{base_prefix(NAME, 'a', new.operation)}/part-000009-000-ab.parquet"
    builder.store.create(stray, b"?")
    assert garbage_of(builder.store) == {stray: "unlisted"}


def test_gc_removes_the_lists_of_a_failed_create() -> None:
    builder = StoreBuilder()
    operation = builder.begin_create(NAME)
    listed(builder.store, builder.new_commit(operation, builder.store_base(operation)))
    record_outcome(builder.store, operation, "failed")
    lists = {one.key for one in builder.store.inventory(f"snapshots/{NAME}/lists")}
    garbage = garbage_of(builder.store)
    assert lists
    assert lists <= garbage.keys()
    assert {garbage[key] for key in lists} == {"failed"}


def test_an_object_that_only_a_list_names_is_missed() -> None:
    builder = StoreBuilder()
    listed_full(builder, NAME)
    (lost, *_) = builder.store.list(f"snapshots/{NAME}/base")
    builder.store.delete(lost)
    found = survey_snapshot(builder.store, NAME)
    assert (found.restorable, found.lack) == (0, f"object {lost} is missing from the store")


@pytest.mark.parametrize("is_altered", [True, False])
def test_a_snapshot_whose_list_is_lost_is_damaged_and_kept_by_gc(*, is_altered: bool) -> None:
    builder = StoreBuilder()
    new = listed_full(builder, NAME)
    lost = new.object_lists[0].key
    body = builder.store.read(lost)
    builder.store.delete(lost)
    if is_altered:
        builder.store.create(lost, body.replace(b"base", b"bass"))
    found = survey_snapshot(builder.store, NAME)
    assert (found.restorable, found.unreadable) == (0, "")
    assert found.lack.startswith(f"object {lost}")
    # Its restore points are known, so that its deletion can name them.
    assert [one.increment for one in found.points] == [0]
    assert garbage_of(builder.store) == {}
