"""Segments as Parquet objects: written once, under the number after the last, and read.

A segment is created once, under the number after the last; its own metadata says which operation wrote it and
from where to where in the node's WAL it reaches. Segment n + 1 begins where segment n ends: that is checked
whenever an archive is read, never assumed.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.digest import digest
from storage.range_file import RangeFile
from storage.store import ObjectStore
from wal.archive import ArchiveError, Segment, SegmentRange, range_from_json, segment_key
from wal.arrow_numbers import to_numpy
from wal.segment_schema import SEGMENT_SCHEMA

METADATA_KEY = b"cutline"
FORMAT = "cutline/segment/1"
ROWS_PER_ROW_GROUP = 1 << 18
# A segment up to this size is read by one request even where only its events are wanted.
READ_WHOLE_BYTES_MAX = 4 << 20


def create_segment(
    store: ObjectStore, prefix: str, number: int, held: SegmentRange, tables: tuple[pa.Table, pa.Table]
) -> Segment:
    """Create segment `number` of these changes and events; raise ObjectExistsError if there is one."""
    changes, events = tables
    counts = {
        "changes": len(changes),
        "events": len(events),
        "partials": _count(changes, "u"),
        "truncates": _count(changes, "T"),
    }
    body = segment_bytes(held, changes, events, counts)
    key = segment_key(prefix, number)
    store.create(key, body)
    return Segment(key, number, held, len(body), digest(body), **counts)


def segment_bytes(held: SegmentRange, changes: pa.Table, events: pa.Table, counts: dict[str, int]) -> bytes:
    """The Parquet file of a segment: row groups of changes, then row groups of events."""
    document = {"format": FORMAT, **held.to_json(), **counts}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SEGMENT_SCHEMA, **parquet_options(SEGMENT_SCHEMA)) as writer:
        # The schema's own metadata would be left out with the Arrow schema.
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(document).encode()})
        for table in (changes, events):
            if len(table):
                writer.write_table(table.cast(SEGMENT_SCHEMA), row_group_size=ROWS_PER_ROW_GROUP)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How every object of ours is encoded: rising numbers as differences, repeated ones as runs, zstd."""
    rising = {"lsn", "end_lsn", "seq", "xid"}
    repeated = {"group", "partition", "op", "global_id"}
    names = set(schema.names)
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": sorted(names & repeated),
        "column_encoding": dict.fromkeys(sorted(names & rising), "DELTA_BINARY_PACKED"),
        "write_statistics": False,
        "store_schema": False,
    }


def read_metadata(store: ObjectStore, key: str, number: int) -> Segment:
    """Read what the stored segment `key` says of itself, its digest computed from its bytes."""
    body = store.read(key)
    try:
        document = json.loads(pq.read_metadata(pa.BufferReader(body)).metadata[METADATA_KEY])
        if document["format"] != FORMAT:
            raise ValueError(document["format"])
        names = ("changes", "events", "partials", "truncates")
        counts = {name: int(document[name]) for name in names}
        return Segment(key, number, range_from_json(document), len(body), digest(body), **counts)
    except (pa.ArrowException, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise _damaged(key) from error


def _damaged(key: str) -> ArchiveError:
    return ArchiveError(
        f"object {key} is not a segment of this version",
        hint="run: snapshot check   to see what else is damaged",
        details={"object": key},
    )


def read_events(store: ObjectStore, segment: Segment) -> pa.Table:
    """Read a segment's events alone; raise ArchiveError where it can't be read as one."""
    source: Any
    if segment.size <= READ_WHOLE_BYTES_MAX:
        source = pa.BufferReader(store.read(segment.key))
    else:
        source = pa.PythonFile(RangeFile(store, segment.key, segment.size), mode="r")
    try:
        with pq.ParquetFile(source) as file:
            groups = _event_row_groups(file, segment.changes)
            return file.read_row_groups(groups) if groups else pa.Table.from_batches([], SEGMENT_SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(segment.key) from error


def _event_row_groups(file: Any, changes: int) -> list[int]:
    rows = 0
    for number in range(file.num_row_groups):
        if rows == changes:
            return list(range(number, file.num_row_groups))
        rows += file.metadata.row_group(number).num_rows
    return []


def _count(changes: pa.Table, op: str) -> int:
    return int(np.count_nonzero(to_numpy(changes["op"]) == ord(op)))
