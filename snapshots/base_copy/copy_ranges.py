"""Copy page ranges: the work that one base copy task does in an executor.

Each task opens its own session in the node's exported snapshot and copies page ranges with COPY. Operations on whole
columns split the lines into key and row. The result is stored as Parquet objects of BASE_SCHEMA, which is the same for
all tables.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct, structs
from msgspec.structs import replace
from psycopg import pq as libpq
from psycopg.pq.abc import PGresult

from cutline.columns.arrow_numbers import to_arrow
from cutline.columns.bytes_column import BytesColumn, offsets_of, partition_of
from cutline.columns.lines import keys_of
from cutline.fleet.config import Node
from cutline.nodes.connections import CopyError
from cutline.nodes.encodings import RAW
from cutline.nodes.groups import Group, column_list, qualify
from cutline.nodes.relation_locks import locked_error
from cutline.nodes.server_errors import KEY_CHARACTERS_MAX, is_damaged, is_row_error, row_hint, stopped_hint
from cutline.nodes.unlocked_results import next_line, next_result
from cutline.snapshots.base_copy.copy_slots import open_exported
from cutline.snapshots.ddl.attempts import OTHER_CAUSES
from cutline.snapshots.operations.object_lists import store_lists_above
from cutline.snapshots.records.commit import BASE, NamedObject, StoredObject, split_entries
from cutline.snapshots.records.documents import base_prefix
from cutline.snapshots.records.unfinished_records import CopiedRange, CopiedRanges, store_copied
from cutline.spark.task_progress import tell_read
from cutline.storage.errors import ErrorReport, RefusedError, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.rate import RateLimit
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.segments import parquet_options


class CopyDestination(Struct, frozen=True):
    """The snapshot, the operation and the store of a base copy.

    A task that has stored more than `reported_max` objects also stores lists of them, and reports the lists instead. If
    the base copy can be resumed after an interruption, `attempt` is its number (from 1), and each task records what
    it has copied; otherwise `attempt` is 0.
    """

    snapshot: str
    operation: str
    store: StoreLocation
    reported_max: int = 100
    attempt: int = 0

    def prefix(self, node: str) -> str:
        """Return the folder of one node's objects."""
        return base_prefix(self.snapshot, node, self.operation)


@dataclass(slots=True)
class ObjectWriter:
    """Writes objects of one `schema`, `kind` and node, under keys that begin with `beginning`.

    An object is full when it exceeds `object_bytes` as stored, or `object_raw_bytes` before compression. `objects`
    lists the stored objects with their row counts.
    """

    store: ObjectStore
    schema: pa.Schema
    kind: str
    node: str
    beginning: str
    object_bytes: int
    object_raw_bytes: int
    objects: list[StoredObject] = field(default_factory=list)
    _sink: Any = field(default=None, init=False)
    _writer: Any = field(default=None, init=False)
    _raw_bytes: int = field(default=0, init=False)
    _rows: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def is_full(self) -> bool:
        """Whether the current object is full and should be closed."""
        is_large = self._sink is not None and self._sink.tell() > self.object_bytes
        return is_large or self._raw_bytes > self.object_raw_bytes

    def count(self, number: int, rows: int, raw_bytes: int) -> None:
        """Add rows of group `number`, and their bytes before compression, to the current object's counts."""
        self._rows[number] = self._rows.get(number, 0) + rows
        self._raw_bytes += raw_bytes

    def write(self, table: pa.Table) -> None:
        """Write the table to the current object, in new row groups."""
        if self._writer is None:
            self._sink = pa.BufferOutputStream()
            self._writer = pq.ParquetWriter(self._sink, self.schema, **parquet_options(self.schema))
        self._writer.write_table(table)

    def close(self) -> None:
        """Store the current object if anything was written to it; the next write starts a new object."""
        if self._writer is None:
            return
        self._writer.close()
        body = self._sink.getvalue().to_pybytes()
        # A row may be 1 GB: release the buffers before the body is encrypted and stored.
        self._sink = self._writer = None
        # Spark may repeat a task: the random part distinguishes the keys of its attempts.
        key = f"{self.beginning}-{len(self.objects):06d}-{secrets.token_hex(4)}.parquet"
        digest = create_or_find(self.store, key, body)
        self.objects.append(StoredObject(key, self.kind, self.node, len(body), digest, self._rows))
        self._raw_bytes, self._rows = 0, {}


