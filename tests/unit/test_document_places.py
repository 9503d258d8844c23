"""A document counts only where it belongs: under its key, in its chain, in its fleet."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from cutline.snapshots.operations.majority import read_recorded_primaries
from cutline.snapshots.operations.open_operations import read_open_intents, read_recorded_commits
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.end_marks import end_key, read_end
from cutline.snapshots.records.operation_records import read_intent
from cutline.snapshots.records.proven_chains import commit_key, find_place, read_chain
from cutline.snapshots.records.store_identity import (
    FLEET_KEY,
    ForeignSnapshotError,
    check_of_fleet,
    ensure_identity,
    read_identity,
)
from cutline.snapshots.records.tombstones import (
    read_mark,
    tombstone_key,
)
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import (
    FLEET,
    FULL,
    OPERATION,
    write_document,
    write_increment,
    write_outcome,
)
from tests.unit.made_commits import memory


def new_store_of(*found: tuple[str, bytes]) -> InMemoryStore:
    store = memory()
    for key, body in found:
        store.create(key, body)
    return store


def test_a_commit_copied_from_elsewhere_is_refused() -> None:
    store = memory()
    write_increment(store)
    full, increment = store.read(commit_key("daily", 0)), store.read(commit_key("daily", 1))
    of_another = seal(json.loads(full) | {"operation": "op-x"})
    of_another_chain = seal(json.loads(increment) | {"chain": "op-x"})
    of_other_nodes = seal(json.loads(increment) | {"sequences": {"c": []}})
    first, second = commit_key("daily", 0), commit_key("daily", 1)
    for copied, key in (
        # The commit of another snapshot, of another increment, and of an increment of another full snapshot.
        (new_store_of((commit_key("weekly", 0), full)), commit_key("weekly", 0)),
        (new_store_of((first, increment)), first),
        (new_store_of((first, full), (second, full)), second),
        (new_store_of((first, of_another), (second, increment)), second),
        (new_store_of((first, full), (second, of_another_chain)), second),
        (new_store_of((first, full), (second, of_other_nodes)), second),
    ):
        name = next(iter(copied.list_children("snapshots")))
        with pytest.raises(ManifestError, match=key):
            read_chain(copied, name)


def test_a_document_under_the_key_of_another_is_refused() -> None:
    for kind, elsewhere, read in (
        ("void", commit_key("weekly", 0), lambda store: find_place(store, "weekly", 0)),
        ("void", commit_key("daily", 1), lambda store: find_place(store, "daily", 1)),
        ("ended", end_key("daily", "op-1"), lambda store: read_end(store, "daily", "op-1")),
        ("ended", end_key("weekly", "op-0"), lambda store: read_end(store, "weekly", "op-0")),
        ("intent", "operations/op-x/intent.json", lambda store: read_intent(store, "op-x")),
        ("outcome", "operations/op-x/outcome.json", read_recorded_commits),
        ("tombstone", tombstone_key("weekly"), lambda store: read_mark(store, tombstone_key("weekly"))),
        ("only-full", tombstone_key("daily"), lambda store: read_mark(store, tombstone_key("daily"))),
        ("full", FLEET_KEY, lambda store: read_identity(store, FLEET)),
        ("fleet", commit_key("daily", 0), lambda store: read_chain(store, "daily")),
        ("intent", "baselines/0000000000000001.json", read_recorded_primaries),
    ):
        with pytest.raises(ManifestError, match=f"object {elsewhere}"):
            read(new_store_of((elsewhere, write_document(kind)[0])))


def test_a_snapshot_of_another_fleet_is_refused_and_both_fleets_are_named() -> None:
    store = memory()
    own, is_new = ensure_identity(store, FLEET)
    assert is_new
    chain = Chain(FULL)
    with pytest.raises(ForeignSnapshotError) as error:
        check_of_fleet(chain, own)
    assert commit_key("daily", 0) in error.value.message
    assert chain.full.fleet_id in error.value.message
    assert own.fleet_id in error.value.message
    check_of_fleet(chain, replace(own, fleet_id=chain.full.fleet_id))


def test_an_outcome_that_can_not_be_read_does_not_hide_the_others() -> None:
    store = memory()
    write_outcome(store)
    store.create("operations/20261121T000000Z-0000000002/outcome.json", b"{")
    store.create("operations/nothing", b"")
    unread: list[ManifestError] = []
    assert read_recorded_commits(store, unread=unread) == {"weekly": {OPERATION.id: 0}}
    assert [one.details["object"] for one in unread] == ["operations/20261121T000000Z-0000000002/outcome.json"]
    assert read_open_intents(store) == []
