"""Segments as Parquet objects: writing and reading them.

A segment is created once, under the number after the last. Its metadata says which operation wrote it and which range
of the node's WAL it holds. Segment n + 1 begins where segment n ends. This is checked whenever an archive is read,
never assumed.

The metadata also has the definitions of tables under which it was written and which no commit lists yet. If a failed
attempt leaves the segment at the end of an archive, the next attempt learns from them what its group numbers mean.

A segment that a commit lists is verified against the commit. One that no commit lists yet is verified by its seal: the
digest of the whole file, with zeros in the place of the seal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Ints
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import Count, Record, fields_of, from_json
from cutline.storage.digest import digest
from cutline.storage.errors import ChainEnd
from cutline.storage.store import ObjectMissingError, ObjectStore, StoreUnreachableError
from cutline.storage.stored_form import StoredForm, UndecryptableError, stored_form
from cutline.storage.storing import create_or_find
from cutline.wal.segments.archive import (
    ArchivedSegment,
    ArchiveError,
    OpenTransaction,
    Segment,
    SegmentRange,
    segment_key,
)
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.definitions import Definition
from cutline.wal.segments.parquet_objects import expand_global_ids, open_parquet, parquet_options
from cutline.wal.segments.segment_schema import SEGMENT_SCHEMA, check_rows
from cutline.wal.segments.tail_file import TailFile

METADATA_KEY = b"cutline"
FORMAT = "cutline/segment/3"
NO_SEAL = "0" * 64
# A reader of changes holds one row group at a time.
ROWS_PER_ROW_GROUP, ROW_GROUP_BYTES = 1 << 18, 32 << 20
# No segment is larger: it ends after 64 MiB of changes, and its last message, at most 1 GiB from the server, at most
# doubles in size when text is escaped.
SEGMENT_BYTES_MAX = 4 << 30
# A segment up to this size is read in one request even if only its events are needed.
READ_WHOLE_BYTES_MAX = 4 << 20


class SegmentMetadata(Record, frozen=True, tag_field="format", tag=FORMAT, kw_only=True):
    """The metadata in a segment (docs/store-format.md). `seal` is the digest of the file with zeros in its place."""

    key: str
    node: str
    operation: str
    after: Lsn
    through: Lsn
    open: OpenTransaction | None
    definitions: tuple[Definition, ...]
    first_changes: dict[int, Lsn]
    changes: Count
    events: Count
    partials: Count
    truncates: Count
    seal: str = NO_SEAL


def create_segment(
    store: ObjectStore,
    prefix: str,
    number: int,
    wal_range: SegmentRange,
    tables: tuple[pa.Table, pa.Table],
    definitions: tuple[Definition, ...] = (),
) -> ArchivedSegment:
    """Create segment `number` from `tables` (changes, events); raise ObjectExistsError if it exists.

    `definitions` are those that no commit lists yet.
    """
    changes, events = tables
    key = segment_key(prefix, number)
    metadata = SegmentMetadata(
        key=key,
        node=wal_range.node,
        operation=wal_range.operation,
        after=wal_range.after,
        through=wal_range.through,
        open=wal_range.open,
        definitions=definitions,
        first_changes=_first_changes(changes, definitions),
        changes=len(changes),
        events=len(events),
        partials=_count(changes, "u"),
        truncates=_count(changes, "T"),
    )
    body = segment_bytes(metadata, changes, events)
    form = stored_form(store)
    stored = form.encode(key, body)
    create_or_find(form.raw, key, stored)
    return _read_archived(metadata, number, body, stored, form)


def segment_bytes(metadata: SegmentMetadata, changes: pa.Table, events: pa.Table) -> bytes:
    """Build the Parquet file of a segment: row groups of changes, then row groups of events; with its seal."""
    # To any other sink Arrow passes a copy of each page, which may have 1 GB.
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SEGMENT_SCHEMA, **parquet_options(SEGMENT_SCHEMA)) as writer:
        # Metadata of the Arrow schema would be lost, because store_schema is off.
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(fields_of(metadata)).encode()})
        for table in (changes, events):
            if len(table):
                average = max(table.nbytes // len(table), 1)
                rows = min(max(ROW_GROUP_BYTES // average, 1), ROWS_PER_ROW_GROUP)
                writer.write_table(table.cast(SEGMENT_SCHEMA), row_group_size=rows)
    written = sink.getvalue()
    with memoryview(written).cast("B") as body:
        offset = _seal_offset(body, NO_SEAL)
        body[offset : offset + len(NO_SEAL)] = hashlib.sha256(body).hexdigest().encode()
    return bytes(written.to_pybytes())


def _seal_offset(body: memoryview, seal: str) -> int:
    """Find the offset of the seal in the footer, as rows may hold the same text; raise ValueError if it has none."""
    footer = max(len(body) - 8 - int.from_bytes(body[-8:-4], "little"), 0)
    return footer + bytes(body[footer:]).rindex(f'"seal": "{seal}"}}'.encode()) + len('"seal": "')


def read_metadata(store: ObjectStore, key: str, number: int) -> ArchivedSegment:
    """Read a stored segment that no commit lists yet; raise ArchiveError unless it is intact and belongs there.

    Never reads more than a segment of SEGMENT_BYTES_MAX. Raises ObjectMissingError.
    """
    form = stored_form(store)
    size = form.raw.size(key)
    if size > form.stored_size(SEGMENT_BYTES_MAX):
        raise ArchiveError(
            f"object {key} is larger than any segment: it has {size} bytes",
            hint=f"Cutline did not write it: put it back from a copy of the store, or {NEW_CHAIN}",
            ends_chain=ChainEnd.PERHAPS,
            details={"object": key},
        )
    stored = form.raw.read_range(key, 0, max(size, 1))
    try:
        body = form.decode(key, stored)
        metadata = from_json(pq.read_metadata(pa.BufferReader(body)).metadata[METADATA_KEY], SegmentMetadata)
        _check_seal(key, metadata, body)
        return _read_archived(metadata, number, body, stored, form)
    except (
        UndecryptableError, pa.ArrowException, KeyError, msgspec.DecodeError, OSError, TypeError, ValueError
    ) as error:  # fmt: skip
        if len(stored) != size:
            reason = f"reading {key} ended after {len(stored)} bytes"
            raise StoreUnreachableError(url=store.url, reason=reason) from error
        raise ArchiveError(
            f"object {key} is damaged, or is not a segment of this version",
            hint="if a newer version of Cutline wrote it, use that; else put it back from a copy of the store, or"
            f" {NEW_CHAIN}",
            ends_chain=ChainEnd.PERHAPS,
            details={"object": key},
        ) from error


def list_unlisted(store: ObjectStore, prefix: str, after_number: int) -> Iterator[ArchivedSegment]:
    """Yield the segments after `after_number`, the last that a commit lists.

    They are read by key, because a listing may lag behind. Raises ArchiveError.
    """
    number = after_number + 1
    while True:
        try:
            segment = read_metadata(store, segment_key(prefix, number), number)
        except ObjectMissingError:
            return
        yield segment
        number += 1


def _check_seal(key: str, metadata: SegmentMetadata, body: bytes) -> None:
    view = memoryview(body)
    offset = _seal_offset(view, metadata.seal)
    computed = hashlib.sha256(view[:offset])
    computed.update(NO_SEAL.encode())
    computed.update(view[offset + len(NO_SEAL) :])
    if computed.hexdigest() != metadata.seal or metadata.key != key:
        raise ValueError(f"its seal {metadata.seal} does not match")


def _read_archived(
    metadata: SegmentMetadata, number: int, body: bytes, stored: bytes, form: StoredForm
) -> ArchivedSegment:
    file = pq.read_metadata(pa.BufferReader(body))
    groups = _event_row_groups(file, metadata.changes)
    # Without events only the footer is needed. Its length and 4 bytes of magic follow it.
    events_at = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    for column in range(file.num_columns if groups else 0):
        chunk = file.row_group(groups[0]).column(column)
        begins = (chunk.dictionary_page_offset, chunk.data_page_offset)
        events_at = min(events_at, *(offset for offset in begins if offset))
    segment = Segment(
        key=metadata.key,
        number=number,
        size=len(body),
        digest=digest(stored),
        events_at=events_at,
        events_digest=hashlib.sha256(memoryview(stored)[form.stored_offset(events_at) :]).hexdigest(),
        changes=metadata.changes,
        events=metadata.events,
        partials=metadata.partials,
        truncates=metadata.truncates,
        node=metadata.node,
        operation=metadata.operation,
        after=metadata.after,
        through=metadata.through,
        open=metadata.open,
    )
    return ArchivedSegment(segment, metadata.definitions, metadata.first_changes)


def read_events(store: ObjectStore, segment: Segment) -> pa.Table:
    """Read only a segment's events; verify all bytes that are used. Raise ObjectDamagedError.

    Of a large segment, only the end is read.
    """
    key, node, whole = segment.key, segment.node, (segment.size, segment.digest)
    source: Any
    if segment.events_at is None or segment.size <= READ_WHOLE_BYTES_MAX:
        source = pa.BufferReader(read_listed(store, node, key, whole))
    else:
        tail = read_listed(store, node, key, (segment.size, segment.events_digest), segment.events_at)
        source = pa.PythonFile(TailFile(tail, segment.size), mode="r")
    try:
        with open_parquet(source) as file:
            groups = _event_row_groups(file.metadata, segment.changes)
            declared = sum(file.metadata.row_group(number).num_rows for number in groups)
            if declared != segment.events:
                detail = f"it has {declared} events instead of {segment.events}"
                raise ObjectDamagedError(key=key, kind="rows", node=node, detail=detail)
            if not groups:
                return pa.Table.from_batches([], SEGMENT_SCHEMA)
            events = expand_global_ids(file.read_row_groups(groups))
            check_rows(events)
            return events
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(segment, error) from error


def read_changed_groups(store: ObjectStore, segment: Segment, after: int) -> set[int]:
    """The groups changed by transactions whose commit (if prepared: PREPARE) is at or after the position `after`.

    Raises ObjectDamagedError.
    """
    lsn, group = read_positions_and_groups(store, segment)
    return set(group[lsn >= after].tolist())


def read_positions_and_groups(store: ObjectStore, segment: Segment) -> tuple[Ints, Ints]:
    """Read the position and the group of every change in the segment; raise ObjectDamagedError."""
    source = pa.BufferReader(read_listed(store, segment.node, segment.key, (segment.size, segment.digest)))
    try:
        with open_parquet(source) as file:
            if file.metadata.num_rows != segment.changes + segment.events:
                raise ValueError(f"it declares {file.metadata.num_rows} rows")
            changes = file.read(columns=["lsn", "group"]).slice(0, segment.changes)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(segment, error) from error
    return to_numpy(changes["lsn"]), to_numpy(changes["group"])


def _unreadable(segment: Segment, error: Exception) -> ObjectDamagedError:
    detail = f"it can't be read as Parquet: {error}"
    return ObjectDamagedError(key=segment.key, kind="unreadable", node=segment.node, detail=detail)


def _event_row_groups(metadata: Any, changes: int) -> list[int]:
    rows = 0
    for number in range(metadata.num_row_groups):
        if rows == changes:
            return list(range(number, metadata.num_row_groups))
        rows += metadata.row_group(number).num_rows
    return []


def _first_changes(changes: pa.Table, definitions: Iterable[Definition]) -> dict[int, Lsn]:
    """The position of the first change under each of the definitions, by group number; without those unused."""
    groups, lsns = to_numpy(changes["group"]), to_numpy(changes["lsn"])
    positions = ((one.group.number, lsns[groups == one.group.number]) for one in definitions)
    return {number: Lsn(found.min()) for number, found in positions if len(found)}


def _count(changes: pa.Table, op: str) -> int:
    return int(np.count_nonzero(to_numpy(changes["op"]) == ord(op)))
