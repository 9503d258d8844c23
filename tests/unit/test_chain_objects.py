"""Which objects a restore has to verify: found by the entries of commits, of which lists are expanded last."""

from __future__ import annotations

import pytest
from msgspec import structs

import cutline.snapshots.operations.object_damage
from cutline.nodes.groups import Group
from cutline.restore.plan.copies import Wanted, count_bytes, needed_entries, needed_objects
from cutline.restore.scope.scope import ChosenTables
from cutline.snapshots.operations.object_damage import ChainObject, list_entries, list_objects
from cutline.snapshots.operations.object_lists import read_chain_lists, store_lists_above
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    DefinitionChanges,
    FullSnapshot,
    NamedObject,
    StoredObject,
    listed_objects,
    split_entries,
)
from cutline.snapshots.records.documents import base_prefix
from tests.unit.made_commits import commit, counted, memory
from tests.unit.made_lists import NAME, OPERATION, shorten_lists

GROUPS = tuple(Group(number, "public", f"t{number}", "default", 1, ()) for number in (1, 2, 3))
OBJECTS, SIZE = 9, 10


def base_objects(node: str) -> list[StoredObject]:
    """Three of each group, in lists of three."""
    prefix = base_prefix(NAME, node, OPERATION)
    return [
        StoredObject(f"{prefix}/part-{number:06d}.parquet", BASE, node, SIZE, "d", {number // 3 + 1: 1})
        for number in range(OBJECTS)
    ]


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """The base copies of a are in lists, those of its standby b in the commit."""
    shorten_lists(monkeypatch)
    store, full = memory(), commit(0)
    assert isinstance(full, FullSnapshot)
    _, lists = split_entries(store_lists_above(store, NAME, OPERATION, base_objects("a"), 0))
    full = structs.replace(full, groups={"a": GROUPS}, copied=tuple(base_objects("b")), lists=lists)
    return read_chain_lists(store, Chain(counted(full)))


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of lists that were expanded since."""
    keys: list[str] = []

    def noting(one: NamedObject) -> tuple[StoredObject, ...]:
        keys.append(one.key)
        return listed_objects(one)

    monkeypatch.setattr(cutline.snapshots.operations.object_damage, "listed_objects", noting)
    return keys


def wanting(*numbers: int) -> Wanted:
    tables = ChosenTables(tuple(group.name for group in GROUPS if group.number in numbers))
    return Wanted(tables, large_objects=False, use_backup_copies=True)


def of_kind(found: list[ChainObject]) -> list[str]:
    return [one.key for one in found if "/base/" in one.key]


def test_objects_are_listed_by_node_and_commits_are_gone_through_once(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, read = FullSnapshot.entries.fget, list[int]()
    assert entries is not None

    def noting(self: FullSnapshot) -> tuple[NamedObject, ...]:
        read.append(self.increment)
        return entries(self)

    monkeypatch.setattr(FullSnapshot, "entries", property(noting))
    found = list(list_objects(chain, ["b", "a"]))
    assert read == [0]
    segments = {node: [one.key for one in chain.full.segments[node]] for node in "ab"}
    assert [one.key for one in found] == [
        *segments["b"], *(one.key for one in base_objects("b")), *segments["a"],
        *(one.key for one in base_objects("a")),
    ]  # fmt: skip
    assert [one.node for one in found] == ["b"] * (len(segments["b"]) + OBJECTS) + ["a"] * (
        len(segments["a"]) + OBJECTS
    )
    assert sum(one.count for one in list_entries(chain, ["a", "b"])) == len(found)


@pytest.mark.parametrize("numbers", [(1,), (1, 3), (1, 2, 3)])
def test_needed_objects_are_counted_without_their_lists_and_each_list_is_expanded_once(
    chain: Chain, expanded: list[str], numbers: tuple[int, ...]
) -> None:
    wanted = wanting(*numbers)
    total = sum(one.count for one in needed_entries(chain, "ab", wanted))
    assert expanded == []
    needed = list(needed_objects(chain, "ab", wanted))
    assert of_kind(needed) == [one.key for node in "ab" for one in base_objects(node) if one.rows.keys() & set(numbers)]
    assert total == len(needed)
    assert len(expanded) == len(set(expanded)) == len(numbers)


def test_the_bytes_of_shards_are_those_of_the_copies_that_a_restore_reads(chain: Chain) -> None:
    assert (tuple(chain.present), chain.shard_of("b")) == (("a", "b"), "a")
    segments = sum(one.size for one in chain.full.segments["a"])
    assert count_bytes(chain, ["a"]) == segments + OBJECTS * SIZE
    assert count_bytes(chain, ["other"]) == 0


def test_the_newest_ddl_of_a_full_snapshot_during_which_ddl_changed_is_that_of_the_cut() -> None:
    copied, changed = (StoredObject(f"ddl/{name}", DDL, "a", SIZE, "d", {}) for name in ("copied", "changed"))
    full = commit(0)
    assert isinstance(full, FullSnapshot)
    full = structs.replace(full, copied=(copied,))
    assert Chain(full).ddl_object("a") == copied
    changes = DefinitionChanges(objects=(changed,), roles={"a": ()}, fingerprints={"a": "f"})
    assert Chain(structs.replace(full, definition_changes=changes)).ddl_object("a") == changed
