"""Fold: compute the state of copies at a cut, by replacing base rows with the last effective image of each changed key.

Restore and check both use it: `Fold.changed` identifies the base rows that are no longer valid, and `Fold.images`
contains the rows that replace them. If there are many changes, they are shuffled by key. Base rows, which make up most
of the data, are never shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec import Struct, field

from cutline.columns.python_workers import local_frame, map_batches
from cutline.snapshots.fold.anchored_images import OfTables
from cutline.snapshots.fold.changed_keys import Keys, collect_changed_keys, exact_keys, read_wanted_rows
from cutline.snapshots.fold.changes import ENTRY, SegmentImages, choose_changes, read_changes
from cutline.snapshots.fold.key_history import BASE_LSN, CompletedImages, complete_images
from cutline.snapshots.fold.local_fold import fold_locally
from cutline.snapshots.fold.long_lines import NO_PLACE, LongImageReader
from cutline.snapshots.fold.sources import PROBLEM, Sources, problem_of
from cutline.storage.errors import ErrorReport
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import HeldObjects
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

IMAGE_COLUMNS = ("node", "group", "partition", "key", "lsn", "row")


class Fold(Struct):
    """The folded changes for some copies.

    `images` (IMAGE_COLUMNS) contains the rows that changes have produced; it is None if there are no such rows. In a
    hashed fold, these rows also have an ENTRY, which is null or replaces the row (snapshots.fold.changes). Rows with a
    long line are in `long_images` (LONG_IMAGE_ROWS, read by `long_image_reader`). If the driver has folded the changes,
    all rows are in `local` instead (IMAGE_COLUMNS, ordered by node and group; snapshots.fold.local_fold). With
    `segment_images`, `local` contains the rows that are in no segment.

    `images`, `long_images` and `local` may contain rows in the PROBLEM group, which their reader must check for. Such a
    row may be an image that can't be completed, because an earlier image or a deleted row is missing; its `partition`
    is then the group. Otherwise it reports an object that was readable at first, but not when Spark read it again.

    `segment_images` holds the images that were left in their segments (snapshots.fold.changes), by the key of the
    segment's object. `in_bases` (by node) and `in_segments` (by the segment's key) are images that lack values, which
    the reader of their anchors has to complete (snapshots.fold.anchored_images).

    `changed` holds, by node number and group, the keys (in groups without a key, the lines) whose base rows are no
    longer valid. With `segment_images`, it covers only groups with base rows. If it is a filter, the unchanged rows
    that it also matches are among the images. `problems` holds the reports about objects that could not be read; the
    fold is complete if there are no problems.
    """

    images: DataFrame | None
    changed: dict[int, dict[int, Keys]]
    problems: list[ErrorReport]
    cached: list[DataFrame]
    long_images: DataFrame | None = None
    has_long_lines: bool = False
    local: pa.Table | None = None
    segment_images: Mapping[str, SegmentImages] = field(default_factory=dict)
    in_bases: Mapping[int, OfTables] = field(default_factory=dict)
    in_segments: Mapping[str, OfTables] = field(default_factory=dict)

    def release(self) -> None:
        """Release the cached DataFrames."""
        for frame in self.cached:
            frame.unpersist()


def fold(
    spark: SparkSession,
    sources: Sources,
    store: StoreLocation,
    *,
    for_loading: bool = False,
    completes: bool = False,
    hashed: bool = False,
    held: HeldObjects | None = None,
) -> Fold:
    """Fold the changes in `sources`. Does not start a job if there are no segments or only a few changes.

    Few images stay in the driver (`Fold.local`), and with `for_loading`, many may stay in their segments
    (`Fold.segment_images`). If the caller `completes` images, large values may also stay where they are. Otherwise all
    images are in DataFrames. With `hashed`, images can only be compared: rows are not shuffled where their hash is
    enough. The driver holds the changed keys, or a filter if there are many (snapshots.fold.changed_keys). Segments
    that are `held` are not read from the store.
    """
    if (in_driver := fold_in_driver(sources, store, held)) is not None:
        return in_driver
    if for_loading and (found := choose_changes(spark, sources, store, completes=completes)) is not None:
        keys = exact_keys(found.last).keys
        return Fold(
            None,
            keys,
            found.problems,
            [],
            local=found.added,
            segment_images=found.images,
            in_bases=found.in_bases,
            in_segments=found.in_segments,
        )
    changes = read_changes(spark, sources, store, hashed=hashed)
    if sources.multisets or sources.has_partials:
        # Folding multisets or partial images reads the changes a second time.
        changes = changes.persist()
    numbers = ", ".join(str(number) for number in sorted(sources.multisets)) or "-2"
    latest = latest_images(changes.where(f"`group` NOT IN ({numbers})")).persist()
    changed = collect_changed_keys(latest, sources.changes)
    problems = _problems_in(latest) if changed.has_problems else []
    entry = [ENTRY] if hashed else []
    images = latest.where(f"op NOT IN ({DELETE}, {PARTIAL})").select(*IMAGE_COLUMNS, "place", *entry)
    folded = Fold(images, changed.keys, problems, [changes, latest], has_long_lines=changed.has_long_lines)
    base_rows = _base_rows(spark, sources, store, folded)
    if not changed.is_exact:
        images = images.unionByName(_drop_changed(base_rows(changed.keys), latest), allowMissingColumns=True)
    folded.images = images
    if sources.multisets:
        _fold_multisets(changes.where(f"`group` IN ({numbers}, {PROBLEM})"), sources.changes, base_rows, folded)
    _split_long_images(folded)
    if PARTIAL in changed.ops:
        _add_completed(folded, complete_images(spark, sources, base_rows, changes, latest))
    return folded


def fold_in_driver(sources: Sources, store: StoreLocation, held: HeldObjects | None = None) -> Fold | None:
    """Fold the changes in the driver, as `fold` does; return None if there is too much of something."""
    if not sources.segments:
        return Fold(None, {}, [], [])
    if (local := fold_locally(sources, held or store, store)) is None:
        return None
    return Fold(None, local.changed, local.problems, [], local=local.images if len(local.images) else None)


def long_image_reader(sources: Sources, store: StoreLocation) -> LongImageReader:
    """Return the reader for the long images that these sources produce."""
    return LongImageReader(sources.bases, sources.segments, sources.column_counts, store)


def map_images(
    spark: SparkSession,
    folded: Fold,
    reader: LongImageReader,
    change: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    columns: tuple[str, ...],
    schema: tuple[pa.Schema, str],
) -> Iterator[DataFrame]:
    """Yield what `change` makes of the images in each place where the fold has left some, except for segments.

    `change` gets the images' `columns`, and returns rows of `schema`, given as Arrow's and as Spark's. A new place for
    images has to be added here, or their rows are lost in silence.
    """
    arrow, ddl = schema
    if folded.local is not None:
        found = change(iter(folded.local.select(list(columns)).to_batches()))
        yield local_frame(spark, pa.Table.from_batches(found, arrow))
    if folded.images is not None:
        yield map_batches(folded.images.select(*columns), change, ddl)
    if folded.long_images is not None:

        def read_long(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from change(reader.read_images(batches))

        yield map_batches(folded.long_images, read_long, ddl)


def _split_long_images(folded: Fold) -> None:
    """Move the images with long lines, which stay in the store, to `long_images`."""
    if folded.images is None:
        return
    if folded.has_long_lines:
        line = "array(named_struct('line', row, 'place', place)) AS lines"
        remote = folded.images.where(f"place <> {NO_PLACE}")
        folded.long_images = remote.selectExpr("node", "`group`", "partition", "key", "lsn", line)
        folded.images = folded.images.where(f"place = {NO_PLACE}")
    folded.images = folded.images.drop("place")


def _add_completed(folded: Fold, completed: CompletedImages) -> None:
    folded.cached.append(completed.image_lists)
    images = completed.images
    folded.images = images if folded.images is None else folded.images.unionByName(images, allowMissingColumns=True)
    if completed.long_images is not None:
        earlier = folded.long_images
        folded.long_images = completed.long_images if earlier is None else earlier.unionByName(completed.long_images)


def _problems_in(frame: DataFrame) -> list[ErrorReport]:
    rows = frame.where(f"`group` = {PROBLEM}").select("row").collect()  # bounded by the objects
    return [report for row in rows if (report := problem_of(bytes(row["row"])))]


def _base_rows(
    spark: SparkSession, sources: Sources, store: StoreLocation, folded: Fold
) -> Callable[[Mapping[int, Mapping[int, Keys]]], DataFrame]:
    """Return a function that reads base rows with the given keys once, and records unreadable objects in `folded`."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    def read(keys: Mapping[int, Mapping[int, Keys]]) -> DataFrame:
        rows = read_wanted_rows(spark, sources.bases, keys, store).persist()
        folded.cached.append(rows)
        seen = rows.groupBy(F.col("group") == PROBLEM).agg(F.max("place")).collect()  # two rows
        if any(is_problem for is_problem, _ in seen):
            folded.problems += _problems_in(rows)
        folded.has_long_lines |= any(place != NO_PLACE for _, place in seen)
        return rows

    return read


