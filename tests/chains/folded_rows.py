"""The rows that a fold gives, whoever folded, in a form that can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pytest

from cutline.columns.arrow_numbers import to_mask
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.anchored_images import complete_base_rows, complete_changes
from cutline.snapshots.fold.changed_keys import find_valid_rows
from cutline.snapshots.fold.changes import NO_IMAGES, unpack_flags
from cutline.snapshots.fold.fold import IMAGE_COLUMNS, Fold, long_image_reader
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, SegmentSource, Sources, filter_effective, read_at_cut
from cutline.spark.driver_session import DriverSession
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Image = tuple[int, int, int, bytes, int, bytes]
FoldedRow = tuple[int, int, bytes]


def images_of(folded: Fold, sources: Sources, location: StoreLocation) -> list[Image]:
    """The folded images (IMAGE_COLUMNS), sorted."""
    tables: list[pa.Table] = []
    if folded.local is not None:
        tables.append(folded.local)
    if folded.images is not None:
        tables.append(folded.images.select(*IMAGE_COLUMNS).toArrow())
    if folded.long_images is not None:
        batches = folded.long_images.toArrow().to_batches()
        tables.append(pa.Table.from_batches(long_image_reader(sources, location).read_images(batches)))
    for one in sources.segments:
        tables += _left_in(one, folded, location)
    for base in sources.bases if folded.in_bases else ():
        tables += _completed_by(base, folded, location)
    return sorted(tuple(row[name] for name in IMAGE_COLUMNS) for table in tables for row in table.to_pylist())


def _left_in(segment: SegmentSource, folded: Fold, location: StoreLocation) -> Iterator[pa.Table]:
    """The images that were left in the segment, or are completed there."""
    images = folded.segment_images.get(segment.source.key, NO_IMAGES)
    anchored = folded.in_segments.get(segment.source.key, {})
    read = read_at_cut(location.open(), segment, SEGMENT_SCHEMA)
    changes = pa.concat_tables([filter_effective(table, segment) for table in read])
    chosen = changes.filter(to_mask(unpack_flags(images.flags, 0, len(changes))))
    assert set(chosen["group"].to_pylist()) == images.groups
    completed = list(complete_changes(changes, anchored))
    assert sum(map(len, completed)) == sum(len(one.images) for one in anchored.values())
    for table in (chosen, *completed):
        yield _of_node(table, segment.source.number)


def _completed_by(base: BaseSource, folded: Fold, location: StoreLocation) -> Iterator[pa.Table]:
    """The images that are completed with rows of the base object."""
    number = base.source.number
    for table in read_at_cut(location.open(), base, BASE_SCHEMA):
        for batch in table.to_batches():
            changed = ~find_valid_rows(batch, base, folded.changed.get(number, {}))
            for images in complete_base_rows(batch, base, folded.in_bases.get(number, {}), changed):
                yield _of_node(images, number)


def _of_node(table: pa.Table, number: int) -> pa.Table:
    return table.append_column("node", pa.array(np.full(len(table), number, np.int32)))


def rows_at_cut(folded: Fold, sources: Sources, location: StoreLocation) -> Counter[FoldedRow]:
    """All rows at the cut: node, group and line."""
    assert folded.problems == []
    images = images_of(folded, sources, location)
    assert [image for image in images if image[1] == PROBLEM] == []
    found = Counter((node, group, row) for node, group, *_, row in images)
    for base in sources.bases:
        number = base.source.number
        for batch in (one for table in read_at_cut(location.open(), base, BASE_SCHEMA) for one in table.to_batches()):
            held = batch.filter(pa.array(find_valid_rows(batch, base, folded.changed.get(number, {}))))
            found.update((number, one["group"], one["row"]) for one in held.select(["group", "row"]).to_pylist())
    return found


def no_spark() -> SparkSession:
    """Fail: the test needs no Spark."""
    raise AssertionError("Spark is not needed")


def session_without_spark() -> SparkSession:
    """Return a session that runs tasks in threads; anything that needs Spark fails."""
    return cast("SparkSession", DriverSession(no_spark, 2))


@contextmanager
def segments_fold() -> Iterator[None]:
    """In the block, changes stay in their segments, however few they are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CHANGES_MAX", 0), ("CHANGES_PER_SEGMENT", 0), ("CHOSEN_CHANGES_MAX", 100_000)):
            patch.setattr(limits, name, value)
        yield


@contextmanager
def spark_folds() -> Iterator[None]:
    """In the block, no number of changes is small enough for the driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHANGES_MAX", 0)
        yield


@contextmanager
def driver_folds() -> Iterator[None]:
    """In the block, the driver folds small numbers of changes, whatever was drawn for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHANGES_MAX", 500_000)
        yield
