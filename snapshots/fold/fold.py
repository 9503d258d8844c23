"""Folding: the state of copies at a cut, as the last effective image of every changed key, laid over the base.

One idea for restore and check: `collect_changed_keys` says which base rows no longer hold, `images` are the rows that
hold instead. Changes are shuffled by key; base rows, which are most of the data, never are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from columns.arrow_numbers import to_arrow, to_mask, to_numpy
from columns.bytes_column import column_of
from columns.row_batches import row_batches
from snapshots.fold.base_rows import read_wanted_rows
from snapshots.fold.changed_keys import Keys, collect_changed_keys
from snapshots.fold.lineage import BASE_LSN, CompletedImages, complete_images
from snapshots.fold.long_images import LongImageReader
from snapshots.fold.long_lines import NO_PLACE, PLACED, read_placed, with_stand_ins
from snapshots.fold.sources import PROBLEM, SegmentSource, Sources, filter_effective, problem_of, problem_row
from snapshots.fold.superseding import last_of_every_key
from storage.errors import ErrorReport, SnapshotError
from storage.location import StoreLocation
from wal.segments.segment_schema import DELETE, INSERT, PARTIAL, SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A change that belongs to the state; `node` is its number among the job's sources. A problem met by a reader
# is a row of group PROBLEM (snapshots.fold.sources), its key the object and its row the report as JSON.
# Where a line is long, `row` is what stands for it and `place` where it is (snapshots.fold.long_lines).
CHANGE_ROWS = (
    "node int, `group` int, partition int, key binary, lsn bigint, seq bigint, op tinyint, row binary, place bigint"
)
# Enough that tasks of different length even out; a task costs more than reading a small segment.
TASKS_PER_CORE = 2
IMAGE_COLUMNS = ("node", "group", "partition", "key", "lsn", "row")
_NAMES = ["node", "group", "partition", "key", "lsn", "seq", "op", "row"]
CHANGE_SCHEMA = pa.schema([pa.field("node", pa.int32()), *(SEGMENT_SCHEMA.field(name) for name in _NAMES[1:]), PLACED])


@dataclass(slots=True)
class Fold:
    """The folded changes of some copies. `images`: IMAGE_COLUMNS of every row that changes have made.

    But for those with a long line: they are in `long_images` (LONG_IMAGE_ROWS), which `long_image_reader` reads; None
    where there are none. What follows holds for them too.

    A row whose earlier images are stored nowhere (its unchanged values, or the row that was deleted) is of group
    PROBLEM there, its `partition` the group. So is the report of an object that was read well once, and can't be read
    when Spark comes back to it: whoever reads `images` must look for that group.
    `changed` knows by node number and group the keys (of a group without a key: the lines) whose base rows do
    not hold any more; where it is a filter, the rows that it takes for changed and that are not are among the images.
    `problems` are the reports of objects that could not be read; without them it is whole.
    """

    images: DataFrame | None
    changed: dict[int, dict[int, Keys]]
    problems: list[ErrorReport]
    kept: list[DataFrame]
    long_images: DataFrame | None = None
    has_long_lines: bool = False

    def release(self) -> None:
        """Let the executors forget the folded changes."""
        for frame in self.kept:
            frame.unpersist()


def fold(spark: SparkSession, sources: Sources, store: StoreLocation) -> Fold:
    """Fold the changes of `sources`. Starts no job where there are none.

    The driver holds the changed keys, or a filter where they are many (snapshots.fold.changed_keys).
    """
    if not sources.segments:
        return Fold(None, {}, [], [])
    changes = read_changes(spark, sources, store)
    if sources.multisets or sources.has_partials:
        # Both read the changes again.
        changes = changes.persist()
    numbers = ", ".join(str(number) for number in sorted(sources.multisets)) or "-2"
    latest = latest_images(changes.where(f"`group` NOT IN ({numbers})")).persist()
    changed = collect_changed_keys(latest, sources.changes)
    problems = _problems_in(latest) if changed.has_problems else []
    images = latest.where(f"op NOT IN ({DELETE}, {PARTIAL})").select(*IMAGE_COLUMNS, "place")
    folded = Fold(images, changed.keys, problems, [changes, latest], has_long_lines=changed.has_long_lines)
    base_rows = _base_rows(spark, sources, store, folded)
    if not changed.is_exact:
        images = images.unionByName(_drop_changed(base_rows(changed.keys), latest))
    folded.images = images
    if sources.multisets:
        _fold_multisets(changes.where(f"`group` IN ({numbers}, {PROBLEM})"), sources.changes, base_rows, folded)
    _part_long_images(folded)
    if PARTIAL in changed.ops:
        _complete(folded, complete_images(spark, sources, base_rows, changes, latest))
    return folded


def long_image_reader(sources: Sources, store: StoreLocation) -> LongImageReader:
    """What reads the long images of these sources' fold."""
    return LongImageReader((*sources.bases, *sources.segments), sources.column_counts, store)


