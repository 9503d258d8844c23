"""Folding rows with long lines: none of them goes through Spark, and all are in the result."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from pyspark.serializers import CloudPickleSerializer

import cutline.check.partitions
import cutline.restore.rows.jobs
from cutline.check.copies import Copies
from cutline.check.partitions import hash_folded, hash_images
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.columns.python_workers import map_batches
from cutline.fleet.lsn import Lsn
from cutline.restore.rows.jobs import Spread, load_long_images
from cutline.restore.rows.load import Feed
from cutline.restore.rows.rounds import LoadEnd
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import changed_keys, key_history, limits
from cutline.snapshots.fold.changed_keys import KeyFilter, KeySet, find_valid_rows
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader
from cutline.snapshots.fold.long_lines import LONG_LINE_BYTES
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, BaseSources, SegmentSource, Source, Sources, problem_of
from cutline.snapshots.records.chain import Chain
from cutline.storage.digest import digest
from cutline.storage.location import StoreLocation
from cutline.storage.open import open_store
from cutline.wal.segments.archive import SegmentRange
from cutline.wal.segments.segments import (
    DELETE,
    INSERT,
    PARTIAL,
    SEGMENT_SCHEMA,
    UPSERT,
    create_segment,
    parquet_options,
)
from tests.run.soak import first
from tests.stores.damage import flip_byte
from tests.unit.made_commits import commit, counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYED, BAG = 3, 7
A, B, C = (letter * (LONG_LINE_BYTES + 1) for letter in (b"a", b"b", b"c"))
BASE = [(KEYED, b"%d" % n, b"%d\told\t%s\n" % (n, A)) for n in range(5)] + [
    (BAG, b"", line) for line in (A + b"\n", A + b"\n", B + b"\n", B + b"\n", b"short\n")
]
# In this order, in two segments: 0 is unchanged; 1 keeps its long value; 2 becomes 9 and keeps its; 3 gets another one
# and is deleted; 4 gets another one, then keeps it; 5 is new. 6 has no earlier image.
CHANGES = [
    [
        (KEYED, b"1", PARTIAL, b"1\tnew\t\\u\n"),
        (KEYED, b"2", DELETE, b"9\n"),
        (KEYED, b"9", PARTIAL, b"9\tmoved\t\\u\n"),
        (KEYED, b"4", UPSERT, b"4\tonce\t%s\n" % B),
        (BAG, b"", DELETE, A + b"\n"),
        (BAG, b"", INSERT, C + b"\n"),
    ],
    [
        (KEYED, b"3", UPSERT, b"3\tnew\t%s\n" % C),
        (KEYED, b"3", DELETE, b""),
        (KEYED, b"4", PARTIAL, b"4\ttwice\t\\u\n"),
        (KEYED, b"5", UPSERT, b"5\tcame\t%s\n" % C),
        (KEYED, b"6", PARTIAL, b"6\t\\u\t%s\n" % C),
        (BAG, b"", DELETE, b"short\n"),
        (BAG, b"", INSERT, C + b"\n"),
        (BAG, b"", DELETE, B + b"\n"),
        (BAG, b"", DELETE, B + b"\n"),
    ],
]
EXPECTED = [
    (KEYED, b"0\told\t%s\n" % A),
    (KEYED, b"1\tnew\t%s\n" % A),
    (KEYED, b"4\ttwice\t%s\n" % B),
    (KEYED, b"5\tcame\t%s\n" % C),
    (KEYED, b"9\tmoved\t%s\n" % A),
    *((BAG, line + b"\n") for line in (A, C, C)),
]


@pytest.fixture(autouse=True)
def spark_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would fold so few changes, and hold their lines."""
    monkeypatch.setattr(limits, "CHANGES_MAX", 0)


def store_chain(folder: Path) -> Sources:
    store = open_store(f"file://{folder}", {})
    columns = [[row[0] for row in BASE], [0] * len(BASE), [row[1] for row in BASE], [row[2] for row in BASE]]
    sink = pa.BufferOutputStream()
    table = pa.table(columns, schema=BASE_SCHEMA)
    pq.write_table(table, sink, row_group_size=3, **parquet_options(BASE_SCHEMA))
    body = sink.getvalue().to_pybytes()
    store.create("base/1", body)
    counts = {KEYED: 5, BAG: 5}
    base = BaseSource(Source("base/1", "a", 0, len(body), digest(body)), counts, multisets=frozenset({BAG}))
    segments = []
    for number, changes in enumerate(CHANGES, 1):
        lsn = 10 * number
        every = {"lsn": lsn, "end_lsn": lsn + 1, "xid": number, "partition": 0}
        rows = [
            every | {"seq": seq, "group": group, "key": key, "op": op, "row": row}
            for seq, (group, key, op, row) in enumerate(changes)
        ]
        tables = (pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA), pa.Table.from_batches([], SEGMENT_SCHEMA))
        held = SegmentRange("a", "op", Lsn(lsn - 10), Lsn(lsn))
        one = create_segment(store, "wal", number, held, tables, continued=None).segment
        segments.append(SegmentSource(Source(one.key, "a", 0, one.size, one.digest), one, Lsn(100), frozenset(), {}))
    return Sources(("a",), BaseSources.of([base]), tuple(segments), frozenset({BAG}), {(0, KEYED): 3, (0, BAG): 1})