BASE_SCHEMA = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("row", pa.binary(), nullable=False),
    ]
)
CHUNK_ROWS, CHUNK_BYTES = 1 << 17, 16 << 20
PAGE_BYTES = 8192
# With a limit on the rate, a task pauses at least this often.
PACED_SECONDS = 0.25
OBJECT_BYTES, OBJECT_RAW_BYTES = 64 << 20, 256 << 20
# The number of COPYs in one message: with a message for each of many small tables, the server and the task would take
# turns waiting for each other.
COPIES_AT_ONCE = 50
LOCK_NOT_AVAILABLE = b"55P03"
WRONG_OBJECT = "42809"
SEE_LOG = "see the server's log"
# pg_class shows the snapshot's state; to_regclass and pg_relation_filenode show the current state. Views have no file
# node: up to version 15, an empty table can be turned into a view with the same oid. Each table's row in pg_class is
# looked up by its index: with many tables, a scan would take longer than the copies.
REPLACED_QUERY = """
SELECT p.name FROM unnest(%s::text[], %s::bigint[]) AS p (name, oid)
 WHERE to_regclass(p.name) IS DISTINCT FROM p.oid::regclass OR pg_relation_filenode(p.oid::regclass) IS NULL
    OR (SELECT c.relkind FROM pg_class c WHERE c.oid = p.oid) IS DISTINCT FROM 'r'
 LIMIT 1
"""
# A table whose file is not that of the snapshot was rewritten since. VACUUM FULL and CLUSTER move rows to other pages,
# perhaps into a range that another task has already read; the rows that pg_repack writes are not in the snapshot.
REWRITTEN_QUERY = """
SELECT p.oid FROM unnest(%s::bigint[]) AS p (oid)
 WHERE (SELECT c.relfilenode FROM pg_class c WHERE c.oid = p.oid)
       IS DISTINCT FROM pg_relation_filenode(p.oid::regclass)
"""


class RowUnreadableError(RefusedError):
    """PostgreSQL can't print a row of a table as COPY text: the row is too large, or damaged."""


class StoppedAtRowError(Exception):
    """The server could not print the row after the first `rows` rows of `part`; the error's text is the reason."""

    def __init__(self, part: PageRange, rows: int, text: str, sqlstate: str) -> None:
        super().__init__(text)
        self.part, self.rows, self.sqlstate = part, rows, sqlstate


class PageRange(Struct, frozen=True):
    """The pages of a group's table `oid` from `low` up to, but not including, `high`; None means the table's end."""

    group: Group
    oid: int
    low: int = 0
    high: int | None = None


class CopyTask(Struct, frozen=True):
    """Page ranges of one node, `size` bytes in total, to be copied in the node's exported snapshot.

    They are read at up to `bytes_per_second`; None means no limit. If the task `is_for_primary`, its objects are stored
    for the node's primary: the copies of both begin with them.
    """

    node: Node
    number: int
    exported: str
    ranges: tuple[PageRange, ...]
    destination: CopyDestination
    size: int
    bytes_per_second: float | None = None
    is_for_primary: bool = False

    @property
    def copy_of(self) -> str:
        """The node for which the objects are stored."""
        return self.node.shard if self.is_for_primary else self.node.id


class CopyReport(Struct, frozen=True):
    """The objects that a CopyTask stored, or lists of these objects, or the error that ended the task.

    `rewritten` has the oids of tables whose rows may be incomplete, because the table was rewritten after the snapshot.
    """

    entries: tuple[NamedObject, ...] = ()
    problem: ErrorReport | None = None
    rewritten: tuple[int, ...] = ()


