"""Long lines: rows of megabytes stay where they are stored while their changes are folded.

A JVM of little memory can't take rows of 100 MB, and a fold need not see them: it goes by keys. So a line above
LONG_LINE_BYTES is replaced, where an object is read, by its *stand-in* (its SHA-256, as good as the line for telling
equal ones) and its *place* (object, row group, row), and read again where it is loaded or hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from columns.arrow_numbers import to_arrow, to_mask
from columns.bytes_column import Bytes, BytesColumn, Flags, column_of, gather
from snapshots.base_copy.copy_ranges import BASE_SCHEMA
from snapshots.fold.schema_at_cut import to_schema_at_cut
from snapshots.fold.sources import BaseSource, SegmentSource, Source, open_object, read_row_group, read_tables
from storage.store import ObjectStore
from wal.segments.damage import ObjectDamagedError
from wal.segments.segment_schema import SEGMENT_SCHEMA

# Far below what a JVM can take: Spark holds many rows at once, and all images of a row that lack values.
LONG_LINE_BYTES = 1 << 16
# The place of a line that is there itself.
NO_PLACE = -1
GROUP_BITS, ROW_BITS = 20, 20
PLACED = pa.field("place", pa.int64(), nullable=False)
# What is kept of objects that were read, beside the one that is: rows that need two of them take turns.
KEPT_BYTES_MAX = 64 << 20
_Key = TypeVar("_Key")


def read_placed(
    store: ObjectStore, source: BaseSource | SegmentSource, number: int, schema: pa.Schema
) -> Iterator[pa.Table]:
    """The object's rows in present terms, with their `place`; `number` is the object's among those of the job.

    Raises as `read_tables` does.
    """
    placed = schema.append(PLACED)
    for group, table in enumerate(read_tables(store, source.source, schema)):
        first = ((number << GROUP_BITS) + group) << ROW_BITS
        places = pa.array(np.arange(first, first + len(table), dtype=np.int64))
        yield from to_schema_at_cut(pa.Table.from_arrays([*table.columns, places], schema=placed), source.present)


def with_stand_ins(table: pa.Table, rows: Flags | None = None) -> pa.Table:
    """The table (with row and place), long lines replaced by stand-ins; the others have no place any more.

    Only in `rows`, if given: elsewhere `row` is no line.
    """
    is_long = are_long(table["row"])
    if rows is not None:
        is_long &= rows
    place = table.column_names.index("place")
    if not is_long.any():
        return table.set_column(place, PLACED, to_arrow(np.full(len(table), NO_PLACE, np.int64)))
    mask = to_mask(is_long)
    placed = table.set_column(place, PLACED, pc.if_else(mask, table["place"], pa.scalar(NO_PLACE, pa.int64())))
    row = table.column_names.index("row")
    return placed.set_column(row, table.schema.field("row"), _replace(column_of(table["row"]), is_long))


def names_of(lines: pa.Array[Any] | pa.ChunkedArray[Any]) -> BytesColumn:
    """What tells equal lines: long ones by their stand-ins, the others themselves."""
    is_long, column = are_long(lines), column_of(lines)
    return column_of(_replace(column, is_long)) if is_long.any() else column


def are_long(lines: pa.Array[Any] | pa.ChunkedArray[Any]) -> Flags:
    """Which of the lines are long."""
    return np.asarray(pc.greater(pc.binary_length(lines), LONG_LINE_BYTES).to_numpy(zero_copy_only=False), np.bool_)


def stand_in_of(line: Bytes) -> bytes:
    """What stands for the line. It does not end as a line does, nor begin as a report does."""
    return b"\0" + hashlib.sha256(line.data).digest() + b"\0"


def _replace(column: BytesColumn, is_long: Flags) -> pa.Array[Any]:
    starts, lengths = column.offsets[:-1], np.where(is_long, 0, column.lengths)
    stand_ins = [b""] * len(column)
    for row in np.flatnonzero(is_long).tolist():  # bounded by the bytes of such long lines
        stand_ins[row] = stand_in_of(column.data[column.offsets[row] : column.offsets[row + 1]])
    short = gather(column.data, starts, lengths).to_arrow()
    return pc.if_else(to_mask(is_long), pa.array(stand_ins, pa.binary()), short)


class LongLines:
    """Reads long lines at their places. Best asked in the order of the places: it keeps little of what it has read."""

    def __init__(self, store: ObjectStore, objects: tuple[BaseSource | SegmentSource, ...]) -> None:
        self._store, self._objects = store, objects
        # The object that was asked for last: where an error comes from.
        self.asked: Source = objects[0].source
        self._files: dict[int, pq.ParquetFile] = {}
        self._tables: dict[tuple[int, int], pa.Table] = {}

    def line(self, place: int, stand_in: bytes) -> Bytes:
        """The line at the place; raise ObjectDamagedError if it can't be read, or is not the one that was there."""
        number, row = place >> (GROUP_BITS + ROW_BITS), place & ((1 << ROW_BITS) - 1)
        source = self._objects[number]
        self.asked = source.source
        held = self._row_group(number, (place >> ROW_BITS) & ((1 << GROUP_BITS) - 1))
        for found in to_schema_at_cut(held.slice(row, 1), source.present):
            column = column_of(found["row"])
            line = column.data[int(column.offsets[0]) : int(column.offsets[-1])]
            if len(column) == 1 and stand_in_of(line) == stand_in:
                return line
        detail = "a row is another one than a moment ago"
        raise ObjectDamagedError(key=source.source.key, kind="rows", node=source.source.node, detail=detail)

    def _row_group(self, number: int, group: int) -> pa.Table:
        table = self._tables.pop((number, group), None)
        if table is None:
            _forget(self._tables, {place: one.nbytes for place, one in self._tables.items()})
            source = self._objects[number]
            schema = SEGMENT_SCHEMA if isinstance(source, SegmentSource) else BASE_SCHEMA
            table = read_row_group(self._file(number), group, source.source, schema)
        # Once more the last that was used.
        self._tables[number, group] = table
        return table

    def _file(self, number: int) -> pq.ParquetFile:
        file = self._files.pop(number, None)
        if file is None:
            _forget(self._files, {one: self._objects[one].source.size for one in self._files})
            file = open_object(self._store, self._objects[number].source)
        self._files[number] = file
        return file


def _forget(held: dict[_Key, Any], sizes: Mapping[_Key, int]) -> None:
    """Drop what was not used for the longest time until the rest is within KEPT_BYTES_MAX."""
    left = sum(sizes.values())
    for key, size in sizes.items():
        if left <= KEPT_BYTES_MAX:
            return
        del held[key]
        left -= size
