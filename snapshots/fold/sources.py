"""Stored objects as a job reads them: found, whole, in the terms of a cut, and cut down to what belongs to a state."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from columns.arrow_numbers import to_mask, to_numpy
from fleet.lsn import Lsn
from snapshots.fold.schema_at_cut import SchemaMapping, mapping_to_cut, to_schema_at_cut
from snapshots.records.chain import Chain
from storage.errors import ErrorReport, SnapshotError, report_of
from storage.store import ObjectStore
from wal.segments.archive import Segment
from wal.segments.damage import ObjectDamagedError, read_listed
from wal.segments.segment_schema import SEGMENT_SCHEMA, TRUNCATE

CHANGE_OPS = tuple(ord(letter) for letter in "IUuDT")
# The group of a row that is no row, but says what a task met: an error raised there would lose its class.
PROBLEM = -1


@dataclass(frozen=True, slots=True)
class Source:
    """An object of one node's copy, with what its commit says of it. `number` stands for the node in a job."""

    key: str
    node: str
    number: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class BaseSource:
    """An object of a base copy; `rows` counts its rows by the numbers under which they are stored.

    `dropped` are the groups that were truncated since, `multisets` those of its shard whose rows have no key.
    """

    source: Source
    rows: Mapping[int, int]
    dropped: frozenset[int] = frozenset()
    multisets: frozenset[int] = frozenset()
    present: SchemaMapping | None = None

    @property
    def groups(self) -> frozenset[int]:
        """The groups at the cut that it has rows of."""
        if self.present is None:
            return frozenset(self.rows)
        found = (self.present.number_of(number) for number in self.rows)
        return frozenset(number for number in found if number is not None)


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A segment, and which of its changes belong to the state.

    Those before `position`, but for the transactions at `excluded`, and of a group in `truncated` only those
    after that (lsn, seq). `truncated` and all that is read of it have the groups' numbers at the cut.
    """

    source: Source
    segment: Segment
    position: Lsn
    excluded: frozenset[Lsn]
    truncated: Mapping[int, tuple[int, int]]
    present: SchemaMapping | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that the copies of some nodes at a state are folded from; `nodes` by their number.

    `column_counts` of every group, by node number and group.
    """

    nodes: tuple[str, ...]
    bases: tuple[BaseSource, ...]
    segments: tuple[SegmentSource, ...]
    multisets: frozenset[int]
    column_counts: Mapping[tuple[int, int], int]

    @property
    def changes(self) -> int:
        """How many changes there are, those that do not belong to the state too."""
        return sum(one.segment.changes for one in self.segments)

    @property
    def has_partials(self) -> bool:
        """Whether a change may have left a value out."""
        return any(one.segment.partials for one in self.segments)


