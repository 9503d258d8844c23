"""Cutting tables of rows into batches that a JVM of little memory can take, however long the rows are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from columns.arrow_numbers import to_numpy

BATCH_ROWS, BATCH_BYTES = 1 << 16, 16 << 20


def row_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """The table's rows (with key and row) in order; a batch holds BATCH_BYTES of them at most, or a single one."""
    if len(table) == 0:
        return
    sizes = to_numpy(pc.add(pc.binary_length(table["key"]), pc.binary_length(table["row"]))).astype(np.int64)
    ends = np.cumsum(sizes)
    first = 0
    while first < len(table):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
        last = min(max(last, first + 1), first + BATCH_ROWS, len(table))
        # A slice of several chunks is several batches.
        yield from table.slice(first, last - first).to_batches()
        first = last
