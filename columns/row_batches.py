"""Split tables of rows into batches that fit a JVM with little memory, however long the rows are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_numpy

BATCH_ROWS, BATCH_BYTES = 1 << 16, 16 << 20


def row_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the table's rows (with key and row) in order, in batches of at most BATCH_BYTES or of a single row."""
    if len(table) == 0:
        return
    sizes = to_numpy(pc.add(pc.binary_length(table["key"]), pc.binary_length(table["row"]))).astype(np.int64)
    ends = np.cumsum(sizes)
    first = 0
    while first < len(table):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
        last = min(max(last, first + 1), first + BATCH_ROWS, len(table))
        # A slice over several chunks gives several batches.
        yield from table.slice(first, last - first).to_batches()
        first = last
