"""Folded rows whose lines are long: read where they are stored, and completed from their earlier images, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from columns.bytes_column import Bytes, BytesColumn, offsets_of
from columns.lines import TAB, UNCHANGED_MARK
from columns.row_batches import BATCH_BYTES
from snapshots.fold.long_lines import ROW_BITS, LongLines
from snapshots.fold.sources import PROBLEM, BaseSource, SegmentSource, problem_row
from storage.errors import SnapshotError
from storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# `lines`: the images of a row from the oldest to the newest, each the line itself, or what stands for it and its place.
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


def by_place(spark: SparkSession, images: DataFrame) -> DataFrame:
    """LONG_IMAGE_ROWS so that each row group is read by one task, and those of an object in turn.

    By number and place, so that no planner changes what a partition holds when a task is repeated.
    """
    last = "array_max(transform(lines, one -> one.place))"
    parts = max(spark.sparkContext.defaultParallelism, 2)
    placed = images.selectExpr("*", f"{last} AS last", f"shiftright({last}, {ROW_BITS}) AS row_group")
    spread = placed.repartition(parts, "row_group").sortWithinPartitions("last", "node", "group", "key")
    return spread.drop("last", "row_group")


@dataclass(frozen=True, slots=True)
class LongImageReader:
    """What an executor needs to read long images: the objects by the numbers in places, columns by node and group."""

    objects: tuple[BaseSource | SegmentSource, ...]
    column_counts: Mapping[tuple[int, int], int]
    store: StoreLocation

    def images(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """IMAGE_SCHEMA of LONG_IMAGE_ROWS, in batches of BATCH_BYTES at most, or of a single row.

        A row that can't be completed, and an object that can't be read, is of group PROBLEM, as in `Fold.images`.
        """
        reader = LongLines(self.store.open(), self.objects)
        waiting: list[tuple[dict[str, Any], Bytes]] = []
        size = 0
        for one in (row for batch in batches for row in batch.to_pylist()):  # stand-ins, and lines that are not long
            try:
                line = self._line(reader, one)
            except SnapshotError as error:
                yield problem_row(reader.asked, error, IMAGE_SCHEMA)
                return
            if waiting and size + len(line) > BATCH_BYTES:
                yield _batch(waiting)
                waiting, size = [], 0
            waiting.append((one, line))
            size += len(line)
            # It may be of 100 MB: nothing of it is held while the next one comes.
            del line
        if waiting:
            yield _batch(waiting)

    def _line(self, reader: LongLines, one: dict[str, Any]) -> Bytes:
        newest_first = (
            np.frombuffer(held["line"], np.uint8) if held["place"] < 0 else reader.line(held["place"], held["line"])
            for held in reversed(one["lines"] or [])
        )
        line = complete_image(newest_first, self.column_counts.get((one["node"], one["group"]), 0))
        if line is None:
            one["group"], one["partition"] = PROBLEM, one["group"]
            return np.frombuffer(b"\n", np.uint8)
        return line


def complete_image(newest_first: Iterator[Bytes], column_count: int) -> Bytes | None:
    """The newest line of a row, values that it left out taken from the next older ones; None if one is nowhere.

    Takes no more lines than it needs. A line without a byte is of a row that was gone: it has no earlier values.
    """
    fields: list[Bytes] = []
    lacking: list[int] = []
    for line in newest_first:
        if len(line) == 0:
            return None
        found = _fields(line, column_count)
        if not fields:
            fields = found
            lacking = [number for number, value in enumerate(fields) if _is_unchanged(value)]
            if not lacking:
                return line
            continue
        for number in lacking:
            fields[number] = found[number]
        lacking = [number for number in lacking if _is_unchanged(fields[number])]
        if not lacking:
            return _join(fields)
    return None


def _fields(line: Bytes, column_count: int) -> list[Bytes]:
    """The values of a line, which ends with a newline, as they stand in it."""
    if column_count == 0:
        return []
    tabs = np.flatnonzero(line == TAB)
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
