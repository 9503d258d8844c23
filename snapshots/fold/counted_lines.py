"""Fold groups without a key, whose rows are lines that can only be counted.

If there are too many changes for the driver, lines stay in their segments. Tasks report a hash of each, and an inserted
line is an image unless a line with the same hash was deleted. Such lines are *contested*: they are read again and
counted exactly. So a hash that two lines share costs time, but loses no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, field

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints, column_of, from_list, runs, xxhash64
from cutline.columns.row_batches import from_stream, to_stream
from cutline.fleet.progress import Silent
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changed_keys import Keys, KeySet
from cutline.snapshots.fold.key_history import number_rows
from cutline.snapshots.fold.long_lines import IMAGE_SCHEMA, are_long, line_names
from cutline.snapshots.fold.sources import (
    BaseSource,
    BaseSources,
    SegmentSource,
    as_problems,
    filter_effective,
    read_at_cut,
)
from cutline.spark.sent_values import sending
from cutline.spark.spark_jobs import Dealing, run_many, run_tasks, shared_problem
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import OpensStore
from cutline.wal.segments.segments import DELETE, INSERT, SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LINE_NAMES = ["node", "group", "partition", "row"]
# A task that reads contested lines may return at least this much.
CONTESTED_BYTES_MIN = 1 << 14


class CountedLines(Struct, frozen=True):
    """The lines of groups without a key: `net` is how many more times each was inserted than deleted.

    `rows` (node, group, partition, row) has each line at least once; `first` is the row with each, and `number` the
    number of each row's line.
    """

    rows: pa.Table
    first: Ints
    net: Ints
    number: Ints

    def rows_with(self, chosen: Flags) -> pa.Table:
        """Return a row for each of the chosen lines."""
        return self.rows.take(to_arrow(self.first[chosen]))


def count_lines(rows: pa.Table, added: Ints) -> CountedLines:
    """Sum up `added` for equal rows, which have the same node, group, partition and line (LINE_NAMES)."""
    if len(rows) == 0:
        none = np.zeros(0, np.int64)
        return CountedLines(rows, none, none, none)
    code = number_rows(rows["row"], *(to_numpy(rows[name]) for name in LINE_NAMES[:3]))
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    return CountedLines(rows, first, np.bincount(number, added).astype(np.int64), number)


def added_by(op: Ints) -> Ints:
    """Return by how many lines each change adds to a group without a key: 1 or -1."""
    return np.where(op == INSERT, 1, -1)


def hash_rows(changes: pa.Table, chosen: Flags) -> npt.NDArray[np.int64]:
    """Return the hash of key and row of each of the chosen changes, and 0 for the others."""
    hashes = np.zeros(len(changes), np.int64)
    if chosen.any():
        # Avoid a copy if possible: a row may be 1 GB.
        rows = changes if chosen.all() else changes.filter(to_mask(chosen))
        hashes[chosen] = xxhash64(column_of(rows["row"]), xxhash64(column_of(rows["key"]))).view(np.int64)
    return hashes


def hash_lines(lines: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the hash of each line without a key, as `hash_rows` does."""
    if len(lines) == 0:
        return np.zeros(0, np.int64)
    no_keys = np.repeat(xxhash64(from_list([b""])), len(lines))
    return xxhash64(column_of(lines), no_keys).view(np.int64)


def are_contested(op: Ints, hashes: npt.NDArray[np.int64]) -> Flags:
    """Flag the changes of lines with a hash that a deleted line has."""
    return are_among(hashes, np.unique(hashes[op != INSERT]))


def are_among(hashes: npt.NDArray[np.int64], ordered: npt.NDArray[np.int64]) -> Flags:
    """Flag the hashes that are in `ordered`, which is ascending: np.isin would sort it again."""
    if len(ordered) == 0:
        return np.zeros(len(hashes), np.bool_)
    places = np.searchsorted(ordered, hashes)
    places[places == len(ordered)] = 0
    flags: Flags = ordered[places] == hashes
    return flags


def line_images(lines: pa.Table, left: Ints) -> pa.Table:
    """Return the images (IMAGE_SCHEMA) of lines (LINE_NAMES), as often as are `left`; below 0, a row is missing.

    Equal rows can't be told apart, so they have no key and no lsn.
    """
    copies = np.where(left < 0, 1, left)
    images = lines.take(to_arrow(np.repeat(np.arange(len(lines)), copies)))
    images = images.append_column("key", pa.repeat(pa.scalar(b"", pa.binary()), len(images)))
    images = images.append_column("lsn", to_arrow(np.zeros(len(images), np.int64)))
    images = as_problems(images, np.repeat(left < 0, copies))
    return pa.Table.from_arrays([images[name] for name in IMAGE_SCHEMA.names], schema=IMAGE_SCHEMA)


CONTESTED_SCHEMA = pa.schema(
    [*(SEGMENT_SCHEMA.field(name) for name in ("group", "partition", "op", "row")), ("index", pa.int64())]
)


