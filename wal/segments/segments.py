"""Segments: decoded WAL as Parquet objects, which form the archive of a node in a chain (wal/segments/archive.py).

A segment holds row changes and transaction events, in separate row groups. The `lsn` of a change is the position where
the commit record of its transaction begins (for a prepared transaction, its PREPARE record), and so is its `end_lsn`.
The `lsn` of an event is the position of its own record, and its `end_lsn` is where that record ends. For a marker, only
the end is known. The `end_lsn` of a ROLLBACK PREPARED is its own end; its `lsn` is the end of the PREPARE that it
rolled back.

With a dictionary, a few kilobytes can expand to gigabytes, because a value is stored once for any number of rows.
Cutline writes keys, rows and the data of large objects without dictionaries, so that their size is the size of the
pages; only columns of short values have dictionaries.

The metadata names the operation that wrote the segment and the range of the node's WAL that it holds. It also contains
those definitions of its tables that no commit lists yet. If a failed attempt leaves the segment at the end of an
archive, the definitions tell the next attempt what its group numbers mean.

A segment that a commit lists is verified against the commit. Until then it is verified by its seal: the digest of the
whole file, with the seal replaced by zeros.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import fields_of, from_json
from cutline.storage.digest import digest
from cutline.storage.errors import ChainEnd
from cutline.storage.process_limits import says_no_memory
from cutline.storage.store import ObjectMissingError, ObjectStore, StoreUnreachableError
from cutline.storage.stored_form import StoredForm, UndecryptableError, stored_form
from cutline.storage.storing import create_or_find
from cutline.wal.segments.archive import (
    FORMAT,
    NO_SEAL,
    ArchivedSegment,
    ArchiveError,
    Definition,
    OpenTransaction,
    Segment,
    SegmentDamagedError,
    SegmentMetadata,
    SegmentRange,
    segment_key,
)
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

INSERT, UPSERT, PARTIAL, DELETE, TRUNCATE = (ord(letter) for letter in "IUuDT")
COMMIT, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED, MARKER = (ord(letter) for letter in "CPKRM")

# op, an ASCII code:
#   I  insert of a row into a group without a key; `row` is its line
#   U  insert or update; `row` is the complete new line
#   u  update; `row` is the new line, in which \u marks values that are unchanged
#   D  delete of the row with this `key` (in a group without a key: with the line `row`). If an update changed the key
#      and left values unchanged, `row` is the new key as a line: with a newline, because a key may be empty
#   T  truncate of the group
#   C  COMMIT   P  PREPARE; `row` is its gid if that is not the global id   K  COMMIT PREPARED   R  ROLLBACK PREPARED
#   M  a marker; `row` is its content
#
# seq: for a change, its number within its transaction. For an event, when the transaction ended or was prepared, by the
# node's clock, in microseconds since 2000, as in PostgreSQL. 0 for markers, and for the COMMIT of a transaction that
# repeats one of another server (a subscription applies it): PostgreSQL tells the time of that server instead.
#
# global_id: for changes and events of a two-phase transaction, its global id. For a COMMIT, the global id of its tag
# (wal.decoding.transactions), which names the distributed transaction whose part this node committed in one phase.
#
# key: for a PREPARE, or a COMMIT with a global id, the names of the transaction's participants, if its gid or a message
# in it names them (fleet.participants). Empty for all other events.
#
# changes: for a COMMIT or a PREPARE, the number of changes of the transaction in this segment and those before it. Null
# for all other rows.
SEGMENT_SCHEMA = pa.schema(
    [
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("end_lsn", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("global_id", pa.string()),
        pa.field("op", pa.int8(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("row", pa.binary(), nullable=False),
        pa.field("changes", pa.int64()),
    ]
)
NO_GROUP = 0
EVERY_PARTITION = -1
UNKNOWN_TIME = 0
ROW_CHANGES = (INSERT, UPSERT, PARTIAL, DELETE)
CHANGES = (*ROW_CHANGES, TRUNCATE)
OF_TWO_PHASES = (PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED)
# The events at which the changes of a transaction end.
ENDS = (COMMIT, PREPARE)
EVENTS = (COMMIT, *OF_TWO_PHASES, MARKER)


def are_of(op: npt.NDArray[Any], kinds: Iterable[int]) -> Flags:
    """Flag the rows whose `op` (int8) is one of these kinds. For few rows, np.isin takes ten times as long."""
    found: Flags = _flags_of(tuple(kinds))[op.view(np.uint8)]
    return found


@cache
def _flags_of(kinds: tuple[int, ...]) -> Flags:
    flags = np.zeros(1 << 8, np.bool_)
    flags[list(kinds)] = True
    return flags


def check_rows(table: pa.Table) -> None:
    """Raise ValueError unless each row is a change with a group, or an event without a group but with its global id."""
    op, group = to_numpy(table["op"]), to_numpy(table["group"])
    is_change = are_of(op, CHANGES)
    if not (is_change | are_of(op, EVENTS)).all():
        raise ValueError("it contains a row that is neither a change nor an event")
    if (group[is_change] <= NO_GROUP).any() or (group[~is_change] != NO_GROUP).any():
        raise ValueError("it contains a change without a group, or an event with a group")
    needs_id = are_of(op, OF_TWO_PHASES)
    if needs_id.any() and table["global_id"].filter(to_mask(needs_id)).null_count:
        raise ValueError("it contains an event of a two-phase transaction without a global id")


# Arrow never writes a row group with more rows. A line of COPY is at most 1 GB, and its key is stored again.
ROW_GROUP_ROWS_MAX, ROW_GROUP_BYTES_MAX = 1 << 20, 4 << 30
INCREASING = frozenset({"lsn", "end_lsn", "seq", "xid"})
REPEATED = frozenset({"group", "partition", "op", "global_id", "changes"})
# The only texts with a dictionary. PostgreSQL's gids are shorter than 200 bytes, before escaping.
GLOBAL_ID, GLOBAL_ID_BYTES_MAX = "global_id", 4096
BYTES = "BYTE_ARRAY"
# RLE and BIT_PACKED are for the definition levels, which mark missing values.
PLAIN = frozenset({"PLAIN", "RLE", "BIT_PACKED"})


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the encoding of all Parquet objects: zstd, increasing numbers as differences, repeated values as runs."""
    names = frozenset(schema.names)
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": sorted(names & REPEATED),
        "column_encoding": dict.fromkeys(sorted(names & INCREASING), "DELTA_BINARY_PACKED"),
        "write_statistics": False,
        # Arrow copies a page of version 1 once more before it compresses the page.
        "data_page_version": "2.0",
        "store_schema": False,
    }


