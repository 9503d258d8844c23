"""Base sources: those of object lists are the ones that the objects themselves would give, in the same order."""

from __future__ import annotations

import pickle
from itertools import chain, islice

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.snapshots.fold import sources
from cutline.snapshots.fold.schema_at_cut import Conversion, SchemaMapping
from cutline.snapshots.fold.sources import (
    BaseCursor,
    BaseForm,
    BasePart,
    BaseSource,
    BaseSources,
    HeldBases,
    ListedBases,
    NodeBases,
)
from cutline.snapshots.operations.object_lists import read_chain_lists, store_lists_above
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, LostList, ObjectList, StoredObject, listed_objects, split_entries
from cutline.snapshots.records.documents import base_prefix
from cutline.storage.memory import InMemoryStore
from tests.unit.made_commits import commit, counted
from tests.unit.made_lists import NAME, OPERATION, shorten_lists

GROUPS = (1, 2, 3)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_lists(monkeypatch)


def made_objects(node: str, count: int) -> list[StoredObject]:
    """Object n has rows of the groups whose bits are set in n: so of none, of one and of several."""
    prefix = base_prefix(NAME, node, OPERATION)
    return [
        StoredObject(
            f"{prefix}/part-{number:06d}.parquet", BASE, node, 100 + number, f"d{number}",
            {group: number for at, group in enumerate(GROUPS) if number >> at & 1},
        )
        for number in range(count)
    ]  # fmt: skip


def made_lists(*nodes: tuple[str, int]) -> dict[str, list[ObjectList]]:
    """The lists of so many objects of each node, as they are read."""
    store = InMemoryStore("memory://lists")
    objects = [one for node, count in nodes for one in made_objects(node, count)]
    _, lists = split_entries(store_lists_above(store, NAME, OPERATION, objects, 0))
    full = structs.replace(commit(0), lists=lists)
    read = read_chain_lists(store, Chain(counted(full))).full.lists
    return {node: [one for one in read if one.node == node] for node, _ in nodes}


def form(node: str, number: int, chosen: frozenset[int] | None = None) -> BaseForm:
    return BaseForm(node, number, frozenset({2}), frozenset({3}), None, chosen)


def listed(forms: list[BaseForm], lists: dict[str, list[ObjectList]]) -> BaseSources:
    nodes = []
    for one in forms:
        parts: list[BasePart] = [HeldBases(()), *(ListedBases.of(one, entry) for entry in lists[one.node])]
        nodes.append(NodeBases(one.number, tuple(part for part in parts if len(part))))
    return BaseSources(tuple(nodes))


@pytest.mark.parametrize("chosen", [None, frozenset({2}), frozenset({1, 3}), frozenset({9}), frozenset(GROUPS)])
def test_listed_sources_are_those_of_the_objects(chosen: frozenset[int] | None) -> None:
    lists = made_lists(("a", 8), ("b", 5))
    forms = [form("a", 0, chosen), form("b", 2, chosen)]
    found = pickle.loads(pickle.dumps(listed(forms, lists)))  # as it goes to executors
    objects = {"a": made_objects("a", 8), "b": made_objects("b", 5)}
    wanted = [
        one.source(stored)
        for one in forms
        for stored in objects[one.node]
        # A list with wanted rows alone is not looked into: so objects without any row may be there.
        if chosen is None or chosen & stored.rows.keys() or (chosen >= set(GROUPS) and not stored.rows)
    ]
    assert [one for one in found if chosen is None or one.rows] == [one for one in wanted if chosen is None or one.rows]
    sources = list(found)
    assert len(found) == len(sources)
    assert [found[number] for number in range(len(found))] == sources
    for number in range(len(found)):
        first, part = found.part_with(number)
        assert part[number - first] == sources[number]
        assert len(part) <= 3
    cursor = BaseCursor(found)
    for number in (*range(len(found)), *reversed(range(len(found)))):
        assert cursor.source(number) == sources[number]
    with pytest.raises(IndexError):
        found[len(found)]
    for number, one in ((0, "a"), (2, "b")):
        groups = frozenset(chain.from_iterable(source.groups for source in sources if source.source.node == one))
        assert found.groups_of(number) >= groups


def test_the_numbers_of_sources_with_some_rows_are_found() -> None:
    found = listed([form("a", 0), form("b", 1)], made_lists(("a", 8), ("b", 5)))
    for wanted in ({}, {0: {1}}, {0: {1, 2}, 1: {3}}, {1: {1, 2, 3}}, {0: {9}}):
        groups = {number: frozenset(some) for number, some in wanted.items()}
        expected = [
            number for number, one in enumerate(found) if groups.get(one.source.number, frozenset()) & one.groups
        ]
        numbers = found.numbers_with(groups)
        assert numbers.dtype == np.int64
        # Of a list with wanted rows alone, objects without rows are named, too.
        assert [number for number in numbers.tolist() if found[number].rows] == expected