class ContestedTask(Struct, frozen=True):
    """A request for the changes of groups in `multisets` with one of the `hashes` (a broadcast, ascending).

    No changes are returned if they take more than `bytes_max`.
    """

    segment: SegmentSource
    multisets: frozenset[int]
    hashes: Any
    bytes_max: int
    store: OpensStore


class ContestedReport(Struct, frozen=True):
    """The contested changes (CONTESTED_SCHEMA, an Arrow stream), or the problem with the segment.

    `changes` is None if they are too large or if a line is long. `index` is the change's index among the segment's
    changes that belong to the state.
    """

    changes: bytes | None = None
    problem: ErrorReport | None = None


def read_contested_in(task: ContestedTask) -> ContestedReport:
    """Read the contested changes of a segment: the work of a task."""
    seen, size, tables = 0, 0, [CONTESTED_SCHEMA.empty_table()]
    try:
        for table in read_at_cut(task.store.open(), task.segment, SEGMENT_SCHEMA):
            effective = filter_effective(table, task.segment)
            chosen = np.isin(to_numpy(effective["group"]), list(task.multisets))
            chosen[chosen] = are_among(hash_rows(effective, chosen)[chosen], task.hashes.value)
            index = np.flatnonzero(chosen) + seen
            seen += len(effective)
            found = effective.filter(to_mask(chosen)).select(CONTESTED_SCHEMA.names[:-1])
            size += found.nbytes
            if size > task.bytes_max or are_long(found["row"]).any():
                return ContestedReport()
            tables.append(found.append_column("index", to_arrow(index)).cast(CONTESTED_SCHEMA))
    except SnapshotError as error:
        return ContestedReport(problem=report_of(error))
    return ContestedReport(to_stream(pa.concat_tables(tables)))


class Contested(Struct, frozen=True):
    """The changes of contested lines (`node`, `segment` and CONTESTED_SCHEMA), or the problems of reading them."""

    changes: pa.Table
    problems: tuple[ErrorReport, ...] = ()