def open_parquet(source: Any) -> pq.ParquetFile:
    """Open a Parquet object; raise ValueError if it declares more than Cutline writes, or a pa.ArrowException."""
    file = pq.ParquetFile(source)
    footer = file.metadata
    if GLOBAL_ID in footer.schema.names:
        file = pq.ParquetFile(source, metadata=footer, read_dictionary=[GLOBAL_ID])
    for group in map(footer.row_group, range(footer.num_row_groups)):
        if not 0 <= group.num_rows <= ROW_GROUP_ROWS_MAX or not 0 <= group.total_byte_size <= ROW_GROUP_BYTES_MAX:
            declared = f"{group.num_rows} rows and {group.total_byte_size} bytes"
            raise ValueError(f"a row group declares {declared}, more than Cutline writes")
        for column in map(group.column, range(group.num_columns)):
            is_text = column.physical_type == BYTES and column.path_in_schema != GLOBAL_ID
            if is_text and not PLAIN.issuperset(column.encodings):
                raise ValueError(f"column {column.path_in_schema} has an encoding that Cutline does not write")
    return file


def expand_global_ids(table: pa.Table) -> pa.Table:
    """Replace the dictionary of a table's global ids with the texts; raise ValueError if a text is too long."""
    place = table.schema.get_field_index(GLOBAL_ID)
    if place < 0 or not pa.types.is_dictionary(table.schema.field(place).type):
        return table
    column = table.column(place)
    lengths = [pc.max(pc.binary_length(chunk.dictionary)).as_py() or 0 for chunk in column.chunks]
    if max(lengths, default=0) > GLOBAL_ID_BYTES_MAX:
        raise ValueError(f"a global id is {max(lengths)} bytes long, more than PostgreSQL allows")
    return table.set_column(place, pa.field(GLOBAL_ID, pa.string()), column.cast(pa.string()))