def test_a_cursor_reads_each_list_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read, part_with = listed([form("a", 0)], made_lists(("a", 8))), list[int](), BaseSources.part_with

    def noting(self: BaseSources, number: int) -> tuple[int, tuple[BaseSource, ...]]:
        read.append(number)
        return part_with(self, number)

    monkeypatch.setattr(BaseSources, "part_with", noting)
    cursor = BaseCursor(found)
    assert [cursor.source(number) for number in range(8)] == list(found)
    assert read == [0, 3, 6]


@pytest.mark.parametrize(
    ("at_once", "begin"), [(0, "aaaa"), (1, "aaaa"), (2, "abab"), (3, "abcababdabd"), (16, "abcdabd")]
)
def test_interleaved_sources_are_each_source_once_from_many_nodes_in_turn(
    monkeypatch: pytest.MonkeyPatch, at_once: int, begin: str
) -> None:
    """A node takes the place of one that has no more."""
    counts = {"a": 8, "b": 5, "c": 1, "d": 7}
    lists = {node: [structs.replace(one, size=1) for one in some] for node, some in made_lists(*counts.items()).items()}
    monkeypatch.setattr(sources, "EXPANDED_BYTES_MAX", at_once)
    found = listed([form(node, number) for number, node in enumerate(counts)], lists)
    in_turn = list(found.interleaved())
    assert len(in_turn) == len(found) == 21
    assert "".join(one.source.node for one in in_turn).startswith(begin)
    for number in range(len(counts)):
        # Each of them once, and those of a node in their order.
        assert [one for one in in_turn if one.source.number == number] == [
            one for one in found if one.source.number == number
        ]


def test_the_first_of_interleaved_sources_are_those_of_many_nodes() -> None:
    """Of sources that are held, and of lists, those of 50 nodes come in the first of a hundred."""
    nodes = [f"n{number}" for number in range(50)]
    held = BaseSources.of(
        form(node, number).source(one) for number, node in enumerate(nodes) for one in made_objects(node, 60)
    )
    of_lists = listed(
        [form(node, number) for number, node in enumerate(nodes)], made_lists(*((node, 60) for node in nodes))
    )
    for found in (held, of_lists):
        assert {one.source.node for one in islice(found.interleaved(), 100)} == set(nodes)
        assert sum(1 for _ in found.interleaved()) == len(found) == 3000
    assert list(BaseSources().interleaved()) == []


def test_nodes_are_left_out_and_the_others_keep_their_numbers() -> None:
    found = listed([form("a", 0), form("b", 1)], made_lists(("a", 4), ("b", 5)))
    left = found.without({0})
    assert [one.source.node for one in left] == ["b"] * 5
    assert {one.source.number for one in left} == {1}
    assert list(BaseSources.of(left)) == list(left)
    assert list(BaseSources.of(found)) == list(found)
    assert list(BaseSources()) == []


def test_a_lost_list_has_no_sources() -> None:
    lists = made_lists(("a", 4))["a"]
    lost = [
        LostList(one.key, one.kind, one.node, one.size, one.digest, one.objects, one.bytes, one.rows, "missing")
        for one in lists[:1]
    ]
    found = listed([form("a", 0)], {"a": [*lost, *lists[1:]]})
    assert len(found) == len(list(found)) == 4 - lists[0].objects
    assert [found[number] for number in range(len(found))] == list(found)


def test_groups_are_numbered_as_at_the_cut() -> None:
    """Group 1 ended, and 2 is continued by 5."""
    (entry, *_) = made_lists(("a", 8))["a"]
    mapping = SchemaMapping(frozenset({3}), {2: Conversion(5, 1, (0,))}, {})
    with_mapping = replace(form("a", 0), mapping=mapping)
    assert with_mapping.groups_of(GROUPS) == {3, 5}
    assert ListedBases.of(with_mapping, entry).groups == with_mapping.groups_of(entry.rows)
    chosen = ListedBases.of(replace(with_mapping, chosen=frozenset({5})), entry)
    expected = [one.key for one in listed_objects(entry) if 2 in one.rows]
    assert [one.source.key for one in chosen.read()] == expected
    assert len(chosen) == len(expected)
    assert all(one.groups == with_mapping.groups_of(one.rows) for one in chosen.read())
