"""A check's changes have hashes instead of rows: the same from the tasks that read segments, and from Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from xxhash import xxh64_intdigest

import cutline.check.last_changes
from cutline.check.copies import Copies
from cutline.check.image_hashes import hash_local
from cutline.check.last_changes import LastChanges, changes_by_node, last_tasks
from cutline.check.reported_changes import hash_reported
from cutline.columns.bytes_column import HASH_SEED
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold import changes, limits
from cutline.snapshots.fold.changes import ENTRY, in_base_tables, keys_size, reported_shares
from cutline.snapshots.fold.fold import fold
from cutline.snapshots.fold.long_lines import LONG_LINE_BYTES
from cutline.snapshots.fold.sources import BaseSources, Sources, read_tables
from cutline.snapshots.records.chain import Chain
from cutline.storage.location import StoreLocation
from cutline.storage.open import open_store
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.spark.drawn_segments import (
    DELETED,
    INSERTED,
    NODES,
    PARTIAL,
    UPDATED,
    change,
    drawn_changes,
    keys_of,
    last_of,
    store_segments,
)
from tests.unit.made_commits import commit, counted

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

PLACES = ("node", "group", "partition", "key", "lsn", ENTRY)
LONG = b"k" * LONG_LINE_BYTES + b"\n"


@pytest.fixture(autouse=True)
def nobody_folds_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_MAX", 0)
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 10_000)


def reports_of(sources: Sources, location: StoreLocation) -> dict[str, bytes | None]:
    """What tasks report of the segments."""
    reports: dict[str, bytes | None] = {}
    tasks = last_tasks(sources)
    for one in sources.segments:
        last = LastChanges(tasks[one.source.key])
        for table in read_tables(location.open(), one.source, SEGMENT_SCHEMA):
            last.add(table)
        reports[one.source.key] = last.report()
    return reports


def last_changes(sources: Sources, reports: dict[str, bytes | None]) -> Iterator[pa.Table]:
    """The last changes of each node's rows with a key."""
    for found in changes_by_node(sources, reports):
        assert found is not None
        yield found.last


def entry(key: bytes, row: bytes) -> int:
    """Spark's xxhash64(key, row), by the library."""
    digest = xxh64_intdigest(row, xxh64_intdigest(key, int(HASH_SEED)))
    return digest - (1 << 64) if digest >> 63 else digest


def entries_of(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(bytes(row[name]) if name == "key" else row[name] for name in PLACES) for row in rows)


def test_reports_and_spark_have_the_last_rows_as_hashes(spark: SparkSession, tmp_path: Path) -> None:
    long = [(0, [change(5000, 2, b"long", INSERTED, LONG)]), (1, [change(5001, 1, b"gone", DELETED, b"")])]
    changes = [*drawn_changes(), *long]
    sources, location = store_segments(tmp_path, changes), StoreLocation(f"file://{tmp_path}")
    last = last_of(changes)
    expected = sorted(
        (node, group, 0, key, one["lsn"], entry(key, one["row"]))
        for (node, group, key), one in last.items()
        if one["op"] != DELETED
    )
    keys: dict[int, dict[int, set[bytes]]] = {}
    for node, group, key in last:
        keys.setdefault(node, {}).setdefault(group, set()).add(key)
    reported = [row for table in last_changes(sources, reports_of(sources, location)) for row in table.to_pylist()]
    assert entries_of([row for row in reported if row["op"] != DELETED]) == expected
    assert {(row["node"], row["group"], row["key"]) for row in reported} == last.keys()
    folded = fold(spark, sources, location, hashed=True)
    assert folded.images is not None
    rows = [row.asDict() for row in folded.images.collect()]
    assert (entries_of(rows), {bytes(row["row"]) for row in rows}) == (expected, {b""})
    assert (keys_of(folded), folded.long_images) == (keys, None)
    folded.release()


