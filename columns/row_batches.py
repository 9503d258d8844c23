"""Send rows to the JVM in batches, because it may have little memory, and send tables between driver and tasks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_numpy

COMPRESSED, AS_IS = pa.ipc.IpcWriteOptions(compression="zstd"), pa.ipc.IpcWriteOptions()
# Compressing and expanding the columns of a smaller table takes longer than reading it from a segment.
COMPRESSED_FROM_BYTES = 4 << 10


def to_stream(table: pa.Table) -> bytes:
    """Return the table as an Arrow stream, compressed if it is not small."""
    sink = pa.BufferOutputStream()
    options = COMPRESSED if table.nbytes >= COMPRESSED_FROM_BYTES else AS_IS
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_stream(stream: bytes) -> pa.Table:
    """Read the table from an Arrow stream."""
    return pa.ipc.open_stream(stream).read_all()


BATCH_ROWS, BATCH_BYTES = 1 << 16, 16 << 20


def row_batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows in a table (with columns key and row) in order, in batches of at most BATCH_ROWS.

    A batch with more than one row has at most BATCH_BYTES.
    """
    if len(table) == 0:
        return
    sizes = to_numpy(pc.add(pc.binary_length(table["key"]), pc.binary_length(table["row"]))).astype(np.int64)
    ends = np.cumsum(sizes)
    first = 0
    while first < len(table):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
        last = min(max(last, first + 1), first + BATCH_ROWS, len(table))
        # A slice that spans several chunks yields several batches.
        yield from table.slice(first, last - first).to_batches()
        first = last
