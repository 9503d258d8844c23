"""Long lines: multi-megabyte rows stay in the store while their changes are folded.

A JVM with little memory can't hold 100 MB rows, and a fold does not need them, because it works on keys. Therefore,
when an object is read, a line longer than LONG_LINE_BYTES is replaced by its *stand-in* (its SHA-256, which identifies
equal lines) and its *place* (object, row group, row). The line is read again when it is loaded or hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow, to_mask
from cutline.columns.bytes_column import Bytes, BytesColumn, Flags, column_of, gather, offsets_of
from cutline.columns.lines import TAB, UNCHANGED_MARK, find_byte
from cutline.columns.row_batches import BATCH_BYTES
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.sources import (
    PROBLEM,
    BaseCursor,
    BaseSource,
    BaseSources,
    OpenedObject,
    SegmentSource,
    Source,
    converted_to_cut,
    open_object,
    problem_row,
    read_row_group,
    read_tables,
)
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Far below a JVM's limit, because Spark holds many rows at a time, and all partial images of a row.
LONG_LINE_BYTES = 1 << 16
# The place of a line that is not replaced.
NO_PLACE = -1
# Enough for 100 million objects with 65,000 row groups of a million rows each.
GROUP_BITS, ROW_BITS = 16, 20
PLACE_FIELD = pa.field("place", pa.int64(), nullable=False)
# The size of objects kept in memory in addition to the current object, for rows that alternate between objects.
KEPT_BYTES_MAX = 64 << 20
_Key = TypeVar("_Key")


def read_with_places(
    store: ObjectStore, source: BaseSource | SegmentSource, number: int, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Read the object's rows, converted to the schema at the cut, with their `place`.

    `number` is the object's number in the job. Raises the errors of `read_tables`.
    """
    with_place = schema.append(PLACE_FIELD)
    for group, table in enumerate(read_tables(store, source.source, schema)):
        first = ((number << GROUP_BITS) + group) << ROW_BITS
        places = pa.array(np.arange(first, first + len(table), dtype=np.int64))
        yield from converted_to_cut(pa.Table.from_arrays([*table.columns, places], schema=with_place), source)


def with_stand_ins(table: pa.Table, rows: Flags | None = None) -> pa.Table:
    """Replace long lines in the table (with row and place) with stand-ins; set all other rows' place to NO_PLACE.

    If `rows` is given, only these rows are considered: in other rows, `row` is not a line.
    """
    is_long = are_long(table["row"])
    if rows is not None:
        is_long &= rows
    place = table.column_names.index("place")
    if not is_long.any():
        return table.set_column(place, PLACE_FIELD, to_arrow(np.full(len(table), NO_PLACE, np.int64)))
    mask = to_mask(is_long)
    placed = table.set_column(place, PLACE_FIELD, pc.if_else(mask, table["place"], pa.scalar(NO_PLACE, pa.int64())))
    row = table.column_names.index("row")
    return placed.set_column(row, table.schema.field("row"), _replace(column_of(table["row"]), is_long))


def line_names(lines: pa.Array[Any] | pa.ChunkedArray[Any]) -> BytesColumn:
    """Return values that identify equal lines: the stand-ins of long lines, and all other lines themselves."""
    is_long, column = are_long(lines), column_of(lines)
    return column_of(_replace(column, is_long)) if is_long.any() else column


def are_long(lines: pa.Array[Any] | pa.ChunkedArray[Any]) -> Flags:
    """Return flags that mark the long lines."""
    return np.asarray(pc.greater(pc.binary_length(lines), LONG_LINE_BYTES).to_numpy(zero_copy_only=False), np.bool_)


def stand_in_of(line: Bytes) -> bytes:
    """Return the stand-in of the line. It neither ends like a line nor begins like a problem report."""
    return b"\0" + hashlib.sha256(line.data).digest() + b"\0"


def _replace(column: BytesColumn, is_long: Flags) -> pa.Array[Any]:
    starts, lengths = column.offsets[:-1], np.where(is_long, 0, column.lengths)
    stand_ins = [b""] * len(column)
    for row in np.flatnonzero(is_long).tolist():  # bounded by the bytes of such long lines
        stand_ins[row] = stand_in_of(column.data[column.offsets[row] : column.offsets[row + 1]])
    short = gather(column.data, starts, lengths).to_arrow()
    return pc.if_else(to_mask(is_long), pa.array(stand_ins, pa.binary()), short)