def in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table in this schema, without metadata; a cast that changes nothing takes as long as reading rows."""
    return table.replace_schema_metadata(None) if table.schema.equals(schema) else table.cast(schema)


class TailFile(io.RawIOBase):
    """A file of `size` bytes that ends with `tail`; all bytes before `tail` read as zeros."""

    def __init__(self, tail: bytes, size: int) -> None:
        super().__init__()
        self._tail, self._size = tail, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence] + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._place, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        begin = self._place - (self._size - len(self._tail))
        self._place += wanted
        zeros = min(max(-begin, 0), wanted)
        return bytes(zeros) + self._tail[max(begin, 0) : max(begin + wanted, 0)]


METADATA_KEY = b"cutline"
# A reader of changes holds one row group in memory at a time.
ROWS_PER_ROW_GROUP, ROW_GROUP_BYTES = 1 << 18, 32 << 20
# The maximum size of a segment. A segment ends soon after 40 MiB of changes (drain.py); its last message is at most 1
# GiB, and escaping at most doubles that.
SEGMENT_BYTES_MAX = 4 << 30
# A segment up to this size is read in one request even if only its events are needed.
READ_WHOLE_BYTES_MAX = 4 << 20


def create_segment(
    store: ObjectStore,
    prefix: str,
    number: int,
    wal_range: SegmentRange,
    tables: tuple[pa.Table, pa.Table],
    definitions: tuple[Definition, ...] = (),
    *,
    continued: OpenTransaction | None,
) -> ArchivedSegment:
    """Create segment `number` from `tables` (changes, events); raise ObjectExistsError if it exists.

    `definitions` are those that no commit lists yet, and `continued` is the transaction in which the segment before
    this one ends. The changes of each transaction are counted.
    """
    changes, events = tables
    events, opened = count_changes(changes, events, continued, wal_range.open)
    key = segment_key(prefix, number)
    metadata = SegmentMetadata(
        key=key,
        node=wal_range.node,
        operation=wal_range.operation,
        after=wal_range.after,
        through=wal_range.through,
        open=opened,
        definitions=definitions,
        first_changes=_first_changes(changes, definitions),
        changes=len(changes),
        events=len(events),
        partials=_count(changes, "u"),
        truncates=_count(changes, "T"),
        history=wal_range.history,
    )
    body = segment_bytes(metadata, changes, events)
    form = stored_form(store)
    stored = form.encode(key, body)
    create_or_find(form.raw, key, stored)
    return _read_archived(metadata, number, body, stored, form)


def count_changes(
    changes: pa.Table, events: pa.Table, continued: OpenTransaction | None, opened: OpenTransaction | None
) -> tuple[pa.Table, OpenTransaction | None]:
    """Return the events of a segment, and the transaction that it leaves open, with the numbers of their changes.

    `continued` is the transaction that the segment before this one leaves open.
    """
    positions, counts = np.unique(to_numpy(changes["lsn"]), return_counts=True)
    if continued is not None:
        positions, places = np.unique(np.append(positions, int(continued.lsn)), return_inverse=True)
        counts = np.bincount(places, np.append(counts, continued.changes)).astype(np.int64)
    # No transaction has the position -1.
    positions, counts = np.append(positions, -1), np.append(counts, 0)

    def changes_at(lsn: Ints) -> Ints:
        place = np.searchsorted(positions[:-1], lsn)
        return np.where(positions[place] == lsn, counts[place], 0)

    is_end = are_of(to_numpy(events["op"]), ENDS)
    column = to_arrow(changes_at(to_numpy(events["lsn"])), absent=~is_end)
    place = SEGMENT_SCHEMA.get_field_index("changes")
    events = events.set_column(place, SEGMENT_SCHEMA.field(place), column)
    if opened is not None:
        opened = msgspec.structs.replace(opened, changes=int(changes_at(np.array([int(opened.lsn)]))[0]))
    return events, opened


def segment_bytes(metadata: SegmentMetadata, changes: pa.Table, events: pa.Table) -> bytes:
    """Build the sealed Parquet file of a segment: row groups of changes, then row groups of events."""
    # Arrow would pass a copy of each page, which may be 1 GB, to any other sink.
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
    """Find the offset of the seal in the footer (rows may contain the same text); raise ValueError if there is none."""
    footer = max(len(body) - 8 - int.from_bytes(body[-8:-4], "little"), 0)
    return footer + bytes(body[footer:]).rindex(f'"seal": "{seal}"}}'.encode()) + len('"seal": "')


def read_metadata(store: ObjectStore, node: str, key: str, number: int) -> ArchivedSegment:
    """Read a stored segment of the node's archive that no commit lists yet.

    Raises SegmentDamagedError unless it is intact and belongs under `key`, ArchiveError if it has the format of another
    version, and ObjectMissingError. Never reads more than SEGMENT_BYTES_MAX.
    """
    form = stored_form(store)
    size = form.raw.size(key)
    if size > form.stored_size(SEGMENT_BYTES_MAX):
        raise _damaged_error(node, key, f"is larger than any segment: it is {size} bytes")
    stored = form.raw.read_range(key, 0, max(size, 1))
    try:
        body = form.decode(key, stored)
        metadata = from_json(pq.read_metadata(pa.BufferReader(body)).metadata[METADATA_KEY], SegmentMetadata)
        _check_seal(key, metadata, body)
        return _read_archived(metadata, number, body, stored, form)
    except MemoryError:
        raise
    except (
        UndecryptableError,
        pa.ArrowException,
        KeyError,
        msgspec.DecodeError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        if len(stored) != size:
            reason = f"reading {key} ended after {len(stored)} bytes"
            raise StoreUnreachableError(url=store.url, reason=reason) from error
        if other := _other_format(form, key, stored):
            raise ArchiveError(
                f"node {node}: segment {key}, which no commit lists, has the format {other}",
                hint=f"a newer version of Cutline wrote it: use that version; or {NEW_CHAIN}",
                ends_chain=ChainEnd.PERHAPS,
                details={"node": node, "object": key},
            ) from error
        raise _damaged_error(node, key, "is damaged") from error


def _damaged_error(node: str, key: str, problem: str) -> SegmentDamagedError:
    return SegmentDamagedError(
        f"node {node}: segment {key}, which no commit lists, {problem}",
        hint="repeat the command: it copies the node again",
        details={"node": node, "object": key},
    )


def _other_format(form: StoredForm, key: str, stored: bytes) -> str:
    """Return the format of a segment of another version; "" if the bytes have none, or this version's."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(form.decode(key, stored))).metadata[METADATA_KEY]
        name = msgspec.json.decode(metadata, type=dict[str, object])["format"]
    except (UndecryptableError, pa.ArrowException, KeyError, msgspec.DecodeError, OSError, TypeError, ValueError):
        return ""
    return name if isinstance(name, str) and name != FORMAT and name.startswith("cutline/segment/") else ""