def read_contested(
    session: SparkSession,
    segments: Mapping[int, SegmentSource],
    counts: Mapping[int, int],
    hashes: npt.NDArray[np.int64],
    multisets: frozenset[int],
    store: StoreLocation,
) -> Contested | None:
    """Read the changes of the lines with these hashes; None if they take more than the driver should hold.

    `segments` are those that contain them, by number, and `counts` says how many each contains.
    """
    total = max(sum(counts.values()), 1)
    shares = {number: limits.CHOSEN_KEYS_BYTES_MAX * counts[number] // total for number in segments}
    dealing = Dealing[ContestedTask](lambda task: task.segment.source.size)
    with sending(session, np.unique(hashes)) as sent:
        tasks = [
            ContestedTask(segment, multisets, sent, max(shares[number], CONTESTED_BYTES_MIN), store)
            for number, segment in segments.items()
        ]
        reports = run_tasks(session, read_contested_in, tasks, Silent(), dealing, problem_of=shared_problem)
    tables = [_numbered(CONTESTED_SCHEMA.empty_table(), 0, 0)]
    if problems := tuple(report.problem for report in reports if report.problem):
        return Contested(tables[0], problems)
    for (number, segment), report in zip(segments.items(), reports, strict=True):
        if report.changes is None:
            return None
        tables.append(_numbered(from_stream(report.changes), segment.source.number, number))
    return Contested(pa.concat_tables(tables))


def _numbered(changes: pa.Table, node: int, segment: int) -> pa.Table:
    for name, value in (("node", node), ("segment", segment)):
        changes = changes.append_column(name, to_arrow(np.full(len(changes), value, np.int32)))
    return changes


def choose_inserted(changes: pa.Table, counted: CountedLines) -> pa.Table:
    """Choose as many of the inserted rows of each line as it was inserted more often than deleted."""
    is_inserted = to_numpy(changes["op"]) == INSERT
    order = np.lexsort((~is_inserted, counted.number))
    number = counted.number[order]
    starts = np.flatnonzero(np.concatenate([[True], number[1:] != number[:-1]])) if len(order) else order
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return changes.filter(to_mask(is_inserted & (rank < counted.net[counted.number])))


class RemovedLines(Struct, frozen=True):
    """Lines of a group of a node that were deleted more often than inserted: those to remove from the base rows.

    `net` (below 0), `partitions` and `seen` belong to the `keys`; `seen` counts the base rows with each line.
    """

    node: int
    group: int
    keys: KeySet
    net: Ints
    partitions: Ints
    seen: Ints

    def add(self, lines: Ints, counts: Ints) -> None:
        """Add the rows of a base object: how many have each of these lines, each of which is named once."""
        self.seen[lines] += counts

    @property
    def left(self) -> Ints:
        """How many rows with each line are left; below 0 if there never were as many as were deleted."""
        return self.net + self.seen

    def rows_with(self, chosen: Flags) -> pa.Table:
        """Return a row (LINE_NAMES) for each of the chosen lines."""
        count = int(chosen.sum())
        columns = [
            to_arrow(np.full(count, self.node, np.int32)),
            to_arrow(np.full(count, self.group, np.int32)),
            to_arrow(self.partitions[chosen].astype(np.int32)),
            self.keys.keys.take(np.flatnonzero(chosen)).to_arrow(),
        ]
        return pa.table(columns, names=LINE_NAMES)


def removed_lines(counted: CountedLines) -> list[RemovedLines]:
    """Return the lines that were deleted more often than inserted, by node and group."""
    is_removed = counted.net < 0
    rows, net = counted.rows_with(is_removed), counted.net[is_removed]
    if len(rows) == 0:
        return []
    node, group, partition = (to_numpy(rows[name]).astype(np.int64) for name in LINE_NAMES[:3])
    lines = column_of(rows["row"])
    hashes = xxhash64(lines)
    # Ordered within each group as in a KeySet.
    order = np.lexsort((hashes, group, node))
    found: list[RemovedLines] = []
    for run in runs((node[order] << 32) + group[order]):
        chosen = order[run]
        keys, none = KeySet(hashes[chosen], lines.take(chosen)), np.zeros(len(chosen), np.int64)
        place = int(node[chosen[0]]), int(group[chosen[0]])
        found.append(RemovedLines(*place, keys, net[chosen], partition[chosen], none))
    return found


# The indexes of the lines in a KeySet that rows have, and the numbers of the rows, by group.
Matches = dict[int, tuple[Ints, Ints]]


class LineMatches(Struct):
    """Counts the base rows of an object that have one of the lines in `keys`, by group without a key."""

    base: BaseSource
    keys: Mapping[int, Keys]
    _found: dict[int, list[Ints]] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows (BASE_SCHEMA) in the schema at the cut. Rows of truncated tables don't count."""
        group = to_numpy(batch.column("group"))
        for rows in runs(group):
            number = int(group[rows.start])
            keys = self.keys.get(number)
            if not isinstance(keys, KeySet) or number not in self.base.multisets or number in self.base.truncated:
                continue
            found = keys.find(line_names(batch.column("row").slice(rows.start, rows.stop - rows.start)))
            if (is_found := found >= 0).any():
                self._found.setdefault(number, []).append(found[is_found])

    def matches(self) -> Matches:
        """Return how many rows have each of the lines that were found."""
        counted = {
            number: np.unique(np.concatenate(found), return_counts=True) for number, found in self._found.items()
        }
        return {number: (lines, counts.astype(np.int64)) for number, (lines, counts) in counted.items()}


class MatchTask(Struct, frozen=True):
    """A base object in which rows with the lines in `keys` are counted, a broadcast of KeySets by group."""

    base: BaseSource
    keys: Any
    store: StoreLocation


class MatchReport(Struct, frozen=True):
    """The rows of a node's object that were found, or the problem with the object."""

    node: int
    matches: Matches = field(default_factory=dict)
    problem: ErrorReport | None = None


def match_lines_in(task: MatchTask) -> MatchReport:
    """Count the rows of a base object that have certain lines: the work of a task."""
    found = LineMatches(task.base, task.keys.value)
    try:
        for table in read_at_cut(task.store.open(), task.base, BASE_SCHEMA):
            for batch in table.to_batches():
                found.add(batch)
    except SnapshotError as error:
        return MatchReport(task.base.source.number, problem=report_of(error))
    return MatchReport(task.base.source.number, found.matches())


def match_base_rows(
    session: SparkSession, bases: BaseSources, removed: Sequence[RemovedLines], store: StoreLocation
) -> list[ErrorReport]:
    """Count the base rows with the removed lines; return the problems of objects that can't be read."""
    by_place = {(one.node, one.group): one for one in removed}
    keys: dict[int, dict[int, KeySet]] = {}
    for one in removed:
        keys.setdefault(one.node, {})[one.group] = one.keys
    wanted = {node: frozenset(of_groups) for node, of_groups in keys.items()}
    dealing = Dealing[MatchTask](lambda task: task.base.source.size)
    problems: list[ErrorReport] = []
    with ExitStack() as sending_all:
        sent = {node: sending_all.enter_context(sending(session, of_groups)) for node, of_groups in keys.items()}
        tasks = (MatchTask(base, sent[base.source.number], store) for base in bases.with_rows_of(wanted))
        for reports in run_many(session, match_lines_in, tasks, Silent(), dealing, shared_problem):
            for report in reports:
                problems += [report.problem] if report.problem else []
                for group, found in report.matches.items():
                    by_place[report.node, group].add(*found)
    return problems


KEYS_SCHEMA = pa.schema([("node", pa.int32()), *(SEGMENT_SCHEMA.field(name) for name in ("group", "key", "op"))])


def deleted_keys(removed: Iterable[RemovedLines]) -> pa.Table:
    """Return the removed lines as changed keys: node, group, key and op."""
    tables = [KEYS_SCHEMA.empty_table()]
    for one in removed:
        count = len(one.keys.hashes)
        node, group, op = (
            to_arrow(np.full(count, value, kind))
            for value, kind in ((one.node, np.int32), (one.group, np.int32), (DELETE, np.int8))
        )
        tables.append(pa.Table.from_arrays([node, group, one.keys.keys.to_arrow(), op], schema=KEYS_SCHEMA))
    return pa.concat_tables(tables)
