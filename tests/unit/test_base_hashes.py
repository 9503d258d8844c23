"""Base objects of several copies with equal content are expanded once, and each copy is judged as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from xxhash import xxh64_intdigest

from cutline.check import base_hashes
from cutline.check.base_hashes import BaseHashReport, BaseHashTask, NodeBase, equal_bases, hash_base
from cutline.check.deleted_rows import ExpectedRows
from cutline.check.hashing import HALF
from cutline.check.required_values import places_of
from cutline.check.stored_rows import salted
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA, ObjectWriter, base_table
from cutline.snapshots.fold.changed_keys import KeyFilter, overlays
from cutline.snapshots.fold.schema_at_cut import SchemaMapping
from cutline.snapshots.fold.sources import BaseSource, BaseSources, HeldBases, NodeBases, Source, read_tables
from cutline.snapshots.records.commit import BASE
from cutline.spark.task_processes import InDriver
from cutline.storage.location import StoreLocation

GROUP = 3
TABLE = Group(GROUP, "public", "t", "default", 1, (Column("id", "bigint", 20, -1, 0), Column("v", "text", 25, -1, 1)))
LINES = [b"%d\tvalue %d\n" % (number, number) for number in range(100)]
NODES = ("s1", "s1-b1", "s1-b2")


@pytest.fixture
def location(tmp_path: Path) -> StoreLocation:
    return StoreLocation(f"file://{tmp_path}")


def stored(location: StoreLocation, node: str, lines: Sequence[bytes] = LINES) -> BaseSource:
    """A base object of the node, as a copy stores it."""
    writer = ObjectWriter(location.open(), BASE_SCHEMA, BASE, node, f"base/{node}", 1 << 20, 1 << 20)
    writer.write(base_table(TABLE, from_list(lines)))
    writer.count(GROUP, len(lines), 0)
    writer.close()
    (one,) = writer.objects
    return BaseSource(Source(one.key, node, NODES.index(node), one.size, one.digest, one.rows), one.rows)


def task_of(location: StoreLocation, *objects: NodeBase, everywhere: bool = True) -> BaseHashTask:
    return BaseHashTask(objects, InDriver(TableForms.of([TABLE])), location, is_everywhere=everywhere)


def changed_keys(number: int, *keys: bytes) -> InDriver:
    rows = [{"node": number, "group": GROUP, "key": key} for key in keys]
    schema = pa.schema([("node", pa.int32()), ("group", pa.int32()), ("key", pa.binary())])
    return InDriver(overlays(pa.Table.from_pylist(rows, schema))[number])


def sums_of(number: int, lines: Sequence[bytes]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The combined hash of lines, by the library for one value at a time."""
    hashes = [xxh64_intdigest(line, xxh64_intdigest(line.partition(b"\t")[0], 42)) for line in lines]
    xor = 0
    for one in hashes:
        xor ^= one
    signed = xor - (1 << 64) if xor >> 63 else xor
    low, high = sum(one & int(HALF) for one in hashes), sum(one >> 32 for one in hashes)
    return {(number, GROUP, 0): (len(lines), signed, low, high)}