def test_spark_keeps_the_rows_that_it_needs(spark: SparkSession, tmp_path: Path) -> None:
    keyless, whole = change(1, 3, b"", INSERTED, b"line\n"), change(2, 1, b"k", INSERTED, b"k\tv\n")
    partial = change(3, 1, b"k", PARTIAL, b"k\t\\u\n")
    changes = [(0, [keyless, change(1, 1, b"k", UPDATED, b"k\t1\n")]), (1, [whole]), (1, [partial])]
    sources, location = store_segments(tmp_path, changes), StoreLocation(f"file://{tmp_path}")
    sources = replace(sources, bases=BaseSources(), column_counts={(1, 1): 2})
    folded = fold(spark, sources, location, hashed=True)
    assert folded.images is not None
    found = {(row["node"], row["group"]): (bytes(row["row"]), row[ENTRY]) for row in folded.images.collect()}
    assert (found[0, 1], found[0, 3]) == ((b"", entry(b"k", b"k\t1\n")), (b"line\n", None))
    assert found[1, 1][1] is None
    folded.release()


def test_what_is_too_much_or_needs_rows_is_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(folder: str, *rows: dict[str, Any]) -> tuple[Sources, dict[str, bytes | None]]:
        sources = store_segments(tmp_path / folder, [(0, list(rows))])
        return sources, reports_of(sources, StoreLocation(f"file://{tmp_path / folder}"))

    one, keyless = change(1, 1, b"k", INSERTED, b"k\n"), change(2, 3, b"", INSERTED, b"k\n")
    sources, reports = reported("keyless", one, keyless)
    (found,) = changes_by_node(sources, reports)
    assert found is not None
    assert [(row["key"], row[ENTRY]) for row in found.last.to_pylist()] == [(b"k", entry(b"k", b"k\n"))]
    assert [(row["segment"], row[ENTRY]) for row in found.lines.to_pylist()] == [(0, entry(b"", b"k\n"))]
    sources, reports = reported("one", one)
    assert list(changes_by_node(sources.without(NODES[:1]), reports)) == []
    assert [len(last) for last in last_changes(sources, reports)] == [1]
    with monkeypatch.context() as patch:
        patch.setattr("cutline.snapshots.fold.changes.REPORTED_BYTES_MAX", 0)
        patch.setattr("cutline.snapshots.fold.changes.REPORTED_BYTES_MIN", 0)
        reports = reports_of(sources, StoreLocation(f"file://{tmp_path / 'one'}"))
        assert (list(reports.values()), list(changes_by_node(sources, reports))) == ([None], [None])
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 0)
    assert last_tasks(sources) == {}
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 1)
    assert len(last_tasks(sources)) == 1


def test_all_reports_together_have_no_more_than_the_driver_should_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = store_segments(tmp_path, drawn_changes())
    count = len(sources.segments)
    shares = reported_shares(sources.segments)
    assert shares is not None
    assert changes.REPORTED_BYTES_MAX - count < sum(shares) <= changes.REPORTED_BYTES_MAX
    assert min(shares) >= changes.REPORTED_BYTES_MIN
    monkeypatch.setattr(changes, "REPORTED_BYTES_MAX", changes.REPORTED_BYTES_MIN * count)
    assert reported_shares(sources.segments) == [changes.REPORTED_BYTES_MIN] * count
    assert len(last_tasks(sources)) == count
    monkeypatch.setattr(changes, "REPORTED_BYTES_MAX", changes.REPORTED_BYTES_MIN * count - 1)
    assert last_tasks(sources) == {}