def copy_ranges(task: CopyTask) -> CopyReport:
    """Copy the task's ranges. Reports a SnapshotError instead of raising it."""
    try:
        # synchronize_seqscans is off in every session, and a page range is read in order anyway.
        with _naming_rows(task), open_exported(task.node, task.exported) as connection:
            to = task.destination
            objects = ObjectWriter(
                to.store.open(),
                BASE_SCHEMA,
                BASE,
                task.copy_of,
                f"{to.prefix(task.copy_of)}/part-{task.number:06d}",
                OBJECT_BYTES,
                OBJECT_RAW_BYTES,
            )
            rows, pace = _Rows(objects), RateLimit(task.bytes_per_second, tell_read)
            rewritten = lock_tables(connection, task.node, task.ranges)
            # The server prints the next ranges while the task pauses, so with a limit it gets one at a time.
            together = COPIES_AT_ONCE if task.bytes_per_second is None else 1
            for first in range(0, len(task.ranges), together):
                parts = task.ranges[first : first + together]
                copies = [(part, copy_query(part)) for part in parts]
                for part, lines in copy_in_turn(connection, task.node, copies, pace):
                    rows.add(part.group, lines)
                    # A line may be 1 GB: release it before the next line is read.
                    del lines
            rows.close()
            stored = objects.objects
            entries = store_lists_above(objects.store, to.snapshot, to.operation, stored, to.reported_max)
            if to.attempt:
                _record_copied(objects.store, task, entries, rewritten)
            return CopyReport(entries, rewritten=rewritten)
    except SnapshotError as error:
        return CopyReport(problem=report_of(error))


def _record_copied(
    store: ObjectStore, task: CopyTask, entries: tuple[NamedObject, ...], rewritten: tuple[int, ...]
) -> None:
    """Store what the task has copied, so that the base copy can be resumed without it."""
    objects, lists = split_entries(entries)
    ranges = tuple(CopiedRange(part.group.number, part.low, part.high) for part in task.ranges)
    to = task.destination
    store_copied(
        store,
        CopiedRanges(
            operation=to.operation,
            attempt=to.attempt,
            number=task.number,
            node=task.node.id,
            ranges=ranges,
            objects=objects,
            lists=lists,
            rewritten=rewritten,
        ),
    )


@contextmanager
def _naming_rows(task: CopyTask) -> Iterator[None]:
    """Turn StoppedAtRowError into RowUnreadableError, which names the row."""
    try:
        yield
    except StoppedAtRowError as stopped:
        part, rows = stopped.part, stopped.rows
        # If the key is on a damaged page, it can't be read either.
        unnamed = "its key can't be read" if part.group.key_width else "the table has no key"
        where = f"row {rows + 1}, counted from page {part.low}; {unnamed}"
        # The transaction has failed. A new session in the same snapshot reads the keys in the same order.
        with suppress(SnapshotError, StoppedAtRowError), open_exported(task.node, task.exported) as connection:
            lock_tables(connection, task.node, [part])
            where = _key_text(connection, task.node, part, rows) or where
        table, damaged = part.group.name, "its data is damaged: " if is_damaged(stopped.sqlstate) else ""
        raise RowUnreadableError(
            f"node {task.node.id}: {damaged}table {table}: PostgreSQL can't print a row for COPY: {stopped} ({where})",
            hint=f"{row_hint(stopped.sqlstate, is_standby=task.node.backup_of is not None)}; then repeat the command",
            details={"node": task.node.id, "group": table, "row": where},
        ) from stopped


