"""Tables as Arrow streams: how tasks get rows from the driver, and report rows to it."""

from __future__ import annotations

import pyarrow as pa

COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


def to_stream(table: pa.Table) -> bytes:
    """The table as an Arrow stream, compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=COMPRESSED) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_stream(stream: bytes) -> pa.Table:
    """The table of an Arrow stream."""
    return pa.ipc.open_stream(stream).read_all()