def _part_long_images(folded: Fold) -> None:
    """Part the images that are there themselves from those that are read where they are stored."""
    if folded.images is None:
        return
    if folded.has_long_lines:
        line = "array(named_struct('line', row, 'place', place)) AS lines"
        away = folded.images.where(f"place <> {NO_PLACE}")
        folded.long_images = away.selectExpr("node", "`group`", "partition", "key", "lsn", line)
        folded.images = folded.images.where(f"place = {NO_PLACE}")
    folded.images = folded.images.select(*IMAGE_COLUMNS)


def _complete(folded: Fold, found: CompletedImages) -> None:
    folded.kept.append(found.histories)
    folded.images = found.images if folded.images is None else folded.images.unionByName(found.images)
    if found.long_images is not None:
        longer = folded.long_images
        folded.long_images = found.long_images if longer is None else longer.unionByName(found.long_images)


def _problems_in(frame: DataFrame) -> list[ErrorReport]:
    found = frame.where(f"`group` = {PROBLEM}").select("row").collect()  # bounded by the objects
    return [report for row in found if (report := problem_of(bytes(row["row"])))]


def _base_rows(
    spark: SparkSession, sources: Sources, store: StoreLocation, folded: Fold
) -> Callable[[Mapping[int, Mapping[int, Keys]]], DataFrame]:
    """How the base rows with some keys are read: once, and what can't be read is noted in `folded`."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    def read(keys: Mapping[int, Mapping[int, Keys]]) -> DataFrame:
        rows = read_wanted_rows(spark, sources.bases, keys, store).persist()
        folded.kept.append(rows)
        seen = rows.groupBy(F.col("group") == PROBLEM).agg(F.max("place")).collect()  # two rows
        if any(is_problem for is_problem, _ in seen):
            folded.problems += _problems_in(rows)
        folded.has_long_lines |= any(place != NO_PLACE for _, place in seen)
        return rows

    return read


def _drop_changed(base: DataFrame, latest: DataFrame) -> DataFrame:
    """IMAGE_COLUMNS and place of those base rows (WANTED_ROWS) whose keys did not change, which a filter can't tell."""
    held = base.join(latest.select("node", "group", "key"), ["node", "group", "key"], "left_anti")
    return held.selectExpr("node", "`group`", "partition", "key", f"{BASE_LSN}L AS lsn", "row", "place")


