"""Read the changes of segments that belong to the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, column_of, xxhash64
from cutline.columns.python_workers import broadcast, map_batches
from cutline.columns.row_batches import row_batches
from cutline.snapshots.fold.find_sources import Sources
from cutline.snapshots.fold.long_lines import PLACE_FIELD, read_with_places, with_stand_ins
from cutline.snapshots.fold.sources import SegmentSource, filter_effective, problem_row
from cutline.snapshots.fold.superseding import last_of_every_key
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation
from cutline.wal.segments.held_objects import OpensStore
from cutline.wal.segments.segment_schema import DELETE, SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A change that belongs to the state; `node` is its number among the job's sources. An error in a reader is a row of
# group PROBLEM (snapshots.fold.sources): its key is the object, its row the report as JSON. For a long line, `row` is
# the stand-in and `place` says where the line is stored (snapshots.fold.long_lines).
CHANGE_ROWS = (
    "node int, `group` int, partition int, key binary, lsn bigint, seq bigint, op tinyint, row binary, place bigint"
)
# Beside them, in changes that are read to be compared: the hash over key and row, equal to Spark's xxhash64(key, row).
# Where `entry` is set, `row` is empty; elsewhere `entry` is null.
ENTRY = "entry"
# Enough tasks that their different lengths even out; few, because a task costs more than reading a small segment.
TASKS_PER_CORE = 2
_NAMES = ["node", "group", "partition", "key", "lsn", "seq", "op", "row"]
CHANGE_SCHEMA = pa.schema(
    [pa.field("node", pa.int32()), *(SEGMENT_SCHEMA.field(name) for name in _NAMES[1:]), PLACE_FIELD]
)


@dataclass(frozen=True, slots=True)
class ChangeForm:
    """What is read of changes.

    If they are `hashed`, they have an ENTRY instead of the row. Not so in groups without a key (`multisets`), where the
    line names the row, nor on nodes (`whole`) with partial images, which earlier rows may have to complete.
    """

    multisets: frozenset[int]
    hashed: bool = False
    whole: frozenset[int] = frozenset()

    @classmethod
    def of(cls, sources: Sources, *, hashed: bool) -> ChangeForm:
        """The form of the changes of these sources."""
        whole = frozenset(one.source.number for one in sources.segments if one.segment.partials)
        return cls(sources.multisets, hashed, whole)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the changes: CHANGE_SCHEMA, and ENTRY if they are hashed."""
        return CHANGE_SCHEMA.append(pa.field(ENTRY, pa.int64())) if self.hashed else CHANGE_SCHEMA

    @property
    def ddl(self) -> str:
        """The columns for Spark: CHANGE_ROWS, and ENTRY if they are hashed."""
        return f"{CHANGE_ROWS}, {ENTRY} bigint" if self.hashed else CHANGE_ROWS


def segment_numbers(sources: Sources) -> Mapping[str, int]:
    """The segments' numbers in places: the objects of base copies are numbered first."""
    return {one.source.key: number for number, one in enumerate(sources.segments, len(sources.bases))}


def read_changes(spark: SparkSession, sources: Sources, store: StoreLocation, *, hashed: bool = False) -> DataFrame:
    """Read the CHANGE_ROWS of the segments, except those that a later change in the same segment supersedes.

    With `hashed` they have an ENTRY, too: rows of which only the hash is needed are not shuffled.
    """
    form = ChangeForm.of(sources, hashed=hashed)
    tasks = min(len(sources.segments), TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    segments = balance_by_size(sources.segments, tasks)
    number_of = segment_numbers(sources)
    # What is broadcast goes to an executor once, what a function refers to goes with every task.
    listed = broadcast(spark, [(number_of[one.source.key], one) for one in segments])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                place, one = listed.value[number]
                yield from changes_of(store, place, one, form)

    return map_batches(spark.range(0, len(segments), 1, tasks), read, form.ddl)


def balance_by_size(segments: tuple[SegmentSource, ...], tasks: int) -> tuple[SegmentSource, ...]:
    """Order the segments so that runs of equal count, one per task, are about equally large."""
    largest_first = sorted(segments, key=lambda one: -one.source.size)
    return tuple(one for task in range(tasks) for one in largest_first[task::tasks])


def changes_of(store: OpensStore, number: int, one: SegmentSource, form: ChangeForm) -> Iterator[pa.RecordBatch]:
    """The changes of a segment that belong to the state, in that form; `number` is the segment's in places."""
    try:
        for table in read_with_places(store.open(), one, number, SEGMENT_SCHEMA):
            yield from changes_in(table, one, form)
    except SnapshotError as error:
        yield problem_row(one.source, error, form.schema)


def changes_in(table: pa.Table, one: SegmentSource, form: ChangeForm) -> Iterator[pa.RecordBatch]:
    """The changes that belong to the state among rows of a segment, with their `place`, at the schema at the cut."""
    table = filter_effective(table, one)
    is_multiset = np.isin(to_numpy(table["group"]), list(form.multisets))
    if not one.segment.partials:
        # Only without partial images: those may need superseded images to complete them.
        group, lsn, seq = (to_numpy(table[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
        needed = last_of_every_key(group, column_of(table["key"]), lsn, seq) | is_multiset
        if not needed.all():
            table, is_multiset = table.filter(to_mask(needed)), is_multiset[needed]
    entries = None
    if form.hashed:
        is_hashed = ~is_multiset if one.source.number not in form.whole else np.zeros(len(table), np.bool_)
        table, entries = _with_entries(table, is_hashed)
    # A DELETE by key has no line: its `row` may hold the key to which the row moved.
    table = with_stand_ins(table, (to_numpy(table["op"]) != DELETE) | is_multiset)
    node = to_arrow(np.full(len(table), one.source.number, np.int32))
    columns = [node, *(table[name] for name in CHANGE_SCHEMA.names[1:]), *([] if entries is None else [entries])]
    # Batches of a partition must have one schema, that of a problem's row.
    yield from row_batches(pa.Table.from_arrays(columns, schema=form.schema))


def _with_entries(table: pa.Table, is_hashed: Flags) -> tuple[pa.Table, pa.Array[Any]]:
    """The table without the rows that are hashed, and the column ENTRY."""
    hashes = np.zeros(len(table), np.int64)
    # A row may have 1 GB.
    chosen = table if is_hashed.all() else table.filter(to_mask(is_hashed))
    if len(chosen):
        hashes[is_hashed] = xxhash64(column_of(chosen["row"]), xxhash64(column_of(chosen["key"]))).view(np.int64)
    row = table.column_names.index("row")
    kept = pc.if_else(to_mask(is_hashed), pa.scalar(b"", pa.binary()), table["row"])
    return table.set_column(row, table.schema.field("row"), kept), pa.array(hashes, mask=~is_hashed)