def list_unlisted(
    store: ObjectStore,
    node: str,
    prefix: str,
    after_number: int,
    read_before: Mapping[str, ArchivedSegment] = MappingProxyType({}),
) -> Iterator[ArchivedSegment]:
    """Yield the segments of the node's archive after `after_number`, which is the last segment that a commit lists.

    Segments are read by key, because a listing may lag behind; those in `read_before`, by key, are not read again.
    Raises the errors of read_metadata.
    """
    number = after_number + 1
    while True:
        key = segment_key(prefix, number)
        try:
            segment = read_before.get(key) or read_metadata(store, node, key, number)
        except ObjectMissingError:
            return
        yield segment
        number += 1


def _check_seal(key: str, metadata: SegmentMetadata, body: bytes) -> None:
    if not seal_fits(metadata, body) or metadata.key != key:
        raise ValueError(f"its seal {metadata.seal} does not match")


def seal_fits(metadata: SegmentMetadata, body: bytes) -> bool:
    """Whether the seal in a segment's metadata is the digest of its file, with zeros in place of the seal."""
    view = memoryview(body)
    try:
        offset = _seal_offset(view, metadata.seal)
    except ValueError:
        return False
    computed = hashlib.sha256(view[:offset])
    computed.update(NO_SEAL.encode())
    computed.update(view[offset + len(NO_SEAL) :])
    return computed.hexdigest() == metadata.seal


def _read_archived(
    metadata: SegmentMetadata, number: int, body: bytes, stored: bytes, form: StoredForm
) -> ArchivedSegment:
    # Without events only the footer is needed. It is followed by its length and 4 bytes of magic.
    footer_at = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    events_at = events_offset(pq.read_metadata(pa.BufferReader(body)), metadata.changes, footer_at)
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
    return ArchivedSegment(segment, metadata.definitions, metadata.first_changes, metadata.history)


def events_offset(file: Any, changes: int, footer_at: int) -> int:
    """Return the offset of the first event in a segment with this metadata; without events, that of its footer."""
    groups, offset = event_row_groups(file, changes), footer_at
    for column in range(file.num_columns if groups else 0):
        chunk = file.row_group(groups[0]).column(column)
        begins = (chunk.dictionary_page_offset, chunk.data_page_offset)
        offset = min(offset, *(begin for begin in begins if begin))
    return offset