class LongLines:
    """Reads long lines at their places; fastest in order of place, since it keeps only a few objects."""

    def __init__(self, store: ObjectStore, bases: BaseSources, segments: tuple[SegmentSource, ...]) -> None:
        self._store, self._bases, self._segments = store, BaseCursor(bases), segments
        self._first_segment = len(bases)
        # The object read last, for error messages.
        self.current_source: Source = (segments or bases)[0].source
        self._files: dict[int, OpenedObject] = {}
        self._sizes: dict[int, int] = {}
        self._tables: dict[tuple[int, int], pa.Table] = {}

    def read(self, place: int, stand_in: bytes) -> Bytes:
        """Read the line at `place`; raise ObjectDamagedError if it can't be read or does not match its stand-in."""
        number, row = place >> (GROUP_BITS + ROW_BITS), place & ((1 << ROW_BITS) - 1)
        source = self._source(number)
        self.current_source = source.source
        group = self._row_group(number, (place >> ROW_BITS) & ((1 << GROUP_BITS) - 1))
        for table in converted_to_cut(group.slice(row, 1), source):
            column = column_of(table["row"])
            line = column.data[int(column.offsets[0]) : int(column.offsets[-1])]
            if len(column) == 1 and stand_in_of(line) == stand_in:
                return line
        detail = "a row has changed since it was first read"
        raise ObjectDamagedError(key=source.source.key, kind="rows", node=source.source.node, detail=detail)

    def _row_group(self, number: int, group: int) -> pa.Table:
        table = self._tables.pop((number, group), None)
        if table is None:
            _forget(self._tables, {place: one.nbytes for place, one in self._tables.items()})
            source = self._source(number)
            schema = SEGMENT_SCHEMA if isinstance(source, SegmentSource) else BASE_SCHEMA
            table = read_row_group(self._file(number), group, source.source, schema)
        # Reinsert the entry as the most recently used.
        self._tables[number, group] = table
        return table

    def _file(self, number: int) -> OpenedObject:
        file = self._files.pop(number, None)
        if file is None:
            _forget(self._files, {key: self._sizes[key] for key in self._files})
            source = self._source(number).source
            file = open_object(self._store, source)
            self._sizes[number] = source.size
        self._files[number] = file
        return file

    def _source(self, number: int) -> BaseSource | SegmentSource:
        if number >= self._first_segment:
            return self._segments[number - self._first_segment]
        return self._bases.source(number)


def _forget(held: dict[_Key, Any], sizes: Mapping[_Key, int]) -> None:
    """Drop the least recently used entries until the rest fits in KEPT_BYTES_MAX."""
    left = sum(sizes.values())
    for key, size in sizes.items():
        if left <= KEPT_BYTES_MAX:
            return
        del held[key]
        left -= size