def test_what_will_not_be_reported_is_no_longer_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = store_segments(tmp_path, [(0, [change(1, 1, b"k", INSERTED, b"k\n")])])
    (one,) = sources.segments
    (table,) = [
        found for found in read_tables(open_store(f"file://{tmp_path}", {}), one.source, SEGMENT_SCHEMA) if len(found)
    ]
    last = LastChanges(replace(last_tasks(sources)[one.source.key], bytes_max=100))
    read, changes_in = list[int](), cutline.check.last_changes.changes_in

    def counting(table: pa.Table, *rest: Any) -> Any:
        read.append(len(table))
        return changes_in(table, *rest)

    monkeypatch.setattr(cutline.check.last_changes, "changes_in", counting)
    last.add(table)
    assert (last.is_complete, len(last.tables)) == (True, 2)
    for _ in range(5):
        last.add(table)
    assert (last.is_complete, last.tables, last.report()) == (False, [], None)
    assert len(read) < 5


def test_a_report_is_released_once_it_was_used(tmp_path: Path) -> None:
    sources, location = store_segments(tmp_path, drawn_changes()), StoreLocation(f"file://{tmp_path}")
    reports = reports_of(sources, location)
    found = changes_by_node(sources, reports)
    left = []
    for _ in NODES:
        next(found)
        left.append(len(reports))
    assert left == [len(sources.segments) // 2, 0]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Two copies of one shard, which have the same WAL from position 150 on."""
    monkeypatch.setattr(Copies, "since", lambda _self, _node: Lsn(150))
    monkeypatch.setattr(Copies, "recopied_since", lambda _self, _node: {})
    return Copies(NODES, dict.fromkeys(NODES, NODES[0]), Chain(counted(commit(0))))


def test_the_keys_of_all_nodes_together_are_limited(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: Copies
) -> None:
    sources, location = store_segments(tmp_path, drawn_changes()), StoreLocation(f"file://{tmp_path}")
    sizes = [keys_size(in_base_tables(last, sources)) for last in last_changes(sources, reports_of(sources, location))]
    assert min(sizes) > 0
    for too_many in (0, 1):
        monkeypatch.setattr(limits, "CHOSEN_KEYS_BYTES_MAX", sum(sizes) - too_many)
        assert (hash_reported(spark, sources, copies, reports_of(sources, location), location) is None) == bool(
            too_many
        )


def test_changes_of_a_copy_that_is_alone_are_not_hashed(spark: SparkSession, tmp_path: Path, copies: Copies) -> None:
    changes = [
        (node, [change(100, 1, key, INSERTED, key + b"\tv\n") for key in (b"5", b"12")] + [
            change(101, 1, b"3", DELETED, b""), change(102, 2, b"other", INSERTED, b"other\n"),
        ])
        for node in range(2)
    ]  # fmt: skip
    sources, location = store_segments(tmp_path, changes), StoreLocation(f"file://{tmp_path}")
    alone = replace(copies, shard={node: node for node in NODES}, fed={NODES[0]: frozenset({1})})
    reported = hash_reported(spark, sources, alone, reports_of(sources, location), location)
    assert reported is not None
    assert (reported.rows, reported.versions) == ([], [])
    assert reported.extremes == {(0, 1): (5, 12)}
    # Their keys have changed all the same.
    assert {number: set(groups) for number, groups in reported.changed.items()} == {0: {1, 2}, 1: {2}}


def test_only_the_nodes_that_have_rows_are_asked_for_their_positions(
    monkeypatch: pytest.MonkeyPatch, copies: Copies
) -> None:
    asked: list[str] = []

    def since(_copies: Copies, node: str) -> Lsn:
        asked.append(node)
        return Lsn(150)

    monkeypatch.setattr(Copies, "since", since)
    count = 4
    images = pa.table(
        {
            "node": np.full(count, 1, np.int32), "group": np.ones(count, np.int32),
            "partition": np.zeros(count, np.int32), "lsn": np.arange(count) * 100,
            "key": [b"%d" % number for number in range(count)], ENTRY: np.arange(count),
        }
    )  # fmt: skip
    found = hash_local(images, copies)
    assert asked == [NODES[1]]
    assert [[(key, value[0]) for key, value in one.as_dict().items()] for one in (found.rows, found.versions)] == [
        [((1, 1, 0), 4)],
        [((1, 1, 0), 2)],
    ]
