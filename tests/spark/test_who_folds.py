"""Few changes are folded in the driver, many by segment, and all else by rows: always to the same rows and keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cutline.snapshots.fold.changes
import cutline.snapshots.fold.limits
from cutline.columns.arrow_numbers import to_mask
from cutline.snapshots.fold.changes import unpack_flags
from cutline.snapshots.fold.fold import IMAGE_COLUMNS, Fold, fold
from cutline.snapshots.fold.long_lines import LONG_LINE_BYTES
from cutline.snapshots.fold.sources import Sources, read_at_cut
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.run.soak import SEED
from tests.spark.drawn_segments import (
    DELETED,
    UPDATED,
    Change,
    change,
    drawn_changes,
    keys_of,
    last_of,
    store_segments,
)
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_flags_are_found_from_any_place_on() -> None:
    drawn = np.random.default_rng(SEED % 2**32)
    flags = drawn.random(1000) < 0.5
    packed = np.packbits(flags).tobytes()
    padded = np.concatenate([flags, np.zeros(100, np.bool_)])
    for first, count in ((0, 1000), (0, 1100), (7, 90), (8, 3), (993, 20), (1000, 50), (1020, 10)):
        assert unpack_flags(packed, first, count).tolist() == padded[first : first + count].tolist()


def rows_of(folded: Fold) -> list[tuple[Any, ...]]:
    if folded.local is not None:
        return sorted(tuple(row.values()) for row in folded.local.to_pylist())
    assert folded.images is not None
    found = folded.images.collect()
    return sorted(tuple(bytes(one) if isinstance(one, bytearray) else one for one in row) for row in found)


def chosen_rows(folded: Fold, sources: Sources, location: StoreLocation) -> list[tuple[Any, ...]]:
    """The rows whose flags are set, as `rows_of` gives them."""
    found: list[tuple[Any, ...]] = []
    for one in sources.segments:
        if images := folded.segment_images.get(one.source.key):
            (table,) = read_at_cut(location.open(), one, SEGMENT_SCHEMA)
            rows = table.filter(to_mask(unpack_flags(images.flags, 0, len(table)))).to_pylist()
            assert {row["group"] for row in rows} == images.groups
            found += [(one.source.number, *(row[name] for name in IMAGE_COLUMNS[1:])) for row in rows]
    return sorted(found)


def test_the_driver_folds_what_spark_folds_and_both_what_the_changes_say(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = drawn_changes()
    sources, location = store_segments(tmp_path, changes), StoreLocation(f"file://{tmp_path}")
    last = last_of(changes)
    expected = sorted(
        (node, group, 0, key, one["lsn"], one["row"])
        for (node, group, key), one in last.items()
        if one["op"] != DELETED
    )
    keys: dict[int, dict[int, set[bytes]]] = {}
    for node, group, key in last:
        keys.setdefault(node, {}).setdefault(group, set()).add(key)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_MAX", 10_000)
    for folded in (fold(spark, sources, location, for_loading=True), fold(spark, sources, location)):
        assert folded.local is not None
        assert (rows_of(folded), keys_of(folded)) == (expected, keys)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_MAX", 0)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHOSEN_CHANGES_MAX", 10_000)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_PER_SEGMENT", 0)
    by_segment = fold(spark, sources, location, for_loading=True)
    assert (by_segment.local, by_segment.images) == (None, None)
    in_base = {0: keys[0], 1: {2: keys[1][2]}}
    assert (chosen_rows(by_segment, sources, location), keys_of(by_segment)) == (expected, in_base)
    for folded in (fold(spark, sources, location), fold_by_rows(spark, sources, location, monkeypatch)):
        assert (folded.local, folded.segment_images) == (None, {})
        assert (rows_of(folded), keys_of(folded)) == (expected, keys)
        folded.release()


def fold_by_rows(spark: SparkSession, sources: Sources, location: StoreLocation, patch: pytest.MonkeyPatch) -> Fold:
    patch.setattr(cutline.snapshots.fold.limits, "CHOSEN_CHANGES_MAX", 0)
    return fold(spark, sources, location, for_loading=True)


ONE, LONG = change(1, 1, b"k", UPDATED, b"k\n"), change(1, 1, b"k", UPDATED, b"k" * LONG_LINE_BYTES + b"\n")
LEFT_TO_SPARK: dict[str, tuple[Change, str]] = {
    "many changes": (ONE, "CHANGES_MAX"),
    "large objects": (ONE, "STORED_BYTES_MAX"),
    "large rows": (LONG, "READ_BYTES_MAX"),
}


@pytest.fixture
def folds_locally(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_MAX", 10_000)
    return monkeypatch


@pytest.mark.parametrize("name", LEFT_TO_SPARK)
def test_what_the_driver_should_not_hold_is_left_to_spark(
    spark: SparkSession, tmp_path: Path, folds_locally: pytest.MonkeyPatch, name: str
) -> None:
    one, limit = LEFT_TO_SPARK[name]
    sources, location = store_segments(tmp_path, [(0, [one])]), StoreLocation(f"file://{tmp_path}")
    folded = fold(spark, sources, location)
    assert (rows_of(folded), folded.images) == ([(0, 1, 0, b"k", 1, one["row"])], None)
    folds_locally.setattr(cutline.snapshots.fold.limits, limit, 0)
    folded = fold(spark, sources, location)
    assert folded.local is None
    assert (folded.long_images if name == "large rows" else folded.images) is not None
    folded.release()


def test_too_many_keys_are_folded_by_rows(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_MAX", 0)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHOSEN_CHANGES_MAX", 10_000)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_PER_SEGMENT", 0)
    location = StoreLocation(f"file://{tmp_path}")
    sources = store_segments(tmp_path, [(0, [ONE])])
    for module, name, value in (
        (cutline.snapshots.fold.limits, "CHOSEN_KEYS_BYTES_MAX", 0),
        (
            cutline.snapshots.fold.changes,
            "REPORTED_BYTES_MAX",
            cutline.snapshots.fold.changes.REPORTED_BYTES_MIN - 1,
        ),
        (cutline.snapshots.fold.limits, "CHANGES_PER_SEGMENT", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            folded = fold(spark, sources, location, for_loading=True)
        assert (folded.segment_images, folded.images is not None) == ({}, True)
        folded.release()
    with monkeypatch.context() as patch:
        patch.setattr(cutline.snapshots.fold.changes, "REPORTED_BYTES_MAX", 1)
        patch.setattr(cutline.snapshots.fold.changes, "REPORTED_BYTES_MIN", 1)
        folded = fold(spark, sources, location, for_loading=True)
        assert (folded.segment_images, folded.images is not None) == ({}, True)
        folded.release()
    folded = fold(spark, sources, location, for_loading=True)
    assert (len(folded.segment_images), folded.images) == (1, None)


@pytest.mark.parametrize("limit", [0, 10_000])
def test_whoever_folds_names_an_object_that_cant_be_read(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_MAX", limit)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHOSEN_CHANGES_MAX", 10_000)
    monkeypatch.setattr(cutline.snapshots.fold.limits, "CHANGES_PER_SEGMENT", 0)
    sources = store_segments(tmp_path, [(0, [change(1, 1, b"k", UPDATED, b"k\n")])])
    key = sources.segments[0].source.key
    flip_byte(tmp_path / key)
    folded = fold(spark, sources, StoreLocation(f"file://{tmp_path}"), for_loading=True)
    assert [one["details"]["object"] for one in folded.problems] == [key]
    assert (folded.local, folded.images, folded.segment_images) == (None, None, {})


@pytest.mark.usefixtures("folds_locally")
def test_deletes_alone_leave_no_images(spark: SparkSession, tmp_path: Path) -> None:
    sources = store_segments(tmp_path, [(0, [change(1, 1, b"k", DELETED, b"")])])
    folded = fold(spark, sources, StoreLocation(f"file://{tmp_path}"))
    assert (folded.local, folded.images, keys_of(folded)) == (None, None, {0: {1: {b"k"}}})