def read_events(store: ObjectStore, segment: Segment) -> pa.Table:
    """Read a segment's events; verify all bytes that are used, and raise ObjectDamagedError.

    Only the end of a large segment is read.
    """
    key, node, whole = segment.key, segment.node, (segment.size, segment.digest)
    source: Any
    if segment.events_at is None or segment.size <= READ_WHOLE_BYTES_MAX:
        source = pa.BufferReader(read_listed(store, node, key, whole))
    else:
        tail = read_listed(store, node, key, (segment.size, segment.events_digest), segment.events_at)
        source = pa.PythonFile(TailFile(tail, segment.size), mode="r")
    with reading_parquet(segment.key, segment.node), open_parquet(source) as file:
        groups = event_row_groups(file.metadata, segment.changes)
        check_event_count(segment, sum(file.metadata.row_group(number).num_rows for number in groups))
        if not groups:
            return pa.Table.from_batches([], SEGMENT_SCHEMA)
        # For a small segment, Arrow's threads take longer than the work that they do.
        is_large = segment.size > READ_WHOLE_BYTES_MAX
        events = in_schema(expand_global_ids(file.read_row_groups(groups, use_threads=is_large)), SEGMENT_SCHEMA)
        check_rows(events)
        return events


def check_event_count(segment: Segment, count: int) -> None:
    """Raise ObjectDamagedError unless the row groups of events have as many rows as the commit says."""
    if count != segment.events:
        detail = f"it contains {count} events instead of {segment.events}"
        raise ObjectDamagedError(key=segment.key, kind="rows", node=segment.node, detail=detail)


def read_changed_groups(store: ObjectStore, segment: Segment, after: int) -> set[int]:
    """Return the groups changed by transactions whose COMMIT (or PREPARE, if prepared) is at or after position `after`.

    Raises ObjectDamagedError.
    """
    lsn, group = read_positions_and_groups(store, segment)
    return set(group[lsn >= after].tolist())


def read_positions_and_groups(store: ObjectStore, segment: Segment) -> tuple[Ints, Ints]:
    """Read the position and the group of every change in the segment; raise ObjectDamagedError."""
    source = pa.BufferReader(read_listed(store, segment.node, segment.key, (segment.size, segment.digest)))
    with reading_parquet(segment.key, segment.node), open_parquet(source) as file:
        if file.metadata.num_rows != segment.changes + segment.events:
            raise ValueError(f"it declares {file.metadata.num_rows} rows")
        changes = file.read(columns=["lsn", "group"]).slice(0, segment.changes)
    return to_numpy(changes["lsn"]), to_numpy(changes["group"])


def read_changes(store: ObjectStore, segment: Segment, columns: list[str]) -> Iterator[pa.Table]:
    """Yield these columns of the segment's changes, a row group at a time; raise ObjectDamagedError."""
    source = pa.BufferReader(read_listed(store, segment.node, segment.key, (segment.size, segment.digest)))
    rows = 0
    with reading_parquet(segment.key, segment.node), open_parquet(source) as file:
        for number in range(file.metadata.num_row_groups):
            if rows < segment.changes:
                group = file.read_row_group(number, columns=columns)
                yield group.slice(0, segment.changes - rows)
                rows += len(group)


@contextmanager
def reading_parquet(key: str, node: str) -> Iterator[None]:
    """Raise ObjectDamagedError if the block can't read an object as Parquet, but MemoryError if memory is short."""
    try:
        yield
    except MemoryError:
        # Arrow's own is an ArrowException as well.
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if says_no_memory(str(error)):
            raise MemoryError(str(error)) from error
        detail = f"it can't be read as Parquet: {error}"
        raise ObjectDamagedError(key=key, kind="unreadable", node=node, detail=detail) from error


def event_row_groups(metadata: Any, changes: int) -> list[int]:
    """Return the row groups with the events of a segment, which follow those with its `changes`."""
    rows = 0
    for number in range(metadata.num_row_groups):
        if rows == changes:
            return list(range(number, metadata.num_row_groups))
        rows += metadata.row_group(number).num_rows
    return []


def _first_changes(changes: pa.Table, definitions: Iterable[Definition]) -> dict[int, Lsn]:
    """Return the position of the first change under each definition that was used, keyed by group number."""
    groups, lsns = to_numpy(changes["group"]), to_numpy(changes["lsn"])
    positions = ((definition.group.number, lsns[groups == definition.group.number]) for definition in definitions)
    return {number: Lsn(found.min()) for number, found in positions if len(found)}


def _count(changes: pa.Table, op: str) -> int:
    return int(np.count_nonzero(to_numpy(changes["op"]) == ord(op)))
