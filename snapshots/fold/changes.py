"""Read the changes of segments that belong to the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from columns.arrow_numbers import to_arrow, to_mask, to_numpy
from columns.bytes_column import column_of
from columns.python_workers import map_batches
from columns.row_batches import row_batches
from snapshots.fold.long_lines import PLACE_FIELD, read_with_places, with_stand_ins
from snapshots.fold.sources import SegmentSource, Sources, filter_effective, problem_row
from snapshots.fold.superseding import last_of_every_key
from storage.errors import SnapshotError
from storage.location import StoreLocation
from wal.segments.held_objects import OpensStore
from wal.segments.segment_schema import DELETE, SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A change that belongs to the state; `node` is its number among the job's sources. An error in a reader is a row of
# group PROBLEM (snapshots.fold.sources): its key is the object, its row the report as JSON. For a long line, `row` is
# the stand-in and `place` says where the line is stored (snapshots.fold.long_lines).
CHANGE_ROWS = (
    "node int, `group` int, partition int, key binary, lsn bigint, seq bigint, op tinyint, row binary, place bigint"
)
# Enough tasks that their different lengths even out; few, because a task costs more than reading a small segment.
TASKS_PER_CORE = 2
_NAMES = ["node", "group", "partition", "key", "lsn", "seq", "op", "row"]
CHANGE_SCHEMA = pa.schema(
    [pa.field("node", pa.int32()), *(SEGMENT_SCHEMA.field(name) for name in _NAMES[1:]), PLACE_FIELD]
)


def segment_numbers(sources: Sources) -> Mapping[str, int]:
    """The segments' numbers in places: the objects of base copies are numbered first."""
    return {one.source.key: number for number, one in enumerate(sources.segments, len(sources.bases))}


def read_changes(spark: SparkSession, sources: Sources, store: StoreLocation) -> DataFrame:
    """Read the CHANGE_ROWS of the segments, except those that a later change in the same segment supersedes."""
    multisets = sources.multisets
    tasks = min(len(sources.segments), TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    segments = balance_by_size(sources.segments, tasks)
    number_of = segment_numbers(sources)
    # What is broadcast goes to an executor once, what a function refers to goes with every task.
    listed = spark.sparkContext.broadcast([(number_of[one.source.key], one) for one in segments])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                place, one = listed.value[number]
                yield from changes_of(store, place, one, multisets)

    return map_batches(spark.range(0, len(segments), 1, tasks), read, CHANGE_ROWS)


def balance_by_size(segments: tuple[SegmentSource, ...], tasks: int) -> tuple[SegmentSource, ...]:
    """Order the segments so that runs of equal count, one per task, are about equally large."""
    largest_first = sorted(segments, key=lambda one: -one.source.size)
    return tuple(one for task in range(tasks) for one in largest_first[task::tasks])


def changes_of(
    store: OpensStore, number: int, one: SegmentSource, multisets: frozenset[int]
) -> Iterator[pa.RecordBatch]:
    """The changes (CHANGE_SCHEMA) of a segment that belong to the state; `number` is the segment's in places."""
    try:
        for table in read_with_places(store.open(), one, number, SEGMENT_SCHEMA):
            yield from _changes_in(filter_effective(table, one), one, multisets)
    except SnapshotError as error:
        yield problem_row(one.source, error, CHANGE_SCHEMA)


def _changes_in(table: pa.Table, one: SegmentSource, multisets: frozenset[int]) -> Iterator[pa.RecordBatch]:
    is_multiset = np.isin(to_numpy(table["group"]), list(multisets))
    if not one.segment.partials:
        # Only without partial images: those may need superseded images to complete them.
        group, lsn, seq = (to_numpy(table[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
        needed = last_of_every_key(group, column_of(table["key"]), lsn, seq) | is_multiset
        table, is_multiset = table.filter(to_mask(needed)), is_multiset[needed]
    # A DELETE by key has no line: its `row` may hold the key to which the row moved.
    table = with_stand_ins(table, (to_numpy(table["op"]) != DELETE) | is_multiset)
    node = to_arrow(np.full(len(table), one.source.number, np.int32))
    columns = [node, *(table[name] for name in CHANGE_SCHEMA.names[1:])]
    # Batches of a partition must have one schema, that of a problem's row.
    yield from row_batches(pa.Table.from_arrays(columns, schema=CHANGE_SCHEMA))
