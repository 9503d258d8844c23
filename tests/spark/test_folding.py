"""Folding by Spark: rows without a key are counted by line, and data that can't be read is never a missing row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cutline.snapshots.fold.changed_keys
import cutline.snapshots.fold.limits
from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Group
from cutline.restore.rows.load import Feed, LoadTarget, load_images
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.changed_keys import KeyFilter, find_valid_rows
from cutline.snapshots.fold.changes import CHANGE_ROWS
from cutline.snapshots.fold.fold import Fold, _base_rows, _fold_multisets, fold
from cutline.snapshots.fold.long_lines import NO_PLACE
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, BaseSources, SegmentSource, Source, Sources, read_tables
from cutline.storage.digest import digest
from cutline.storage.location import StoreLocation
from cutline.storage.open import open_store
from cutline.wal.segments.archive import SegmentRange
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment, parquet_options
from tests.run.soak import first
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GROUP = 7
INSERTED, DELETED = ord("I"), ord("D")


@pytest.fixture(autouse=True)
def spark_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would fold so few changes."""
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_MAX", 0)


def fold_changes(spark: SparkSession, changes: list[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
    """Fold the changes (op, line) of one group without a base; return the remaining rows (group, partition, line)."""
    rows = [(0, GROUP, 0, b"", number, 0, op, line, NO_PLACE) for number, (op, line) in enumerate(changes)]
    fold = Fold(None, {}, [], [])
    sources = Sources(("a",), BaseSources(), (), frozenset({GROUP}), {})
    base_rows = _base_rows(spark, sources, StoreLocation("memory://nothing"), fold)
    _fold_multisets(spark.createDataFrame(rows, CHANGE_ROWS), len(rows), base_rows, fold)
    try:
        assert fold.images is not None
        return sorted((row["group"], row["partition"], bytes(row["row"])) for row in fold.images.collect())
    finally:
        fold.release()


def test_a_line_remains_as_often_as_it_was_inserted_and_not_deleted(spark: SparkSession) -> None:
    changes = [(INSERTED, b"x\n"), (INSERTED, b"y\n"), (INSERTED, b"x\n"), (DELETED, b"y\n"), (INSERTED, b"x\n")]
    assert fold_changes(spark, [*changes, (DELETED, b"x\n")]) == [(GROUP, 0, b"x\n"), (GROUP, 0, b"x\n")]


def test_deleting_a_line_that_never_existed_is_a_problem(spark: SparkSession) -> None:
    assert fold_changes(spark, [(INSERTED, b"x\n"), (DELETED, b"gone\n")]) == [
        (PROBLEM, GROUP, b"gone\n"),
        (GROUP, 0, b"x\n"),
    ]


def store_multiset(folder: Path) -> Sources:
    """Store a group without a key: the base has a line three times, in two objects, and it was deleted twice since."""
    store = open_store(f"file://{folder}", {})
    bases = []
    for number, rows in enumerate((2, 1)):
        table = pa.table([[GROUP] * rows, [0] * rows, [b""] * rows, [b"x\n"] * rows], schema=BASE_SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, **parquet_options(table.schema))
        body = sink.getvalue().to_pybytes()
        store.create(f"base/{number}", body)
        source = Source(f"base/{number}", "a", 0, len(body), digest(body))
        bases.append(BaseSource(source, {GROUP: rows}, multisets=frozenset({GROUP})))
    row = {"end_lsn": 11, "seq": 0, "xid": 1, "group": GROUP, "partition": 0, "key": b"", "op": DELETED, "row": b"x\n"}
    changes = pa.Table.from_pylist([row | {"lsn": lsn} for lsn in (10, 11)], schema=SEGMENT_SCHEMA)
    none = pa.Table.from_batches([], SEGMENT_SCHEMA)
    segment = create_segment(
        store, "wal", 1, SegmentRange("a", "op", Lsn(0), Lsn(100)), (changes, none), continued=None
    ).segment
    held = SegmentSource(Source(segment.key, "a", 0, segment.size, segment.digest), segment, Lsn(100), frozenset(), {})
    return Sources(("a",), BaseSources.of(bases), (held,), frozenset({GROUP}), {(0, GROUP): 1})


def lines_of(folded: Fold) -> list[tuple[int, bytes]]:
    assert folded.images is not None
    return [(row["group"], bytes(row["row"])) for row in folded.images.collect()]


def test_a_base_object_that_cant_be_read_is_a_problem(spark: SparkSession, tmp_path: Path) -> None:
    sources, location = store_multiset(tmp_path), StoreLocation(f"file://{tmp_path}")
    whole = fold(spark, sources, location)
    assert (lines_of(whole), whole.problems) == ([(GROUP, b"x\n")], [])
    whole.release()
    flip_byte(tmp_path / "base/1")
    folded = fold(spark, sources, location)
    assert [one["details"]["object"] for one in folded.problems] == ["base/1"]
    folded.release()


@pytest.mark.parametrize("key", first(["base/1", "wal/00000000000000000001.parquet"]))
def test_an_object_damaged_after_its_first_read_ends_the_load(spark: SparkSession, tmp_path: Path, key: str) -> None:
    sources, location = store_multiset(tmp_path), StoreLocation(f"file://{tmp_path}")
    folded = fold(spark, sources, location)
    assert folded.problems == []
    # As if the executors with the folded changes were lost: Spark reads the objects again.
    folded.release()
    flip_byte(tmp_path / key)
    assert folded.images is not None
    batches = folded.images.select("node", "group", "row", "key").toArrow().to_batches()
    group = Group(GROUP, "public", "log", "full", 0, ())
    feeds = {0: Feed({0: LoadTarget(Node("a", "postgresql:///nowhere"), {GROUP: group}, "cutline.ledger")})}
    # A batch with such a row is refused before any connection is opened.
    (report,) = load_images(iter([pa.Table.from_batches(batches).combine_chunks().to_batches()[0]]), feeds, "images-0")
    assert key in report.to_pylist()[0]["problem"]


def test_a_segment_of_keyed_rows_damaged_after_its_first_read_is_a_problem(spark: SparkSession, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}", {})
    row = {"lsn": 10, "end_lsn": 11, "seq": 0, "xid": 1, "group": 1, "partition": 0, "key": b"k", "op": ord("U")}
    changes = pa.Table.from_pylist([row | {"row": b"k\n"}], schema=SEGMENT_SCHEMA)
    none = pa.Table.from_batches([], SEGMENT_SCHEMA)
    segment = create_segment(
        store, "wal", 1, SegmentRange("a", "op", Lsn(0), Lsn(100)), (changes, none), continued=None
    ).segment
    held = SegmentSource(Source(segment.key, "a", 0, segment.size, segment.digest), segment, Lsn(100), frozenset(), {})
    sources = Sources(("a",), BaseSources(), (held,), frozenset(), {(0, 1): 1})
    folded = fold(spark, sources, StoreLocation(f"file://{tmp_path}"))
    assert lines_of(folded) == [(1, b"k\n")]
    folded.release()
    flip_byte(tmp_path / segment.key)
    assert [group for group, _ in lines_of(folded)] == [PROBLEM]


KEYED, BASE_KEYS = 3, 300


def store_keys(folder: Path) -> Sources:
    """Store a keyed group and a multiset of 300 rows each; some were updated, some deleted, and new ones inserted."""
    store = open_store(f"file://{folder}", {})
    keys = [b"%d" % number for number in range(BASE_KEYS)]
    lines = [key + b"\told\n" for key in keys]
    columns = [[KEYED] * BASE_KEYS + [GROUP] * BASE_KEYS, [0] * 2 * BASE_KEYS, keys + [b""] * BASE_KEYS, lines * 2]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=BASE_SCHEMA), sink, **parquet_options(BASE_SCHEMA))
    body = sink.getvalue().to_pybytes()
    store.create("base/1", body)
    source = Source("base/1", "a", 0, len(body), digest(body))
    base = BaseSource(source, {KEYED: BASE_KEYS, GROUP: BASE_KEYS}, multisets=frozenset({GROUP}))
    every = {"lsn": 10, "end_lsn": 11, "seq": 0, "xid": 1, "partition": 0}
    changed = [(KEYED, b"%d" % n, ord("U"), b"%d\tnew\n" % n) for n in range(280, 320)]
    changed += [(KEYED, b"%d" % n, DELETED, b"") for n in range(20)]
    changed += [(GROUP, b"", DELETED, lines[n]) for n in range(20)] + [(GROUP, b"", INSERTED, lines[-1])]
    rows = [every | {"group": g, "key": key, "op": op, "row": row} for g, key, op, row in changed]
    tables = (pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA), pa.Table.from_batches([], SEGMENT_SCHEMA))
    segment = create_segment(store, "wal", 1, SegmentRange("a", "op", Lsn(0), Lsn(100)), tables, continued=None).segment
    held = SegmentSource(Source(segment.key, "a", 0, segment.size, segment.digest), segment, Lsn(100), frozenset(), {})
    return Sources(("a",), BaseSources.of([base]), (held,), frozenset({GROUP}), {(0, KEYED): 2, (0, GROUP): 2})


