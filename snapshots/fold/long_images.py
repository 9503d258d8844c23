"""Images with long lines: read them where they are stored, and complete them from earlier images, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cutline.columns.bytes_column import Bytes, BytesColumn, offsets_of
from cutline.columns.lines import TAB, UNCHANGED_MARK, find_byte
from cutline.columns.row_batches import BATCH_BYTES
from cutline.snapshots.fold.base_sources import BaseSources
from cutline.snapshots.fold.long_lines import ROW_BITS, LongLines
from cutline.snapshots.fold.sources import PROBLEM, SegmentSource, problem_row
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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


def order_by_place(images: DataFrame, divide: Callable[[DataFrame, str], DataFrame]) -> DataFrame:
    """Order LONG_IMAGE_ROWS so that one task reads each row group, and those of an object one after the other.

    `divide` gives rows with equal values of a column the same of a fixed number of partitions.
    """
    last = "array_max(transform(lines, one -> one.place))"
    with_row_groups = images.selectExpr("*", f"{last} AS last", f"shiftright({last}, {ROW_BITS}) AS row_group")
    ordered = divide(with_row_groups, "row_group").sortWithinPartitions("last", "node", "group", "key")
    return ordered.drop("last", "row_group")


@dataclass(frozen=True, slots=True)
class LongImageReader:
    """What an executor needs to read long images: the objects in the order of their numbers, and column counts."""

    bases: BaseSources
    segments: tuple[SegmentSource, ...]
    column_counts: Mapping[tuple[int, int], int]
    store: StoreLocation

    def read_images(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read LONG_IMAGE_ROWS as IMAGE_SCHEMA, in batches of at most BATCH_BYTES, or of a single row.

        A row that can't be completed, or an object that can't be read, yields a row of group PROBLEM as in `Fold`.
        """
        try:
            reader = LongLines(self.store.open(), self.bases, self.segments)
        except SnapshotError as error:
            # No fold has images without a segment.
            yield problem_row(self.segments[0].source, error, IMAGE_SCHEMA)
            return
        pending: list[tuple[dict[str, Any], Bytes]] = []
        size = 0
        for one in (row for batch in batches for row in batch.to_pylist()):  # stand-ins, and lines that are not long
            try:
                line = self._read_line(reader, one)
            except SnapshotError as error:
                yield problem_row(reader.current_source, error, IMAGE_SCHEMA)
                return
            if pending and size + len(line) > BATCH_BYTES:
                yield _batch(pending)
                pending, size = [], 0
            pending.append((one, line))
            size += len(line)
            # A line may have 1 GB: release it before reading the next one.
            del line
            if size > BATCH_BYTES:
                yield _batch(pending)
                pending, size = [], 0
        if pending:
            yield _batch(pending)

    def _read_line(self, reader: LongLines, one: dict[str, Any]) -> Bytes:
        newest_first = (
            np.frombuffer(image["line"], np.uint8) if image["place"] < 0 else reader.read(image["place"], image["line"])
            for image in reversed(one["lines"] or [])
        )
        line = complete_image(newest_first, self.column_counts.get((one["node"], one["group"]), 0))
        if line is None:
            one["group"], one["partition"] = PROBLEM, one["group"]
            return np.frombuffer(b"\n", np.uint8)
        return line


def complete_image(newest_first: Iterator[Bytes], column_count: int) -> Bytes | None:
    """Complete the newest line of a row with values of earlier lines; return None if a value is in none of them.

    Reads no more lines than it needs. An empty line means that the row was deleted: it has no earlier values.
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
    """Split a line, which ends with a newline, into its values."""
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