def sums(report: BaseHashReport) -> dict[tuple[int, ...], tuple[int, ...]]:
    assert report.sums is not None, report.problem
    return report.sums.as_dict()


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes whose objects are expanded."""
    nodes: list[str] = []

    def noting(store: Any, source: Source, schema: pa.Schema) -> Iterator[pa.Table]:
        nodes.append(source.node)
        return read_tables(store, source, schema)

    monkeypatch.setattr(base_hashes, "read_tables", noting)
    return nodes


def test_copies_of_the_same_rows_are_equal_objects_which_are_expanded_once(
    location: StoreLocation, expanded: list[str]
) -> None:
    bases = [stored(location, node) for node in NODES]
    assert len({one.source.digest for one in bases}) == 1
    (equal,) = equal_bases(BaseSources.of(bases), dict.fromkeys(range(3), "s1"))
    assert equal == tuple(bases)
    reports = hash_base(task_of(location, *map(NodeBase, equal)))
    assert [(one.number, one.rows, one.bytes) for one in reports] == [
        (number, len(LINES), bases[0].source.size) for number in range(3)
    ]
    # All copies have them, so they count, but nothing is to be compared.
    assert [sums(one) for one in reports] == [{(number, GROUP, 0): (len(LINES), 0, 0, 0)} for number in range(3)]
    assert expanded == ["s1"]


@pytest.mark.parametrize(
    ("nodes", "copies", "is_read_once"),
    [
        # Two copies begin with one object: nothing else has its rows.
        (("s1", "s1"), 2, True),
        # A third copy has rows of its own: equal ones, or others.
        (("s1", "s1", "s1-b2"), 3, False),
        (("s1", "s1"), 3, False),
        (("s1", "s1-b1"), 2, False),
        (("s1",), 1, False),
    ],
)
def test_rows_of_an_object_that_all_copies_share_are_not_compared(
    location: StoreLocation, nodes: tuple[str, ...], copies: int, *, is_read_once: bool
) -> None:
    of_nodes = {node: stored(location, node) for node in {*nodes}}
    objects = [
        NodeBase(BaseSource(replace(of_nodes[node].source, number=number), of_nodes[node].rows))
        for number, node in enumerate(nodes)
    ]
    reports = hash_base(replace(task_of(location, *objects), copies=copies))
    assert [one.is_read_once for one in reports] == [is_read_once] * len(nodes)
    assert sum(one.rows for one in reports) == len({*nodes}) * len(LINES)


def test_rows_that_another_copy_lacks_are_hashed(location: StoreLocation) -> None:
    both = [stored(location, node) for node in NODES[:2]]
    reports = hash_base(task_of(location, *map(NodeBase, both), everywhere=False))
    assert [sums(one) for one in reports] == [sums_of(number, LINES) for number in range(2)]


def test_rows_that_changed_in_one_copy_are_hashed_in_both(location: StoreLocation) -> None:
    one, other = (stored(location, node) for node in NODES[:2])
    objects = NodeBase(one, changed_keys(0, b"7", b"8")), NodeBase(other, changed_keys(1, b"7"))
    left = [[line for line in LINES if line.split(b"\t")[0] not in keys] for keys in ((b"7", b"8"), (b"7",))]
    assert [sums(report) for report in hash_base(task_of(location, *objects))] == [
        sums_of(number, lines) for number, lines in enumerate(left)
    ]


def test_rows_that_changed_in_every_copy_do_not_count(location: StoreLocation) -> None:
    one, other = (stored(location, node) for node in NODES[:2])
    objects = NodeBase(one, changed_keys(0, b"7")), NodeBase(other, changed_keys(1, b"7"))
    assert [sums(report) for report in hash_base(task_of(location, *objects))] == [
        {(number, GROUP, 0): (len(LINES) - 1, 0, 0, 0)} for number in range(2)
    ]


def test_each_node_has_its_own_deletes_and_extremes(location: StoreLocation) -> None:
    one, other = (stored(location, node) for node in NODES[:2])
    hashes = salted(xxhash64(from_list([b"7"])), np.array([GROUP]))
    expected = InDriver(ExpectedRows(hashes, np.array([GROUP]), np.array([1])))
    objects = (
        NodeBase(one, changed_keys(0, b"7"), frozenset({GROUP}), expected),
        NodeBase(other, changed_keys(1, b"99"), frozenset({GROUP})),
    )
    first, second = hash_base(task_of(location, *objects))
    assert first.deleted is not None
    assert (first.deleted.tolist(), second.deleted) == ([0], None)
    assert first.extremes == {(0, GROUP): (0, 99)}
    assert second.extremes == {(1, GROUP): (0, 98)}


@pytest.mark.parametrize("damaged", NODES)
def test_damage_is_found_in_the_copy_that_has_it(location: StoreLocation, damaged: str) -> None:
    bases = [stored(location, node) for node in NODES]
    path = Path(location.url.removeprefix("file://")) / bases[NODES.index(damaged)].source.key
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    reports = hash_base(task_of(location, *map(NodeBase, bases)))
    assert [one.problem["details"]["node"] if one.problem else None for one in reports] == [
        node if node == damaged else None for node in NODES
    ]
    # Alone, each of the others is hashed.
    assert [sums(one) for one in reports if one.problem is None] == [
        sums_of(number, LINES) for number, node in enumerate(NODES) if node != damaged
    ]


def test_rows_that_contradict_their_table_are_damage_of_every_copy_that_has_them(location: StoreLocation) -> None:
    bases = [stored(location, node, [*LINES, b"x\tno number\n"]) for node in NODES[:2]]
    reports = hash_base(task_of(location, *map(NodeBase, bases)))
    assert [one.problem["details"]["node"] if one.problem else None for one in reports] == list(NODES[:2])


def test_rows_of_a_table_that_one_copy_has_truncated_are_hashed_for_the_other(location: StoreLocation) -> None:
    one, other = (stored(location, node) for node in NODES[:2])
    reports = hash_base(task_of(location, NodeBase(one), NodeBase(replace(other, truncated=frozenset({GROUP})))))
    assert [sums(report) for report in reports] == [sums_of(0, LINES), {}]


def test_a_value_that_is_missing_is_damage_only_where_its_row_is_part_of_the_state(location: StoreLocation) -> None:
    bases = [stored(location, node, [*LINES, b"100\t\\N\n"]) for node in NODES[:2]]
    objects = NodeBase(bases[0], changed_keys(0, b"100")), NodeBase(bases[1])
    task = replace(task_of(location, *objects), required=InDriver(places_of({GROUP: frozenset({1})})))
    first, second = hash_base(task)
    assert sums(first) == sums_of(0, LINES)
    assert second.problem is not None
    assert "NULL" in second.problem["message"]


def test_filters_may_match_other_keys_in_each_copy(location: StoreLocation) -> None:
    """What a filter leaves out of one copy only is in that copy's images, so it is hashed in the other."""
    one, other = (stored(location, node) for node in NODES[:2])
    every, none = (InDriver({GROUP: KeyFilter(np.array([words], np.uint64))}) for words in (2**64 - 1, 0))
    reports = hash_base(task_of(location, NodeBase(one, every), NodeBase(other, none)))
    assert [sums(report) for report in reports] == [{}, sums_of(1, LINES)]


