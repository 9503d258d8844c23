"""The driver folds few changes to the same rows and the same changed keys as Spark does, and leaves all else to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import snapshots.fold.limits
from fleet.lsn import Lsn
from snapshots.fold.fold import Fold, fold
from snapshots.fold.long_lines import LONG_LINE_BYTES
from snapshots.fold.overlay import KeySet
from snapshots.fold.sources import SegmentSource, Source, Sources
from storage.location import StoreLocation
from storage.open import open_store
from tests.run.soak import SEED
from tests.stores.damage import flip_byte
from wal.segments.archive import SegmentRange
from wal.segments.segment_schema import SEGMENT_SCHEMA
from wal.segments.segments import create_segment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INSERTED, UPDATED, DELETED, PARTIAL = (ord(letter) for letter in "IUDu")
NODES, GROUPS, KEYS, SEGMENTS = ("a", "b"), (1, 2), 40, 4
Change = dict[str, Any]


def change(lsn: int, group: int, key: bytes, op: int, row: bytes) -> Change:
    return {
        "lsn": lsn, "end_lsn": lsn + 1, "seq": 0, "xid": 1, "group": group, "partition": 0, "key": key, "op": op,
        "row": row,
    }  # fmt: skip


def store_segments(folder: Path, changes: list[tuple[int, list[Change]]]) -> Sources:
    """Store one segment for each (node number, changes); group 3 has no key."""
    store = open_store(f"file://{folder}", {})
    held: list[SegmentSource] = []
    none = pa.Table.from_batches([], SEGMENT_SCHEMA)
    for number, (node, rows) in enumerate(changes):
        tables = (pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA), none)
        place = SegmentRange(NODES[node], "op", Lsn(0), Lsn(10_000))
        segment = create_segment(store, f"wal-{number}", 1, place, tables).segment
        source = Source(segment.key, NODES[node], node, segment.size, segment.digest)
        held.append(SegmentSource(source, segment, Lsn(10_000), frozenset(), {}))
    return Sources(NODES, (), tuple(held), frozenset({3}), {(0, 1): 2})


def drawn_changes() -> list[tuple[int, list[Change]]]:
    """Changes of few keys on two nodes, in segments in no order of time."""
    drawn, segments = random.Random(SEED), []
    for number in range(SEGMENTS * len(NODES)):
        moments = range(number // 2 * 100 + 1, number // 2 * 100 + 100)
        rows: list[Change] = []
        for lsn in moments:
            key = b"%d" % drawn.randrange(KEYS)
            op = drawn.choice((INSERTED, UPDATED, DELETED))
            rows.append(change(lsn, drawn.choice(GROUPS), key, op, b"" if op == DELETED else key + b"\t%d\n" % lsn))
        segments.append((number % 2, rows))
    drawn.shuffle(segments)
    return segments


def rows_of(spark: SparkSession, folded: Fold) -> list[tuple[Any, ...]]:
    folded.hand_over(spark)
    assert folded.images is not None
    return sorted(
        tuple(bytes(one) if isinstance(one, bytearray) else one for one in row) for row in folded.images.collect()
    )


def keys_of(folded: Fold) -> dict[int, dict[int, set[bytes]]]:
    found: dict[int, dict[int, set[bytes]]] = {}
    for node, of_groups in folded.changed.items():
        for group, keys in of_groups.items():
            assert isinstance(keys, KeySet)
            found.setdefault(node, {})[group] = set(keys.keys.to_arrow().to_pylist())
    return found


def test_the_driver_folds_what_spark_folds_and_both_what_the_changes_say(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = drawn_changes()
    sources, location = store_segments(tmp_path, changes), StoreLocation(f"file://{tmp_path}")
    last: dict[tuple[int, int, bytes], Change] = {}
    for node, one in sorted(((node, one) for node, rows in changes for one in rows), key=lambda pair: pair[1]["lsn"]):
        last[node, one["group"], one["key"]] = one
    expected = sorted(
        (node, group, 0, key, one["lsn"], one["row"])
        for (node, group, key), one in last.items()
        if one["op"] != DELETED
    )
    keys: dict[int, dict[int, set[bytes]]] = {}
    for node, group, key in last:
        keys.setdefault(node, {}).setdefault(group, set()).add(key)
    monkeypatch.setattr(snapshots.fold.limits, "CHANGES_MAX", 10_000)
    by_driver = fold(spark, sources, location)
    assert by_driver.local is not None
    assert (rows_of(spark, by_driver), keys_of(by_driver)) == (expected, keys)
    monkeypatch.setattr(snapshots.fold.limits, "CHANGES_MAX", 0)
    by_spark = fold(spark, sources, location)
    assert by_spark.local is None
    assert (rows_of(spark, by_spark), keys_of(by_spark)) == (expected, keys)
    by_spark.release()


def limit(name: str, value: int) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(snapshots.fold.limits, name, value)


LEFT_TO_SPARK: dict[str, tuple[Change, Callable[[pytest.MonkeyPatch], None]]] = {
    "many changes": (change(1, 1, b"k", UPDATED, b"k\n"), limit("CHANGES_MAX", 0)),
    "large objects": (change(1, 1, b"k", UPDATED, b"k\n"), limit("STORED_BYTES_MAX", 10)),
    "large rows": (change(1, 1, b"k", UPDATED, b"k\n"), limit("READ_BYTES_MAX", 10)),
    "a group without a key": (change(1, 3, b"", INSERTED, b"k\n"), limit("CHANGES_MAX", 10_000)),
    "a long line": (change(1, 1, b"k", UPDATED, b"k" * LONG_LINE_BYTES + b"\n"), limit("CHANGES_MAX", 10_000)),
}


@pytest.fixture
def folds_locally(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(snapshots.fold.limits, "CHANGES_MAX", 10_000)
    return monkeypatch


@pytest.mark.parametrize("name", LEFT_TO_SPARK)
def test_what_the_driver_should_not_hold_or_cannot_fold_is_left_to_spark(
    spark: SparkSession, tmp_path: Path, folds_locally: pytest.MonkeyPatch, name: str
) -> None:
    one, prepare = LEFT_TO_SPARK[name]
    prepare(folds_locally)
    folded = fold(spark, store_segments(tmp_path, [(0, [one])]), StoreLocation(f"file://{tmp_path}"))
    assert folded.local is None
    assert (folded.long_images if name == "a long line" else folded.images) is not None
    folded.release()


@pytest.mark.usefixtures("folds_locally")
def test_the_driver_names_an_object_that_it_cant_read(spark: SparkSession, tmp_path: Path) -> None:
    sources = store_segments(tmp_path, [(0, [change(1, 1, b"k", UPDATED, b"k\n")])])
    key = sources.segments[0].source.key
    flip_byte(tmp_path / key)
    folded = fold(spark, sources, StoreLocation(f"file://{tmp_path}"))
    assert [one["details"]["object"] for one in folded.problems] == [key]
    assert folded.local is None


@pytest.mark.usefixtures("folds_locally")
def test_deletes_alone_leave_no_images(spark: SparkSession, tmp_path: Path) -> None:
    sources = store_segments(tmp_path, [(0, [change(1, 1, b"k", DELETED, b"")])])
    folded = fold(spark, sources, StoreLocation(f"file://{tmp_path}"))
    assert (folded.local, folded.images, keys_of(folded)) == (None, None, {0: {1: {b"k"}}})