def _key_text(connection: psycopg.Connection[Any], node: Node, part: PageRange, rows: int) -> str:
    """Return the key of the row after the first `rows` rows of the range, as `id = 7`; "" if the table has no key."""
    key = part.group.columns[: part.group.key_width]
    if not key:
        return ""
    keys = replace(part, group=structs.replace(part.group, columns=key))
    for lines in copy_lines(connection, node, keys, copy_query(keys)):
        if rows < len(lines):
            # The COPY has not ended, so the session can't be reused.
            connection.close()
            begin, end = lines.offsets[rows : rows + 2].tolist()
            text = bytes(lines.data[begin:end]).decode(errors="replace").rstrip("\n")
            named = zip((column.name for column in key), text.split("\t"), strict=True)
            return ", ".join(f"{name} = {value}" for name, value in named)[:KEY_CHARACTERS_MAX]
        rows -= len(lines)
    return ""


def lock_tables(connection: psycopg.Connection[Any], node: Node, ranges: Sequence[PageRange]) -> tuple[int, ...]:
    """Lock the tables of the ranges; raise CopyError if a table no longer has the planned oid.

    Returns the oids of the tables that were rewritten since the session's snapshot; the lock prevents that from now on.
    Raises RelationLockedError if that takes too long. Without the lock, the table's owner could replace it with a view
    or another table, whose functions would run as our role.
    """
    planned = {qualify(part.group): part.oid for part in ranges}
    try:
        connection.execute(f"LOCK TABLE ONLY {', ONLY '.join(planned)} IN ACCESS SHARE MODE".encode())
    except psycopg.errors.LockNotAvailable as error:
        what = ranges[0].group.name if len(planned) == 1 else f"{len(planned)} tables"
        raise locked_error(node, f"copying {what}", planned) from error
    except psycopg.Error as error:
        if connection.broken:
            raise
        if (error.sqlstate or "").startswith(OTHER_CAUSES):
            raise _stopped(node, ranges[0], str(error).encode(), error.sqlstate or "") from error
        # A table was dropped or renamed, our role can no longer read it, or its DDL caused a deadlock.
        raise _replaced_error(node, str(error.diag.message_primary), error.sqlstate or WRONG_OBJECT) from error
    names, oids = list(planned), list(planned.values())
    for (name,) in connection.execute(REPLACED_QUERY, (names, oids)).fetchall():
        raise _replaced_error(node, f"{name} is now a different relation", WRONG_OBJECT)
    return tuple(oid for (oid,) in connection.execute(REWRITTEN_QUERY, (oids,)))


def _replaced_error(node: Node, reason: str, sqlstate: str) -> CopyError:
    return CopyError(
        f"node {node.id}: a table was changed while the base copy was starting: {reason}",
        hint="repeat the command",
        details={"node": node.id, "sqlstate": sqlstate},
    )


def copy_query(part: PageRange) -> str:
    """Return the COPY that prints the range's rows, key columns first, in the server's encoding.

    COPY of a whole table bypasses the planner, which might run the table owner's code (nodes/left_out.py).
    """
    if part.low == 0 and part.high is None and part.group.columns:
        return f"COPY {qualify(part.group)} ({column_list(part.group)}) TO STDOUT (ENCODING '{RAW}')"
    where = f" WHERE ctid >= '({part.low},0)'::tid" if part.low else ""
    if part.high is not None:
        where += f"{' AND' if where else ' WHERE'} ctid < '({part.high},0)'::tid"
    rows = f"SELECT {column_list(part.group)} FROM ONLY {qualify(part.group)}{where}"
    return f"COPY ({rows}) TO STDOUT (ENCODING '{RAW}')"


def copy_lines(connection: psycopg.Connection[Any], node: Node, part: PageRange, query: str) -> Iterator[BytesColumn]:
    """Yield the lines of a COPY `query` that reads the range, in columns of bounded size.

    Raises StoppedAtRowError if the server can't print a row, RelationLockedError if it waits too long for a lock, and
    CopyError, whose details have the server's `sqlstate`, for any other error.
    """
    for _, lines in copy_in_turn(connection, node, [(part, query)]):
        yield lines
        del lines