def with_digest(node: str, number: int, digest: str, rows: int = 1) -> BaseSource:
    return BaseSource(Source(f"{node}-{digest}-{rows}", node, number, 10, digest), {GROUP: rows})


def test_only_objects_of_the_same_shard_are_grouped() -> None:
    one, other = with_digest("s1", 0, "d"), with_digest("s2", 1, "d")
    assert list(equal_bases(BaseSources.of([one, other]), {0: "s1", 1: "s2"})) == [(one,), (other,)]


def test_two_equal_objects_of_a_node_are_two() -> None:
    first, second = (with_digest("s1", 0, "d") for _ in range(2))
    third, fourth = (with_digest("s1-b1", 1, "d") for _ in range(2))
    groups = list(equal_bases(BaseSources.of([first, second, third, fourth]), {0: "s1", 1: "s1"}))
    assert groups == [(first, third), (second, fourth)]


def test_objects_that_commits_describe_in_different_ways_are_not_equal() -> None:
    one, other = with_digest("s1", 0, "d"), with_digest("s1-b1", 1, "d", rows=2)
    converted = replace(with_digest("s1-b2", 2, "d"), mapping=SchemaMapping(frozenset({GROUP})))
    groups = list(equal_bases(BaseSources.of([one, other, converted]), dict.fromkeys(range(3), "s1")))
    assert groups == [(one,), (other,), (converted,)]


def test_copies_taken_at_other_positions_are_equal_objects(location: StoreLocation, expanded: list[str]) -> None:
    """Of a table that was copied again. The position is about changes, and rows are converted in the same way."""
    mappings = [SchemaMapping(frozenset({GROUP}), {}, {GROUP: Lsn(at)}) for at in (100, 200)]
    bases = [replace(stored(location, node), mapping=one) for node, one in zip(NODES, mappings, strict=False)]
    (equal,) = equal_bases(BaseSources.of(bases), dict.fromkeys(range(2), "s1"))
    reports = hash_base(task_of(location, *map(NodeBase, equal)))
    assert [sums(one) for one in reports] == [{(number, GROUP, 0): (len(LINES), 0, 0, 0)} for number in range(2)]
    assert expanded == ["s1"]


def test_every_object_of_every_part_is_read_once() -> None:
    """One node has more parts than the other, and an object that the other has elsewhere."""
    parts = [
        [HeldBases(tuple(with_digest("s1", 0, f"d{at}") for at in some)) for some in ((1, 2), (3,), (4,))],
        [HeldBases(tuple(with_digest("s1-b1", 1, f"d{at}") for at in some)) for some in ((2, 3), (5,))],
    ]
    bases = BaseSources(tuple(NodeBases(number, tuple(some)) for number, some in enumerate(parts)))
    groups = [tuple(one.source.key for one in group) for group in equal_bases(bases, {0: "s1", 1: "s1"})]
    assert groups == [
        ("s1-d1-1",), ("s1-d2-1", "s1-b1-d2-1"), ("s1-b1-d3-1",), ("s1-d3-1",), ("s1-b1-d5-1",), ("s1-d4-1",),
    ]  # fmt: skip
