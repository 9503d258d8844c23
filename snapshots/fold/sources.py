"""Sources of a fold: stored objects, verified, converted to the schema at the cut, filtered to what belongs to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.lsn import Lsn
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.declared import check_footer, check_segment, counting_groups
from cutline.snapshots.fold.schema_at_cut import SchemaMapping, to_schema_at_cut
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.parquet_objects import expand_global_ids, open_parquet
from cutline.wal.segments.segment_schema import CHANGES, SEGMENT_SCHEMA, TRUNCATE, check_rows

# Row groups above this size, which have a large row, are expanded one at a time in a process.
LARGE_BYTES = 64 << 20
_expanding = Lock()
# The group of rows that report errors of a task: an exception raised in an executor would lose its class.
PROBLEM = -1


@dataclass(frozen=True, slots=True)
class Source:
    """An object of one node's copy, with size and digest from its commit. `number` is the node's number in the job.

    `rows` (by group number, of a base object) and `segment` are what the commit says of its content; where they are
    None, it is not compared.
    """

    key: str
    node: str
    number: int
    size: int
    digest: str
    rows: Mapping[int, int] | None = None
    segment: Segment | None = None


@dataclass(frozen=True, slots=True)
class BaseSource:
    """An object of a base copy; `rows` counts its rows by the group numbers under which they are stored.

    `truncated` are the groups that were truncated since, `multisets` the shard's groups without a key. `mapping` is
    None if the rows need no conversion.
    """

    source: Source
    rows: Mapping[int, int]
    truncated: frozenset[int] = frozenset()
    multisets: frozenset[int] = frozenset()
    mapping: SchemaMapping | None = None

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups whose rows it has."""
        if self.mapping is None:
            return frozenset(self.rows)
        numbers = (self.mapping.number_of(number) for number in self.rows)
        return frozenset(number for number in numbers if number is not None)


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A segment, and which of its changes belong to the state.

    These are the changes before `position`, except those of the transactions at `excluded`. Of a group in `truncated`,
    only changes after that (lsn, seq) count. `truncated` has the groups' numbers at the cut. `groups` are the numbers
    at the cut of the groups that are folded; None: all.
    """

    source: Source
    segment: Segment
    position: Lsn
    excluded: frozenset[Lsn]
    truncated: Mapping[int, tuple[int, int]]
    mapping: SchemaMapping | None = None
    groups: frozenset[int] | None = None


def read_tables(store: ObjectStore, source: Source, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read the rows of an object, a row group at a time, after verifying it against its commit.

    Raises ObjectDamagedError, also while iterating.
    """
    file = open_object(store, source)
    tables = (read_row_group(file, number, source, schema) for number in range(file.num_row_groups))
    if source.segment is not None:
        return _checked(tables, source)
    return tables if source.rows is None else _counted(tables, source, source.rows)


def _checked(tables: Iterator[pa.Table], source: Source) -> Iterator[pa.Table]:
    for table in tables:
        try:
            check_rows(table)
        except ValueError as error:
            raise _rows_differ(source, error) from error
        yield table


def _counted(tables: Iterator[pa.Table], source: Source, rows: Mapping[int, int]) -> Iterator[pa.Table]:
    try:
        yield from counting_groups(tables, rows)
    except ValueError as error:
        raise _rows_differ(source, error) from error


def _rows_differ(source: Source, error: ValueError) -> ObjectDamagedError:
    return ObjectDamagedError(key=source.key, kind="rows", node=source.node, detail=str(error))


def open_object(store: ObjectStore, source: Source) -> pq.ParquetFile:
    """Open the object after verifying it and its footer against its commit; raise ObjectDamagedError."""
    body = read_listed(store, source.node, source.key, (source.size, source.digest))
    with _reading(source):
        file = open_parquet(pa.BufferReader(body))
    try:
        if source.rows is not None:
            check_footer(file.metadata, BASE_SCHEMA, sum(source.rows.values()))
        if source.segment is not None:
            check_footer(file.metadata, SEGMENT_SCHEMA, source.segment.changes + source.segment.events)
            check_segment(file.metadata, source.segment)
    except ValueError as error:
        raise _rows_differ(source, error) from error
    return file


def read_row_group(file: pq.ParquetFile, number: int, source: Source, schema: pa.Schema) -> pa.Table:
    """Read one row group of an object from `open_object`; raise ObjectDamagedError."""
    # While a row is expanded it takes twice its size and more. Threads of a driver read side by side.
    is_large = file.metadata.row_group(number).total_byte_size > LARGE_BYTES
    with _reading(source), _expanding if is_large else nullcontext():
        return expand_global_ids(file.read_row_group(number, use_threads=False)).cast(schema)


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        detail = f"it can't be read as Parquet: {error}"
        raise ObjectDamagedError(key=source.key, kind="unreadable", node=source.node, detail=detail) from error


def read_at_cut(store: ObjectStore, source: BaseSource | SegmentSource, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read the object's rows, converted to the schema at the cut; raise as `read_tables` does."""
    tables = read_tables(store, source.source, schema)
    return (converted for table in tables for converted in converted_to_cut(table, source))


def converted_to_cut(table: pa.Table, source: BaseSource | SegmentSource) -> Iterator[pa.Table]:
    """Convert rows of the object to the schema at the cut; raise ObjectDamagedError if they don't fit the commit's."""
    try:
        yield from to_schema_at_cut(table, source.mapping)
    except ValueError as error:
        raise _rows_differ(source.source, error) from error


def problem_row(source: Source, error: SnapshotError, schema: pa.Schema) -> pa.RecordBatch:
    """Report an error as a row of group PROBLEM: the key is the object, the row the report, all other columns 0."""
    report = {"node": source.number, "group": PROBLEM, "key": source.key.encode(), "row": json.dumps(report_of(error))}
    # It is not a stand-in, so it has no place (snapshots.fold.long_lines).
    values = dict.fromkeys(schema.names, 0) | {"place": -1} | report
    return pa.RecordBatch.from_pylist([{name: values[name] for name in schema.names}], schema=schema)


def problem_of(row: bytes) -> ErrorReport | None:
    """The report in a row of group PROBLEM; None if the row is a line, which ends with a newline, or a stand-in."""
    return json.loads(row) if row.startswith(b"{") and not row.endswith(b"\n") else None


def filter_effective(table: pa.Table, source: SegmentSource) -> pa.Table:
    """Filter the changes of a segment to those that belong to the state, without TRUNCATEs."""
    op = numbers_of(table, "op")
    lsn = numbers_of(table, "lsn")
    filter_effective = np.isin(op, [code for code in CHANGES if code != TRUNCATE]) & (lsn < source.position)
    if source.excluded:
        filter_effective &= ~np.isin(lsn, np.fromiter(source.excluded, np.int64))
    if source.groups is not None:
        filter_effective &= np.isin(numbers_of(table, "group"), list(source.groups))
    if source.truncated:
        group, seq = numbers_of(table, "group"), numbers_of(table, "seq")
        for number, (at_lsn, at_seq) in source.truncated.items():
            before = (lsn < at_lsn) | ((lsn == at_lsn) & (seq < at_seq))
            filter_effective &= ~((group == number) & before)
    return table if filter_effective.all() else table.filter(to_mask(filter_effective))


def numbers_of(table: pa.Table, column: str) -> npt.NDArray[Any]:
    """The column of numbers."""
    return to_numpy(table[column])