def copy_in_turn(
    connection: psycopg.Connection[Any],
    node: Node,
    copies: Sequence[tuple[PageRange, str]],
    pace: RateLimit | None = None,
) -> Iterator[tuple[PageRange, BytesColumn]]:
    """Send several COPYs, each with the range that it reads, in one message; yield their lines as copy_lines does.

    With a `pace`, the lines' bytes and, if those are fewer, the bytes of the ranges' pages are spent as they are read.
    Raises the errors of copy_lines, about the range of the COPY that stopped; those that follow it are not executed.
    """
    raw = connection.pgconn
    result: PGresult | None = raw.exec_("; ".join(query for _, query in copies).encode())
    for part, _ in copies:
        _check_copying(node, part, raw, result)
        rows, left_bytes = 0, (part.high - part.low) * PAGE_BYTES if pace and part.high is not None else 0
        for lines in _read_lines(raw, node, part, _chunk_bytes(pace)):
            rows += len(lines)
            if pace is not None:
                left_bytes -= len(lines.data)
                pace.spend(len(lines.data))
            yield part, lines
            # A line may be 1 GB: release it before the next line is read.
            del lines
        try:
            ended = next_result(raw)
            # After the last COPY or an error, this reads to the end, so that the session can be reused or closed.
            result = next_result(raw) if ended is not None else None
        except psycopg.OperationalError as error:
            raise _stopped(node, part, str(error).encode()) from error
        if ended is None:
            raise _stopped(node, part, raw.error_message)
        if ended.status != libpq.ExecStatus.COMMAND_OK:
            # The server has sent all rows that it printed before the error.
            raise _copy_error(node, part, ended, rows)
        if pace is not None and left_bytes > 0:
            pace.spend(left_bytes)


def _check_copying(node: Node, part: PageRange, raw: Any, result: PGresult | None) -> None:
    """Raise the server's error unless the result says that the range's COPY has begun."""
    if result is None:
        raise _stopped(node, part, raw.error_message)
    if result.status == libpq.ExecStatus.COPY_OUT:
        return
    if result.error_field(libpq.DiagnosticField.SQLSTATE) == LOCK_NOT_AVAILABLE:
        raise locked_error(node, f"copying {part.group.name}", [qualify(part.group)])
    raise _copy_error(node, part, result)


def _chunk_bytes(pace: RateLimit | None) -> int:
    """Return how much is read at full speed: with a limit, no more than fits into PACED_SECONDS."""
    if pace is None or pace.bytes_per_second is None:
        return CHUNK_BYTES
    return min(CHUNK_BYTES, math.ceil(pace.bytes_per_second * PACED_SECONDS))


def _read_lines(raw: Any, node: Node, part: PageRange, chunk_bytes: int) -> Iterator[BytesColumn]:
    """Yield the lines of a running COPY in chunks; a line above `chunk_bytes` is a chunk by itself and is not copied.

    libpq returns one line per call. The loop over lines avoids all other calls: they took a third of the time.
    """
    length, receive = 1, raw.get_copy_data
    while length > 0:
        data = bytearray()
        lengths: list[int] = []
        add = lengths.append
        try:
            for _ in repeat(None, CHUNK_ROWS):
                length, line = receive(1)
                if length <= 0 or length > chunk_bytes:
                    if length == 0:
                        length, line = next_line(raw)
                    if length <= 0 or length > chunk_bytes:
                        break
                # Append each line immediately: keeping libpq's buffers takes six times the memory (measured).
                data += line
                add(length)
                if len(data) > chunk_bytes:
                    break
        except psycopg.OperationalError as error:
            # The server gives no further reason if it terminates the session while sending.
            raise _stopped(node, part, str(error).encode()) from error
        if lengths:
            yield _column(data, lengths)
        if length > chunk_bytes:
            lines = _column(line, [length])
            del data, line
            yield lines
            del lines


def _column(data: bytes | bytearray | memoryview, lengths: list[int]) -> BytesColumn:
    return BytesColumn(np.frombuffer(data, np.uint8), offsets_of(np.array(lengths, np.int64)))