def test_more_keys_than_the_driver_holds_give_the_same_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = store_keys(tmp_path)
    monkeypatch.setattr(cutline.snapshots.fold.changed_keys, "COUNTED_FROM", 0)
    monkeypatch.setattr(cutline.snapshots.fold.changed_keys, "KEYS_BYTES_MAX", 0)
    # So few bits that unchanged rows of all kinds are taken for changed.
    monkeypatch.setattr(cutline.snapshots.fold.changed_keys, "BITS_PER_KEY", 1)
    folded = fold(spark, sources, StoreLocation(f"file://{tmp_path}"))
    assert {type(found) for found in folded.changed[0].values()} == {KeyFilter}
    (table,) = read_tables(open_store(f"file://{tmp_path}", {}), sources.bases[0].source, BASE_SCHEMA)
    (batch,) = table.to_batches()
    holds = find_valid_rows(batch, sources.bases[0], folded.changed[0])
    assert 0 < holds.sum() < 2 * BASE_KEYS - 60
    kept = batch.filter(pa.array(holds)).select(["group", "row"]).to_pylist()
    found = lines_of(folded) + [(row["group"], row["row"]) for row in kept]
    new = [b"%d\tnew\n" % number for number in range(280, 320)]
    old = [b"%d\told\n" % number for number in range(20, BASE_KEYS)]
    assert sorted(found) == sorted(
        [(KEYED, line) for line in [*old[:260], *new]] + [(GROUP, line) for line in [*old, old[-1]]]
    )
    folded.release()
