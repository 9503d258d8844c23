"""Rows that a shuffle moves in buckets.

A shuffle spends a few microseconds on each value that it moves. A bucket is one value, with all rows of some batches
that go to the same task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from msgspec import Struct

from cutline.columns.arrow_numbers import to_numpy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# A bucket: its number, and its rows as an Arrow stream.
BUCKETS_SCHEMA = pa.schema([("bucket", pa.int32()), ("rows", pa.binary())])
BUCKETS_DDL = "bucket int, rows binary"
# A task holds this many rows until it puts them into buckets.
ROWS_HELD = 500_000


class RowBuckets(Struct, frozen=True):
    """Divides rows of a schema into `count` buckets, by a column of 64-bit hashes: equal hashes share a bucket."""

    schema: pa.Schema
    by: str
    count: int

    def fill(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these batches in buckets (BUCKETS_SCHEMA); several buckets may have the same number."""
        held: list[pa.Table] = []
        rows = 0
        for batch in batches:
            if not len(batch):
                continue
            held.append(pa.Table.from_batches([batch]).cast(self.schema))
            rows += len(batch)
            if rows >= ROWS_HELD:
                yield self._filled(held)
                held, rows = [], 0
        if held:
            yield self._filled(held)

    def _filled(self, held: list[pa.Table]) -> pa.RecordBatch:
        rows = pa.concat_tables(held).combine_chunks()
        numbers = (to_numpy(rows[self.by]).view(np.uint64) % np.uint64(self.count)).astype(np.int32)
        rows = rows.take(pa.array(np.argsort(numbers, kind="stable")))
        sizes = np.bincount(numbers, minlength=self.count)
        ends = np.cumsum(sizes)
        filled = np.flatnonzero(sizes)
        streams = [_stream(rows.slice(ends[number] - sizes[number], sizes[number])) for number in filled]
        return pa.record_batch([pa.array(filled, pa.int32()), pa.array(streams, pa.binary())], schema=BUCKETS_SCHEMA)

    def shuffled(self, buckets: DataFrame) -> DataFrame:
        """Return the buckets in `count` Spark partitions: those with the same number are in the same partition."""
        return buckets.repartitionById(self.count, "bucket")


def read_buckets(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of buckets (BUCKETS_SCHEMA)."""
    for batch in batches:
        for rows in batch.column("rows"):
            yield from pa.ipc.open_stream(rows.as_buffer())


def _stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue().to_pybytes())