# `lines`: the images of a row, oldest first. Each is the line itself, or its stand-in and its place.
LONG_IMAGE_ROWS = (
    "node int, `group` int, partition int, key binary, lsn bigint, lines array<struct<line: binary, place: bigint>>"
)
IMAGE_SCHEMA = pa.schema(
    [
        pa.field("node", pa.int32()),
        pa.field("group", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("lsn", pa.int64()),
        pa.field("row", pa.binary()),
    ]
)


def as_images(table: pa.Table) -> pa.Table:
    """Return the columns of IMAGE_SCHEMA of a table that may have others."""
    return pa.Table.from_arrays([table[name] for name in IMAGE_SCHEMA.names], schema=IMAGE_SCHEMA)


def order_by_place(images: DataFrame, divide: Callable[[DataFrame, str], DataFrame]) -> DataFrame:
    """Order LONG_IMAGE_ROWS so that each row group is read by one task, and the row groups in an object in sequence.

    `divide` distributes rows over a fixed number of partitions, and keeps rows with equal values in a column together.
    """
    last = "array_max(transform(lines, one -> one.place))"
    with_row_groups = images.selectExpr("*", f"{last} AS last", f"shiftright({last}, {ROW_BITS}) AS row_group")
    ordered = divide(with_row_groups, "row_group").sortWithinPartitions("last", "node", "group", "key")
    return ordered.drop("last", "row_group")


class LongImageReader(Struct, frozen=True):
    """An executor's input for reading long images: the objects in the order of their numbers, and column counts."""

    bases: BaseSources
    segments: tuple[SegmentSource, ...]
    column_counts: Mapping[tuple[int, int], int]
    store: StoreLocation

    def read_images(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read LONG_IMAGE_ROWS as IMAGE_SCHEMA, in batches of at most BATCH_BYTES, or of a single row.

        For a row that can't be completed or an object that can't be read, yields a row in the PROBLEM group as in
        `Fold`.
        """
        try:
            reader = LongLines(self.store.open(), self.bases, self.segments)
        except SnapshotError as error:
            # There is at least one segment, since a fold without segments has no images.
            yield problem_row(self.segments[0].source, error, IMAGE_SCHEMA)
            return
        pending: list[tuple[dict[str, Any], Bytes]] = []
        size = 0
        for image_row in (
            row for batch in batches for row in batch.to_pylist()
        ):  # stand-ins, and lines that are not long
            try:
                line = self._read_line(reader, image_row)
            except SnapshotError as error:
                yield problem_row(reader.current_source, error, IMAGE_SCHEMA)
                return
            if pending and size + len(line) > BATCH_BYTES:
                yield _batch(pending)
                pending, size = [], 0
            pending.append((image_row, line))
            size += len(line)
            # A line may be 1 GB: release it before the next line is read.
            del line
            if size > BATCH_BYTES:
                yield _batch(pending)
                pending, size = [], 0
        if pending:
            yield _batch(pending)

    def _read_line(self, reader: LongLines, image_row: dict[str, Any]) -> Bytes:
        newest_first = (
            np.frombuffer(image["line"], np.uint8) if image["place"] < 0 else reader.read(image["place"], image["line"])
            for image in reversed(image_row["lines"] or [])
        )
        line = complete_image(newest_first, self.column_counts.get((image_row["node"], image_row["group"]), 0))
        if line is None:
            image_row["group"], image_row["partition"] = PROBLEM, image_row["group"]
            return np.frombuffer(b"\n", np.uint8)
        return line


def complete_image(newest_first: Iterator[Bytes], column_count: int) -> Bytes | None:
    """Fill in the missing values in a row's newest line from earlier lines; return None if a value is in none of them.

    Reads no more lines than necessary. An empty line means that the row was deleted and has no earlier values.
    """
    fields: list[Bytes] = []
    lacking: list[int] = []
    for line in newest_first:
        if len(line) == 0:
            return None
        values = _fields(line, column_count)
        if not fields:
            fields = values
            lacking = [number for number, value in enumerate(fields) if _is_unchanged(value)]
            if not lacking:
                return line
            continue
        for number in lacking:
            fields[number] = values[number]
        lacking = [number for number in lacking if _is_unchanged(fields[number])]
        if not lacking:
            return _join(fields)
    return None


def _fields(line: Bytes, column_count: int) -> list[Bytes]:
    if column_count == 0:
        return []
    tabs = find_byte(line, TAB)
    ends = [*tabs.tolist(), len(line) - 1]
    return [line[start:end] for start, end in zip([0, *(tabs + 1).tolist()], ends, strict=True)]


def _is_unchanged(value: Bytes) -> bool:
    return len(value) == len(UNCHANGED_MARK) and value.tobytes() == UNCHANGED_MARK


def _join(fields: list[Bytes]) -> Bytes:
    separators = [np.frombuffer(b"\t", np.uint8)] * (len(fields) - 1) + [np.frombuffer(b"\n", np.uint8)]
    return np.concatenate([part for pair in zip(fields, separators, strict=True) for part in pair])


def _batch(rows: list[tuple[dict[str, Any], Bytes]]) -> pa.RecordBatch:
    lines = [line for _, line in rows]
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    column = BytesColumn(
        np.ascontiguousarray(lines[0]) if len(lines) == 1 else np.concatenate(lines), offsets_of(lengths)
    )
    names = IMAGE_SCHEMA.names[:-1]
    columns = [pa.array([row[name] for row, _ in rows], IMAGE_SCHEMA.field(name).type) for name in names]
    return pa.record_batch([*columns, column.to_arrow()], schema=IMAGE_SCHEMA)