def _copy_error(node: Node, part: PageRange, result: PGresult, rows: int | None = None) -> Exception:
    """Convert the server's error; `rows` is the number of rows printed before it, None if the COPY had not started."""
    state = (result.error_field(libpq.DiagnosticField.SQLSTATE) or b"").decode()
    if rows is None or not is_row_error(state):
        return _stopped(node, part, result.error_message, state)
    text = (result.error_field(libpq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    return StoppedAtRowError(part, rows, text, state)


def _stopped(node: Node, part: PageRange, message: bytes, sqlstate: str = "") -> CopyError:
    text = " ".join(message.decode(errors="replace").split())
    return CopyError(
        f"node {node.id}: copying table {part.group.name} stopped: {text}",
        hint=f"{stopped_hint(sqlstate) or SEE_LOG}; then repeat the command",
        details={"node": node.id, "group": part.group.name, **({"sqlstate": sqlstate} if sqlstate else {})},
    )


def base_table(group: Group, lines: BytesColumn) -> pa.Table:
    """Convert COPY lines to BASE_SCHEMA rows."""
    return _base_rows(np.full(len(lines), group.number, np.int32), _Shape.of(group), lines)


class _Shape(NamedTuple):
    """How lines of a group are split and divided: lines of groups with the same shape are converted together."""

    key_width: int
    width: int
    partitions: int

    @classmethod
    def of(cls, group: Group) -> _Shape:
        return cls(group.key_width, len(group.columns), group.partitions)


def _base_rows(numbers: npt.NDArray[np.int32], shape: _Shape, lines: BytesColumn) -> pa.Table:
    """Convert COPY lines of groups with the same shape to BASE_SCHEMA rows; `numbers` has the group of each line."""
    keys = keys_of(lines, shape.key_width, shape.width)
    partitions = partition_of(keys if shape.key_width else lines, shape.partitions)
    return pa.table([to_arrow(numbers), to_arrow(partitions), keys.to_arrow(), lines.to_arrow()], schema=BASE_SCHEMA)


def _base_tables(waiting: Iterable[tuple[Group, BytesColumn]]) -> Iterator[pa.Table]:
    """Convert the lines of several groups, in order. Separate calls for each of many small tables would take longer."""
    for shape, run in groupby(waiting, key=lambda one: _Shape.of(one[0])):
        groups, columns = zip(*run, strict=True)
        if len(groups) == 1:
            yield base_table(groups[0], columns[0])
            continue
        numbers = np.repeat(np.array([group.number for group in groups], np.int32), [len(column) for column in columns])
        lengths = np.concatenate([column.lengths for column in columns])
        lines = BytesColumn(np.concatenate([column.data for column in columns]), offsets_of(lengths))
        yield _base_rows(numbers, shape, lines)


@dataclass(slots=True)
class _Rows:
    """Buffers lines until they are written to objects.

    A row group may contain lines of many tables: if each of thousands of small tables had its own row group, the row
    group would take more space than the rows.
    """

    objects: ObjectWriter
    waiting: list[tuple[Group, BytesColumn]] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_bytes: int = 0

    def add(self, group: Group, lines: BytesColumn) -> None:
        if self.waiting_rows + len(lines) > CHUNK_ROWS or self.waiting_bytes + len(lines.data) > CHUNK_BYTES:
            self._write_waiting()
        self.waiting.append((group, lines))
        self.waiting_rows += len(lines)
        self.waiting_bytes += len(lines.data)
        self.objects.count(group.number, len(lines), len(lines.data))
        if self.waiting_bytes > CHUNK_BYTES:
            self._write_waiting()
        if self.objects.is_full:
            self.close()

    def _write_waiting(self) -> None:
        if self.waiting:
            waiting, self.waiting, self.waiting_rows, self.waiting_bytes = self.waiting, [], 0, 0
            self.objects.write(pa.concat_tables(_base_tables(waiting)))

    def close(self) -> None:
        self._write_waiting()
        self.objects.close()