def long_rows(folded: Fold, sources: Sources, location: StoreLocation) -> list[dict[str, Any]]:
    assert folded.long_images is not None
    batches = folded.long_images.toArrow().to_batches()
    read = long_image_reader(sources, location).read_images(batches)
    return [row for batch in read for row in batch.to_pylist()]


@pytest.mark.parametrize("more_than_the_driver_holds", first([False, True]))
def test_long_lines_stay_in_the_store_and_are_read_from_there(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, more_than_the_driver_holds: bool
) -> None:
    if more_than_the_driver_holds:
        for module, name in (
            (changed_keys, "COUNTED_FROM"),
            (changed_keys, "KEYS_BYTES_MAX"),
            (key_history, "BROADCAST_KEYS_MAX"),
        ):
            monkeypatch.setattr(module, name, 0)
    sources, location = store_chain(tmp_path), StoreLocation(f"file://{tmp_path}")
    folded = fold(spark, sources, location)
    assert folded.problems == []
    for frame in folded.cached:
        # Everything that Spark holds: changes, last images, base rows and histories.
        assert all(len(row["row"]) <= LONG_LINE_BYTES for row in frame.collect() if "row" in frame.columns)
    assert folded.images is not None
    found = [(row["group"], bytes(row["row"])) for row in folded.images.collect()]
    assert found == []
    rows = long_rows(folded, sources, location)
    lacking = [(row["partition"], row["key"]) for row in rows if row["group"] == PROBLEM]
    assert lacking == [(KEYED, b"6")]
    found = [(row["group"], row["row"]) for row in rows if row["group"] != PROBLEM]
    base = pa.table(list(zip(*((g, 0, key, row) for g, key, row in BASE), strict=True)), schema=BASE_SCHEMA)
    (batch,) = base.to_batches()
    holds = find_valid_rows(batch, sources.bases[0], folded.changed[0])
    kept = [(group, row) for (group, _, row), is_kept in zip(BASE, holds, strict=True) if is_kept]
    assert sorted(found + kept) == sorted(EXPECTED)
    assert {type(keys) for keys in folded.changed[0].values()} == {KeyFilter if more_than_the_driver_holds else KeySet}
    assert_hashes(folded, sources, location, rows)
    folded.release()


def assert_hashes(folded: Fold, sources: Sources, location: StoreLocation, rows: list[dict[str, Any]]) -> None:
    """Check that the hashes are those of the rows, independent of the batches."""
    assert folded.long_images is not None
    batches = folded.long_images.toArrow().to_batches()
    hashed = pa.Table.from_batches(hash_images(iter(batches), long_image_reader(sources, location)))
    keys = xxhash64(from_list([row["key"] for row in rows]))
    expected = xxhash64(from_list([row["row"] for row in rows]), keys).view("int64").tolist()
    assert hashed["entry"].to_pylist() == expected


@pytest.mark.parametrize("key", first(["base/1", "wal/00000000000000000002.parquet"]))
def test_a_long_line_damaged_after_its_first_read_is_a_problem(spark: SparkSession, tmp_path: Path, key: str) -> None:
    sources, location = store_chain(tmp_path), StoreLocation(f"file://{tmp_path}")
    folded = fold(spark, sources, location)
    images = long_rows(folded, sources, location)
    assert {row["group"] for row in images} == {KEYED, BAG, PROBLEM}
    flip_byte(tmp_path / key)
    reports = [problem_of(row["row"]) for row in long_rows(folded, sources, location) if row["group"] == PROBLEM]
    assert key in [report["details"]["object"] for report in reports if report]
    folded.release()


def test_what_tasks_need_to_read_long_images_is_broadcast(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of a check, and one of a restore, takes no list of objects with it."""
    sent: list[int] = []

    def only_planned(_session: object, frame: Any) -> LoadEnd:
        with frame(None):
            return LoadEnd(Counter[int]())

    def noting(rows: DataFrame, work: Any, schema: str) -> DataFrame:
        sent.append(len(CloudPickleSerializer().dumps(work)))
        return map_batches(rows, work, schema)

    monkeypatch.setattr(cutline.check.partitions, "map_batches", noting)
    monkeypatch.setattr(cutline.restore.rows.jobs, "map_batches", noting)
    monkeypatch.setattr(cutline.restore.rows.jobs, "_run", only_planned)
    monkeypatch.setattr(Copies, "since", lambda _self, _node: Lsn(0))
    monkeypatch.setattr(Copies, "recopied_since", lambda _self, _node: {})
    sources, location = store_chain(tmp_path), StoreLocation(f"file://{tmp_path}")
    unread = [BaseSource(Source(f"base/{number}", "a", 0, 1, ""), {1: 1}) for number in range(2, 3000)]
    bases = BaseSources.of([*sources.bases, *unread])
    sources = replace(sources, bases=bases)
    folded = fold(spark, sources, location, hashed=True)
    assert folded.images is not None
    assert folded.long_images is not None
    reader = long_image_reader(sources, location)
    copies = Copies(("a",), {"a": "a"}, Chain(counted(commit(0))))
    hash_folded(folded.images, folded, copies, reader)
    load_long_images(spark, folded.long_images, {0: Feed({})}, Spread(1, 1), reader)
    assert len(sent) == 2
    assert max(sent) < len(pickle.dumps(bases)) / 10
    folded.release()
