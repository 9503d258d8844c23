"""Segments: the numbered Parquet objects of one node's archive, and what each says of itself.

A segment is created once, under the number after the last; its own metadata says which operation wrote it and
from where to where in the node's WAL it reaches. Segment n + 1 begins where segment n ends: that is checked
whenever an archive is read, never assumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fleet.lsn import lsn_from_text, lsn_to_text
from storage.digest import digest
from storage.errors import SnapshotError
from storage.range_file import RangeFile
from storage.store import ObjectStore
from wal.segment_schema import SEGMENT_SCHEMA

METADATA_KEY = b"cutline"
FORMAT = "cutline/segment/1"
ROWS_PER_ROW_GROUP = 1 << 18
# A segment up to this size is read by one request even where only its events are wanted.
READ_WHOLE_BYTES_MAX = 4 << 20


class ArchiveError(SnapshotError):
    """The archive of a node is not what its commits and its own metadata say."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """Where in a transaction too large for one segment the segment ends: after its change `seq`."""

    lsn: int
    seq: int


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Which WAL of `node` a segment holds: what ends after `after` and up to `through`.

    With `open`, also the beginning of the transaction that comes next.
    """

    node: str
    operation: str
    after: int
    through: int
    open: OpenTransaction | None = None

    def to_json(self) -> dict[str, Any]:
        """The range as metadata and commits have it."""
        entry = asdict(self) | {"after": lsn_to_text(self.after), "through": lsn_to_text(self.through)}
        if self.open:
            entry["open"] = {"lsn": lsn_to_text(self.open.lsn), "seq": self.open.seq}
        return entry


@dataclass(frozen=True, slots=True)
class Segment:
    """One stored segment. Counts are of what it holds, whatever a cut makes of it."""

    key: str
    number: int
    range: SegmentRange
    size: int
    digest: str
    changes: int
    events: int
    partials: int
    truncates: int

    def to_json(self) -> dict[str, Any]:
        """The segment's entry in a commit."""
        counts = {name: getattr(self, name) for name in ("changes", "events", "partials", "truncates")}
        return {
            "key": self.key, "number": self.number, "size": self.size, "digest": self.digest,
        } | counts | self.range.to_json()  # fmt: skip


def range_from_json(entry: dict[str, Any]) -> SegmentRange:
    """Read what `SegmentRange.to_json` wrote."""
    opened = entry["open"]
    return SegmentRange(
        entry["node"],
        entry["operation"],
        lsn_from_text(entry["after"]),
        lsn_from_text(entry["through"]),
        OpenTransaction(lsn_from_text(opened["lsn"]), opened["seq"]) if opened else None,
    )


def segment_from_json(entry: dict[str, Any]) -> Segment:
    """Read what `Segment.to_json` wrote."""
    names = ("key", "number", "size", "digest", "changes", "events", "partials", "truncates")
    return Segment(range=range_from_json(entry), **{name: entry[name] for name in names})


def archive_prefix(snapshot: str, node: str, chain: str) -> str:
    """The folder of one node's archive in one chain."""
    return f"snapshots/{snapshot}/wal/{node}/{chain}"


def segment_key(prefix: str, number: int) -> str:
    """The key of the archive's segment `number`, from 1."""
    return f"{prefix}/{number:020d}.parquet"


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
    schema = SEGMENT_SCHEMA.with_metadata({METADATA_KEY: json.dumps(document).encode()})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **parquet_options(SEGMENT_SCHEMA)) as writer:
        for table in (changes, events):
            if len(table):
                writer.write_table(table.cast(schema), row_group_size=ROWS_PER_ROW_GROUP)
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
            return file.read_row_groups(groups) if groups else SEGMENT_SCHEMA.empty_table()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(segment.key) from error


def _event_row_groups(file: Any, changes: int) -> list[int]:
    rows = 0
    for number in range(file.num_row_groups):
        if rows == changes:
            return list(range(number, file.num_row_groups))
        rows += file.metadata.row_group(number).num_rows
    return []


def check_contiguous(node: str, base: int, segments: Iterable[Segment]) -> None:
    """Raise ArchiveError unless the segments are numbered from 1 without a hole, from `base` on."""
    through = base
    for expected, segment in enumerate(segments, start=1):
        if segment.number != expected or segment.range.after != through or segment.range.node != node:
            raise ArchiveError(
                f"node {node}: the archive has a hole at {lsn_to_text(through)}, before {segment.key}",
                hint="the chain can't be continued; take a new full snapshot: snapshot create NAME",
                details={"node": node, "object": segment.key},
            )
        through = segment.range.through


def _count(changes: pa.Table, op: str) -> int:
    return int(pc.sum(pc.equal(changes["op"], ord(op))).as_py() or 0) if len(changes) else 0