def _drop_changed(base: DataFrame, latest: DataFrame) -> DataFrame:
    """Drop the base rows (WANTED_ROWS) whose keys changed; return the rest as IMAGE_COLUMNS and place."""
    unchanged = base.join(latest.select("node", "group", "key"), ["node", "group", "key"], "left_anti")
    return unchanged.selectExpr("node", "`group`", "partition", "key", f"{BASE_LSN}L AS lsn", "row", "place")


def latest_images(changes: DataFrame) -> DataFrame:
    """Find the last CHANGE_ROWS row for every (node, group, partition, key)."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    entry = [name for name in changes.columns if name == ENTRY]
    last = F.max_by(F.struct("lsn", "seq", "op", "row", "place", *entry), F.struct("lsn", "seq")).alias("last")
    grouped = changes.groupBy("node", "group", "partition", "key").agg(last)
    return grouped.select("node", "group", "partition", "key", "last.*")


def _fold_multisets(
    changes: DataFrame, count: int, base_rows: Callable[[Mapping[int, Mapping[int, Keys]]], DataFrame], folded: Fold
) -> None:
    """Fold groups without a key: each line occurs as often as in the base, plus inserts, minus deletes.

    There are at most `count` changes. A line that was inserted more often than deleted adds images to the base rows.
    For a line that was deleted more often than inserted, the base rows are counted, and replaced with as many images as
    remain. Equal long lines have the same stand-in, and only one of them is read.
    """
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    places = ["node", "group", "partition", "row"]
    column = F.when(F.col("op") == INSERT, 1).otherwise(-1)
    place = F.max("place").alias("place")
    net = changes.groupBy(*places).agg(F.sum(column).alias("net"), place).where("net <> 0").persist()
    folded.cached.append(net)
    deleted = net.where("net < 0").selectExpr("node", "`group`", "row AS key", f"{DELETE}Y AS op", "place")
    lines = collect_changed_keys(deleted, count).keys
    folded.has_long_lines = folded.has_long_lines or not net.where(f"place <> {NO_PLACE}").isEmpty()
    remaining = net
    if lines:
        base = base_rows(lines).groupBy(*places).agg(F.count("*").alias("net"), place)
        remaining = net.unionByName(base).groupBy(*places).agg(F.sum("net").alias("net"), place)
        for node, of_groups in lines.items():
            folded.changed.setdefault(node, {}).update(of_groups)
    repeated = F.explode(F.array_repeat(F.lit(0), F.col("net").cast("int")))
    copies = remaining.where("net > 0").select(*places, "place", repeated)
    # Equal rows can't be told apart, so they have no key and no lsn.
    rest = [F.lit(b"").alias("key"), F.lit(0).cast("bigint").alias("lsn"), F.col("row")]
    images = copies.select("node", "group", "partition", *rest, "place")
    if lines:
        # If a line was deleted more often than it occurred, a row is missing.
        missing = [F.lit(PROBLEM).alias("group"), F.col("group").alias("partition")]
        nowhere = F.lit(NO_PLACE).cast("bigint").alias("place")
        images = images.unionByName(remaining.where("net < 0").select("node", *missing, *rest, nowhere))
    folded.images = images if folded.images is None else folded.images.unionByName(images, allowMissingColumns=True)