def read_tables(store: ObjectStore, source: Source, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of an object, a row group at a time, once it is proved to be the one that was committed.

    Raises ObjectDamagedError, here and while the tables are gone through.
    """
    file = open_object(store, source)
    return (read_row_group(file, number, source, schema) for number in range(file.num_row_groups))


def open_object(store: ObjectStore, source: Source) -> pq.ParquetFile:
    """The object, proved to be the one that was committed; raise ObjectDamagedError."""
    body = read_listed(store, source.node, source.key, (source.size, source.digest))
    with _readable(source):
        return pq.ParquetFile(pa.BufferReader(body))


def read_row_group(file: pq.ParquetFile, number: int, source: Source, schema: pa.Schema) -> pa.Table:
    """One row group of an `opened` object; raise ObjectDamagedError."""
    with _readable(source):
        return file.read_row_group(number, use_threads=False).cast(schema)


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        detail = f"it can't be read as Parquet: {error}"
        raise ObjectDamagedError(key=source.key, kind="unreadable", node=source.node, detail=detail) from error


def read_at_cut(store: ObjectStore, source: BaseSource | SegmentSource, schema: pa.Schema) -> Iterator[pa.Table]:
    """The object's rows as `read_tables` reads them, in present terms; raises as it does."""
    tables = read_tables(store, source.source, schema)
    return (present for table in tables for present in to_schema_at_cut(table, source.present))


def problem_row(source: Source, error: SnapshotError, schema: pa.Schema) -> pa.RecordBatch:
    """What a task met as a row of group PROBLEM: its key is the object, its row the report, all else is 0."""
    said = {"node": source.number, "group": PROBLEM, "key": source.key.encode(), "row": json.dumps(report_of(error))}
    # It is itself what it says, at no place (snapshots.fold.long_lines).
    nothing = dict.fromkeys(schema.names, 0) | {"place": -1}
    return pa.RecordBatch.from_pylist([{name: (nothing | said)[name] for name in schema.names}], schema=schema)


def problem_of(row: bytes) -> ErrorReport | None:
    """The report in a row of group PROBLEM. A line, which ends with a newline, is none, nor what stands for one."""
    return json.loads(row) if row.startswith(b"{") and not row.endswith(b"\n") else None


def filter_effective(table: pa.Table, source: SegmentSource) -> pa.Table:
    """The changes of a segment that belong to the state, TRUNCATEs apart."""
    op = _numbers(table, "op")
    lsn = _numbers(table, "lsn")
    wanted = np.isin(op, [code for code in CHANGE_OPS if code != TRUNCATE]) & (lsn < source.position)
    if source.excluded:
        wanted &= ~np.isin(lsn, np.fromiter(source.excluded, np.int64))
    if source.truncated:
        group, seq = _numbers(table, "group"), _numbers(table, "seq")
        for number, (at_lsn, at_seq) in source.truncated.items():
            before = (lsn < at_lsn) | ((lsn == at_lsn) & (seq < at_seq))
            wanted &= ~((group == number) & before)
    return table if wanted.all() else table.filter(to_mask(wanted))


def _numbers(table: pa.Table, column: str) -> npt.NDArray[Any]:
    return to_numpy(table[column])


def sources_of(chain: Chain, nodes: tuple[str, ...], store: ObjectStore, skip: Collection[str] = ()) -> Sources:
    """What the state of `nodes` at the chain's last commit is folded from; `skip` keeps its number, but is not read.

    Reads only the segments that hold a TRUNCATE.
    """
    bases: list[BaseSource] = []
    segments: list[SegmentSource] = []
    multisets = frozenset(number for node in nodes for number in multiset_numbers(chain, node))
    for number, node in enumerate(nodes):
        if node in skip:
            continue
        found = [
            one
            for one in segment_sources(chain, number, node)
            if one.segment.changes and one.segment.after < one.position
        ]
        truncated = truncations(store, found)
        segments += [replace(one, truncated=truncated) for one in found] if truncated else found
        bases += base_sources(chain, number, node, frozenset(truncated))
    counts = {
        (number, group.number): len(group.columns) for number, node in enumerate(nodes) for group in chain.groups(node)
    }
    return Sources(nodes, tuple(bases), tuple(segments), multisets, counts)


def segment_sources(chain: Chain, number: int, node: str, among: Collection[str] = ()) -> list[SegmentSource]:
    """All segments of the node's archive, with no TRUNCATE looked at; `among` see `mapping_to_cut`."""
    position, excluded = chain.position(node), chain.excluded(node)
    present = mapping_to_cut(chain, node, among)
    return [
        SegmentSource(Source(one.key, node, number, one.size, one.digest), one, position, excluded, {}, present)
        for one in chain.segments(node)
    ]


def multiset_numbers(chain: Chain, node: str) -> frozenset[int]:
    """The numbers of all definitions of the node's groups whose rows have no key."""
    return frozenset(number for number, group in chain.definitions(node).items() if group.is_multiset)


def base_sources(chain: Chain, number: int, node: str, dropped: frozenset[int] = frozenset()) -> list[BaseSource]:
    """The objects of the node's base copies, also those that no row counts of any more."""
    multisets, present = multiset_numbers(chain, node), mapping_to_cut(chain, node)
    # Base rows have the numbers that their commit lists, and most chains have no others.
    stay = len(present.kept) == len(chain.definitions(node))
    return [
        BaseSource(
            Source(one.key, node, number, one.size, one.digest),
            one.rows,
            dropped,
            multisets,
            None if stay else present.of(one.rows),
        )
        for one in chain.base_objects(node)
    ]


def truncations(store: ObjectStore, segments: list[SegmentSource]) -> dict[int, tuple[int, int]]:
    """The last TRUNCATE of every group that has one, as (lsn, seq)."""
    last: dict[int, tuple[int, int]] = {}
    for one in segments:
        if not one.segment.truncates:
            continue
        for table in read_at_cut(store, one, SEGMENT_SCHEMA):
            found = table.filter(to_mask(_numbers(table, "op") == TRUNCATE)).select(["lsn", "seq", "group"])
            for row in found.to_pylist():  # bounded by the TRUNCATE commands
                if row["lsn"] < one.position and row["lsn"] not in one.excluded:
                    last[row["group"]] = max(last.get(row["group"], (0, 0)), (row["lsn"], row["seq"]))
    return last
