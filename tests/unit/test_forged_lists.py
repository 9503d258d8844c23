"""No object list can be replaced by another one, whoever seals it; and what a commit says of objects is possible."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from msgspec import structs

from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, DefinitionChanges, Increment, ListedObjects
from cutline.snapshots.records.commit_rules import check_commit, check_fits
from cutline.snapshots.records.documents import (
    DOCUMENT_BYTES_MAX,
    ManifestError,
    from_json,
    parse_document,
    seal,
    unseal,
)
from cutline.snapshots.records.proven_chains import commit_key, read_chain
from cutline.storage.digest import digest
from tests.stores.listed import objects_of
from tests.unit.made_commits import commit, counted, memory
from tests.unit.made_garbage import StoreBuilder
from tests.unit.made_lists import NAME, SIZE, base_copies, listed, listed_full, shorten_lists, with_copies


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any base copy goes into a list, and a list has at most three."""
    shorten_lists(monkeypatch)


Change = Callable[[ListedObjects], ListedObjects]


def with_first(**changed: object) -> Change:
    """Changes the first object that a list lists."""

    def change(found: ListedObjects) -> ListedObjects:
        first, *others = found.objects
        return structs.replace(found, objects=(structs.replace(first, **changed), *others))

    return change


FIRST = base_copies("a")[0].key
CHANGES: dict[str, tuple[Change, str]] = {
    "an object less": (
        lambda found: structs.replace(found, objects=found.objects[1:]),
        "do not match the counts in its commit",
    ),
    "an object twice": (
        lambda found: structs.replace(found, objects=(found.objects[0], *found.objects[:-1])),
        "twice",
    ),
    "another size": (with_first(size=SIZE + 1), "do not match the counts in its commit"),
    "rows": (with_first(rows={1: 1}), "do not match the counts in its commit"),
    "of another node": (
        lambda found: structs.replace(found, objects=tuple(base_copies("b", 3))),
        "does not match its list's kind base and node a",
    ),
    "of another operation's folder": (
        with_first(key=FIRST.replace("op-0", "op-9")),
        "does not belong to operation op-0, but its list does",
    ),
    "not below the snapshot": (with_first(key="fleet.json"), "its key does not match"),
    "with an impossible key": (with_first(key=FIRST.replace("part", "../part")), "key"),
    "of another snapshot": (lambda found: structs.replace(found, snapshot="other"), "describes"),
    "of another operation": (lambda found: structs.replace(found, operation="op-9"), "describes"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_list_that_is_not_what_the_commit_says_is_refused(change: Change, words: str) -> None:
    """Whoever can write to the store can seal anything, and name its digest in a commit."""
    store = memory()
    new = listed(store, with_copies())
    first = new.lists[0]
    content, _ = unseal(first.key, store.read(first.key))
    body = seal(change(from_json(content, ListedObjects)))
    store.delete(first.key)
    store.create(first.key, body)
    forged = structs.replace(first, size=len(body), digest=digest(body))
    put_commit(store, counted(structs.replace(new, lists=(forged, *new.lists[1:]))))
    with pytest.raises(ManifestError, match=words) as caught:
        read_chain_lists(store, read_chain(store, NAME))
    assert caught.value.details["object"] == first.key


def test_an_increment_cannot_list_an_object_of_the_full_snapshot() -> None:
    """The error names the increment's commit."""
    builder = StoreBuilder()
    listed_full(builder, NAME)
    chain = read_chain_lists(builder.store, read_chain(builder.store, NAME))
    twice = next(stored for stored in objects_of(chain.full) if stored.kind == BASE)
    operation = builder.begin_create(NAME, 1)
    new = builder.new_commit(operation, builder.store_base(operation), chain=chain)
    changes = new.definition_changes
    assert changes is not None
    changes = structs.replace(changes, objects=(*changes.objects, twice))
    put_commit(builder.store, counted(structs.replace(new, definition_changes=changes)))
    with pytest.raises(ManifestError, match="twice") as caught:
        read_chain_lists(builder.store, read_chain(builder.store, NAME))
    assert caught.value.details["object"] == commit_key(NAME, 1)


def test_two_lists_cannot_list_the_same_object() -> None:
    """Its rows would be there twice."""
    store = memory()
    new = listed(store, with_copies("a", 3))
    again = listed(store, with_copies("a", 3))
    put_commit(store, counted(structs.replace(new, lists=(*new.lists, *again.lists))))
    with pytest.raises(ManifestError, match="twice"):
        read_chain_lists(store, read_chain(store, NAME))


def test_what_is_no_list_at_all_is_refused_before_it_takes_memory() -> None:
    """A million empty arrays would take 60 MB as Python's lists."""
    content = b'{"schema": "cutline/objects/1", "snapshot": "daily", "operation": "op-0", "objects": [' + (
        b"[]," * 1_000_000 + b"[]]}"
    )
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError):
            parse_document("list", content, ListedObjects)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(content)


def test_two_commits_with_lists_are_not_of_one_operation() -> None:
    """Their lists could have the same objects: those of one commit alone are compared."""
    store = memory()
    full = counted(listed(store, with_copies("a", 2)))
    lists = listed(store, with_copies("a", 2)).lists
    increment = structs.replace(commit(1), operation=full.operation, definition_changes=DefinitionChanges(lists=lists))
    with pytest.raises(ManifestError, match="twice") as caught:
        read_chain_lists(store, Chain(full, (increment,)))
    assert caught.value.details["object"] == commit_key(NAME, 1)


def test_two_commits_beside_lists_cannot_name_the_same_object() -> None:
    store = memory()
    full = counted(listed(store, with_copies("a", 2)))
    (twice,) = full.own_objects
    increment = structs.replace(commit(1), definition_changes=DefinitionChanges(objects=(twice,)))
    with pytest.raises(ManifestError, match="twice") as caught:
        read_chain_lists(store, Chain(full, (increment,)))
    assert caught.value.details["object"] == commit_key(NAME, 1)


ENTRIES: dict[str, tuple[dict[str, object], str]] = {
    "of DDL": ({"kind": "archive"}, "has an unknown kind: archive"),
    "of nothing": ({"objects": 0}, ": 0 objects"),
    "of more objects than bytes": ({"objects": 2**63 - 1}, f": {2**63 - 1} objects"),
    "too large": ({"size": DOCUMENT_BYTES_MAX + 1}, f"3 objects, {DOCUMENT_BYTES_MAX + 1} bytes"),
    "in the folder of another node": ({"node": "b"}, "its key does not match kind base and node b"),
    "under the key of another kind": ({"kind": "large_objects"}, "does not match kind large_objects and node a"),
    "elsewhere": ({"key": "fleet.json"}, "its key does not match kind base and node a"),
    "with rows of an unknown group": ({"rows": {7: 1}}, "rows of an unknown group"),
}


@pytest.mark.parametrize(("changed", "words"), ENTRIES.values(), ids=ENTRIES)
def test_a_commit_that_names_an_impossible_list_is_refused(changed: dict[str, object], words: str) -> None:
    store = memory()
    new = listed(store, with_copies())
    forged = structs.replace(new, lists=(structs.replace(new.lists[0], **changed), *new.lists[1:]))
    with pytest.raises(ValueError, match=words):
        check_commit(counted(forged))


def test_a_segment_whose_events_begin_beyond_its_end_is_refused() -> None:
    new = counted(commit(0))
    ((node, (one,)), *_) = new.segments.items()
    for at, is_refused in ((one.size, False), (one.size + 1, True)):
        forged = structs.replace(new, segments=new.segments | {node: (structs.replace(one, events_at=at),)})
        with pytest.raises(ValueError, match="the events of segment") if is_refused else nullcontext():
            check_commit(forged)


def test_a_list_of_a_node_that_the_snapshot_lacks_is_refused() -> None:
    store = memory()
    new = listed(store, with_copies("ab"))
    elsewhere = structs.replace(new.lists[0], node="c", key=new.lists[0].key.replace("/a/", "/c/"))
    with pytest.raises(ValueError, match="node c, which is not in the snapshot"):
        check_commit(counted(structs.replace(new, lists=(elsewhere,))))


def test_an_increment_lists_only_rows_of_definitions_that_begin_in_it() -> None:
    builder = StoreBuilder()
    chain = builder.take_full(NAME)
    operation = builder.begin_create(NAME, 1)
    new = builder.new_commit(operation, builder.store_base(operation), chain=chain)
    builder.store_segments(NAME, chain.full.operation, [3])
    new = listed(builder.store, new)
    assert isinstance(new, Increment)
    changes = new.definition_changes
    assert changes is not None
    rows = structs.replace(changes.lists[0], rows={1: 1})
    forged = structs.replace(new, definition_changes=structs.replace(changes, lists=(rows, *changes.lists[1:])))
    with pytest.raises(ManifestError, match="rows of a group that is not new in this commit"):
        check_fits(chain, counted(forged), "increment")