def latest_images(changes: DataFrame) -> DataFrame:
    """Of CHANGE_ROWS the last of every (node, group, partition, key)."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    last = F.max_by(F.struct("lsn", "seq", "op", "row", "place"), F.struct("lsn", "seq")).alias("last")
    grouped = changes.groupBy("node", "group", "partition", "key").agg(last)
    return grouped.select("node", "group", "partition", "key", "last.*")


def read_changes(spark: SparkSession, sources: Sources, store: StoreLocation) -> DataFrame:
    """CHANGE_ROWS of the segments, but for those that a later one of the same segment supersedes."""
    multisets = sources.multisets
    tasks = min(len(sources.segments), TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    segments = balance_by_size(sources.segments, tasks)
    # Places count the base copies' objects first.
    number_of = {one.source.key: number for number, one in enumerate(sources.segments, len(sources.bases))}
    numbers = [number_of[one.source.key] for one in segments]

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opened = store.open()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _changes_of(opened, numbers[number], segments[number], multisets)

    return spark.range(0, len(segments), 1, tasks).mapInArrow(read, CHANGE_ROWS)


def balance_by_size(segments: tuple[SegmentSource, ...], tasks: int) -> tuple[SegmentSource, ...]:
    """The segments in such an order that equal runs of them, one for each task, are about equally large."""
    largest_first = sorted(segments, key=lambda one: -one.source.size)
    return tuple(one for task in range(tasks) for one in largest_first[task::tasks])


def _changes_of(store: Any, number: int, one: SegmentSource, multisets: frozenset[int]) -> Iterator[pa.RecordBatch]:
    try:
        for table in read_placed(store, one, number, SEGMENT_SCHEMA):
            yield from _changes_in(filter_effective(table, one), one, multisets)
    except SnapshotError as error:
        yield problem_row(one.source, error, CHANGE_SCHEMA)


def _changes_in(table: pa.Table, one: SegmentSource, multisets: frozenset[int]) -> Iterator[pa.RecordBatch]:
    is_multiset = np.isin(to_numpy(table["group"]), list(multisets))
    if not one.segment.partials:
        # Where values were left out, earlier images may be needed to fill them in.
        group, lsn, seq = (to_numpy(table[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
        wanted = last_of_every_key(group, column_of(table["key"]), lsn, seq) | is_multiset
        table, is_multiset = table.filter(to_mask(wanted)), is_multiset[wanted]
    # What was deleted by its key has no line; its row may say where it went.
    table = with_stand_ins(table, (to_numpy(table["op"]) != DELETE) | is_multiset)
    node = to_arrow(np.full(len(table), one.source.number, np.int32))
    columns = [node, *(table[name] for name in CHANGE_SCHEMA.names[1:])]
    yield from row_batches(pa.table(columns, names=CHANGE_SCHEMA.names))


def _fold_multisets(
    changes: DataFrame, count: int, base_rows: Callable[[Mapping[int, Mapping[int, Keys]]], DataFrame], folded: Fold
) -> None:
    """Add the rows of groups without a key: of every line as many as there were, came and went.

    There are `count` changes at most. Lines that came are laid beside the base; of a line that went more often than
    it came the base rows are counted, and as many as are left take their place. Of equal long lines, which are known by
    what stands for them, one is read for all.
    """
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    places = ["node", "group", "partition", "row"]
    one = F.when(F.col("op") == INSERT, 1).otherwise(-1)
    place = F.max("place").alias("place")
    net = changes.groupBy(*places).agg(F.sum(one).alias("net"), place).where("net <> 0").persist()
    folded.kept.append(net)
    went = net.where("net < 0").selectExpr("node", "`group`", "row AS key", f"{DELETE}Y AS op", "place")
    lines = collect_changed_keys(went, count).keys
    folded.has_long_lines = folded.has_long_lines or not net.where(f"place <> {NO_PLACE}").isEmpty()
    left = net
    if lines:
        base = base_rows(lines).groupBy(*places).agg(F.count("*").alias("net"), place)
        left = net.unionByName(base).groupBy(*places).agg(F.sum("net").alias("net"), place)
        for node, found in lines.items():
            folded.changed.setdefault(node, {}).update(found)
    repeated = F.explode(F.array_repeat(F.lit(0), F.col("net").cast("int")))
    copies = left.where("net > 0").select(*places, "place", repeated)
    # Which of several equal rows was written last can't be told: they have no version.
    rest = [F.lit(b"").alias("key"), F.lit(0).cast("bigint").alias("lsn"), F.col("row")]
    images = copies.select("node", "group", "partition", *rest, "place")
    if lines:
        # A line that went more often than it was ever there: something is missing.
        lacking = [F.lit(PROBLEM).alias("group"), F.col("group").alias("partition")]
        nowhere = F.lit(NO_PLACE).cast("bigint").alias("place")
        images = images.unionByName(left.where("net < 0").select("node", *lacking, *rest, nowhere))
    folded.images = images if folded.images is None else folded.images.unionByName(images)
