"""Read pages of running databases, and compare a primary with its standby: what one Spark task does on an executor.

A physical standby has each row version at the same place (ctid), with the same xmin, as its primary. So the rows are
compared by page. A first pass reduces each page to a combined hash on both nodes; pages that differ are read again by
turns (ordered_snapshots), and only versions that the snapshots' order proves wrong count as different.

The planner would run the table owner's code if a query read certain tables (nodes/left_out.py). They are copied whole,
without ctid and xmin, so that nothing can be proven about rows that differ: their lines only show whether the table
differs in every reading.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import psycopg
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.check.hashing import Sums, combine_all, combine_hashes, differing_keys
from cutline.columns.bytes_column import Bytes, BytesColumn, Flags, Hashes, Ints, from_list, gather, xxhash64
from cutline.columns.lines import TAB, find_byte, keys_of
from cutline.fleet.config import Node
from cutline.nodes.connections import CopyError
from cutline.nodes.encodings import RAW
from cutline.nodes.groups import Group, column_list, qualify
from cutline.snapshots.base_copy.copy_ranges import (
    PAGE_BYTES,
    PageRange,
    StoppedAtRowError,
    copy_lines,
    copy_query,
    lock_tables,
)
from cutline.snapshots.base_copy.copy_slots import open_exported
from cutline.snapshots.base_copy.copy_tables import PACED_PAGES
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.rate import RateLimit

# The system columns that precede the columns of a group.
VERSION = ("ctid", "xmin")
# A whole table's lines are compared in this many parts; a power of two.
WHOLE_PARTS = 1024
# Bad pages of one task that are narrowed down to a page; each costs a few sessions.
BAD_RANGES_MAX = 16
# A line is at most 1 GB; this much of it is shown.
SHOWN_BYTES = 1000
TID_DIGITS_MAX = 10
ZERO = np.uint8(ord("0"))
# A table's file and its number of pages.
FACTS_QUERY = """
SELECT oid, pg_relation_filenode(oid::regclass),
       pg_relation_size(oid::regclass) / current_setting('block_size')::bigint
  FROM unnest(%s::bigint[]) oid
"""
# SQLSTATEs of damaged data and of faulty disks. Others of their classes have other causes as well: concurrent DDL
# (XX000), or a library that is missing on the server.
DAMAGED = ("XX001", "XX002", "58030")
# A missing file has this state; it is damage if the file belongs to tables or to the states of transactions.
MISSING_FILE = "58P01"
DATA_FILE = re.compile(r'"(?:base|global|pg_tblspc|pg_xact|pg_multixact|pg_subtrans)/')


def versions_query(part: PageRange) -> str:
    """Return the COPY that prints the range's row versions: the columns of VERSION, then the group's columns."""
    conditions = [f"ctid >= '({part.low},0)'::tid"] if part.low else []
    conditions += [f"ctid < '({part.high},0)'::tid"] if part.high is not None else []
    return _query(part.group, " AND ".join(conditions))


def places_query(group: Group, places: Sequence[str]) -> str:
    """Return the COPY that prints the row versions at the places (ctid), like `versions_query`."""
    listed = ", ".join(f"'{place}'" for place in places)
    return _query(group, f"ctid = ANY (ARRAY[{listed}]::tid[])")


def _query(group: Group, condition: str) -> str:
    columns = ", ".join([*VERSION, *([column_list(group)] if group.columns else [])])
    where = f" WHERE {condition}" if condition else ""
    return f"COPY (SELECT {columns} FROM ONLY {qualify(group)}{where}) TO STDOUT (ENCODING '{RAW}')"


class ImportedSnapshot(Struct, frozen=True):
    """A node and its exported snapshot."""

    node: Node
    exported: str


class BadRange(Struct, frozen=True):
    """Pages from `low` up to, but not including, `high` that `node` can't print; None: to the table's end.

    `text` is the server's message. `is_damaged`: it reports damaged data or a faulty disk.
    """

    node: str
    oid: int
    low: int
    high: int | None
    text: str
    is_damaged: bool


class NodeRead(Struct):
    """What reading a node's ranges has collected; `filenodes` are those of the tables while they were read."""

    found: list[Any] = field(default_factory=list)
    bad: list[BadRange] = field(default_factory=list)
    filenodes: dict[int, int | None] = field(default_factory=dict)
    bytes: int = 0


class RangeReader(Struct, frozen=True):
    """Reads ranges in a node's snapshot, as `versions_query` prints them; the tables in `whole` are copied whole.

    `collect` reduces some lines of a range to the value that is kept of them.
    """

    reading: ImportedSnapshot
    whole: frozenset[int]
    pace: RateLimit
    collect: Callable[[PageRange, BytesColumn], Any]

    def read(self, ranges: Iterable[PageRange]) -> NodeRead:
        """Read the ranges. Ranges that can't be printed are halved until a page is left, which is reported.

        Raises the errors of `open_exported` and `lock_tables`, and CopyError if a range could not be read for a reason
        that is not in the table.
        """
        read, left = NodeRead(), deque(ranges)
        while left:
            with open_exported(self.reading.node, self.reading.exported) as connection:
                pages = begin_reading(connection, self.reading.node, left, read)
                if self.pace.bytes_per_second:
                    left = deque(piece for part in left for piece in self._pieces(part, pages[part.oid]))
                while left and self._read_first(connection, left, pages, read):
                    pass
        return read

    def _pieces(self, part: PageRange, pages: int) -> Iterator[PageRange]:
        """Divide the range into pieces of PACED_PAGES."""
        low, end = part.low, pages if part.high is None else part.high
        while part.oid not in self.whole and low + PACED_PAGES < end:
            yield replace(part, low=low, high=low + PACED_PAGES)
            low += PACED_PAGES
        yield replace(part, low=low)

    def _read_first(
        self, connection: psycopg.Connection[Any], left: deque[PageRange], pages: Mapping[int, int], read: NodeRead
    ) -> bool:
        """Read the first range that is left; return False if the session can't be used any more."""
        part = left.popleft()
        is_whole = part.oid in self.whole
        query = copy_query(part) if is_whole else versions_query(part)
        found: list[Any] = []
        size = 0
        end = pages[part.oid] if part.high is None else part.high
        try:
            for lines in copy_lines(connection, self.reading.node, part, query):
                found.append(self.collect(part, lines))
                size += int(lines.offsets[-1])
                # A line may be 1 GB: release it before the next line is read.
                del lines
        except (StoppedAtRowError, CopyError) as error:
            bad = _bad_range(self.reading.node, part, error)
            smallest = 1 if part.high is None else 2
            if is_whole or end - part.low < smallest or len(read.bad) >= BAD_RANGES_MAX:
                read.bad.append(bad)
            else:
                middle = end if part.high is None else (part.low + end) // 2
                left.extendleft([replace(part, low=middle), replace(part, high=middle)])
            return False
        read.found += found
        # Values that are stored outside of the table's own pages count as well.
        size = max(size, (end - part.low) * PAGE_BYTES)
        read.bytes += size
        self.pace.spend(size)
        return True


def begin_reading(
    connection: psycopg.Connection[Any], node: Node, ranges: Iterable[PageRange], read: NodeRead
) -> dict[int, int]:
    """Lock the tables of the ranges and note their files; return their numbers of pages, keyed by oid.

    Raises the errors of `lock_tables`.
    """
    parts = list(ranges)
    # Reading is slow on purpose, and lines come in the order of their places.
    connection.execute("SET LOCAL max_parallel_workers_per_gather = 0")
    lock_tables(connection, node, parts)
    rows = connection.execute(FACTS_QUERY, (sorted({part.oid for part in parts}),)).fetchall()
    read.filenodes |= {oid: filenode for oid, filenode, _ in rows}
    return {oid: pages or 0 for oid, _, pages in rows}


def _bad_range(node: Node, part: PageRange, error: StoppedAtRowError | CopyError) -> BadRange:
    """Return the range that could not be printed; raise the error if its cause is not in the table."""
    state = error.sqlstate if isinstance(error, StoppedAtRowError) else str(error.details.get("sqlstate", ""))
    is_damaged = proves_damage(state, str(error))
    if isinstance(error, CopyError) and not is_damaged:
        raise error
    return BadRange(node.id, part.oid, part.low, part.high, str(error), is_damaged)


def proves_damage(state: str, text: str) -> bool:
    """Whether an error with this SQLSTATE and message proves that data is damaged, or that a disk is faulty."""
    return state in DAMAGED or (state == MISSING_FILE and DATA_FILE.search(text) is not None)


def tids_of(lines: BytesColumn) -> tuple[Ints, Ints]:
    """Return the pages and item numbers of lines that begin with a ctid, `(12,3)`."""
    pages, ends = numbers_at(lines.data, lines.offsets[:-1] + 1)
    items, _ = numbers_at(lines.data, ends + 1)
    return pages, items


class VersionColumns(NamedTuple):
    """The places and the xmins of row versions."""

    pages: Ints
    items: Ints
    xmins: Ints


def versions_of(lines: BytesColumn) -> VersionColumns:
    """Return the places and xmins of lines that begin with the columns of VERSION."""
    pages, ends = numbers_at(lines.data, lines.offsets[:-1] + 1)
    items, ends = numbers_at(lines.data, ends + 1)
    # After the parenthesis and the tab.
    xmins, _ = numbers_at(lines.data, ends + 2)
    return VersionColumns(pages, items, xmins)


def numbers_at(data: Bytes, starts: Ints) -> tuple[Ints, Ints]:
    """Parse the decimal numbers of at most 10 digits that begin at `starts`; return them, and where they end."""
    values, ends = np.zeros(len(starts), np.int64), starts.copy()
    is_digit = np.ones(len(starts), np.bool_)
    for _ in range(TID_DIGITS_MAX):
        digit = data[np.minimum(ends, len(data) - 1)] - ZERO
        is_digit = is_digit & (digit <= 9)  # bytes below "0" wrap around
        values = np.where(is_digit, values * 10 + digit, values)
        ends += is_digit
    return values, ends


def fields_after(lines: BytesColumn, count: int) -> BytesColumn:
    """Return the lines without their first `count` fields, which contain no tabs themselves.

    A group without columns has empty lines.
    """
    starts = lines.offsets[:-1]
    ends = lines.offsets[1:]
    tabs = find_byte(lines.data, TAB)
    for _ in range(count):
        at = np.searchsorted(tabs, starts)
        # After the last field there is no tab, but the newline.
        next_tab = np.append(tabs, np.iinfo(np.int64).max)[at]
        starts = np.where(next_tab < ends, next_tab + 1, ends - 1)
    return gather(lines.data, starts, ends - starts)


class CompareTask(Struct, frozen=True):
    """Ranges of a shard's tables, `size` bytes in total, to be compared in the primary's and the standbys' snapshots.

    `whole` are the oids of the tables that are copied whole.
    """

    primary: ImportedSnapshot
    standbys: tuple[ImportedSnapshot, ...]
    ranges: tuple[PageRange, ...]
    whole: frozenset[int]
    size: int
    bytes_per_second: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes on which the task opens sessions."""
        return (self.primary.node.id, *(reading.node.id for reading in self.standbys))


class CompareReport(Struct, frozen=True):
    """The pages that differ on each standby, as columns oid and page; for a table that is copied whole, its parts.

    `rows` are the primary's rows on the pages that all nodes could read. `bytes` were read on the primary, where the
    tables had these `filenodes`. `problem` is the error that ended the task, on node `failed`.
    """

    differing: Mapping[str, Ints] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0
    filenodes: Mapping[int, int | None] = field(default_factory=dict)
    bad: tuple[BadRange, ...] = ()
    problem: ErrorReport | None = None
    failed: str = ""


def compare_ranges(task: CompareTask) -> CompareReport:
    """Compare the ranges by page. Reports a SnapshotError instead of raising it."""
    node = task.primary.node.id
    try:
        found = _sums_by_page(task, task.primary)
        primary = combine_all(found.found, 2)
        differing: dict[str, Ints] = {}
        bad = list(found.bad)
        for standby in task.standbys:
            node = standby.node.id
            read = _sums_by_page(task, standby)
            pages = differing_keys(primary, combine_all(read.found, 2))
            differing[node] = pages[~is_bad_page(pages, [*found.bad, *read.bad])]
            bad += read.bad
    except SnapshotError as error:
        return CompareReport(problem=report_of(error), failed=node)
    rows = int(primary.values[~is_bad_page(primary.keys, bad), 0].sum())
    return CompareReport(differing, rows, found.bytes, found.filenodes, tuple(bad))


def _sums_by_page(task: CompareTask, reading: ImportedSnapshot) -> NodeRead:
    def collect(part: PageRange, lines: BytesColumn) -> Sums:
        hashes = xxhash64(lines)
        pages = _whole_parts(hashes) if part.oid in task.whole else tids_of(lines)[0]
        return combine_hashes(np.stack([np.full(len(lines), part.oid, np.int64), pages], axis=1), hashes)

    return RangeReader(reading, task.whole, RateLimit(task.bytes_per_second), collect).read(task.ranges)


def _whole_parts(hashes: Hashes) -> Ints:
    return (hashes & np.uint64(WHOLE_PARTS - 1)).astype(np.int64)


def is_bad_page(pages: Ints, bad: Sequence[BadRange]) -> Flags:
    """Return which of the pages, given as columns oid and page, a node could not print."""
    is_bad = np.zeros(len(pages), np.bool_)
    for one in bad:
        in_range = (pages[:, 0] == one.oid) & (pages[:, 1] >= one.low)
        if one.high is not None:
            in_range &= pages[:, 1] < one.high
        is_bad |= in_range
    return is_bad


class ConfirmTask(Struct, frozen=True):
    """Pages that differed between a primary and a standby, to be read in snapshots by turns: P1, Q1, P2 and Q2.

    `parts` are the parts of the tables in `whole` that differed, as columns oid and part. Up to `rows_max` rows of each
    table are named.
    """

    turns: tuple[ImportedSnapshot, ...]
    ranges: tuple[PageRange, ...]
    whole: frozenset[int]
    parts: Ints
    rows_max: int
    bytes_per_second: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes on which the task opens sessions."""
        return tuple(reading.node.id for reading in self.turns[:2])


class NamedVersion(Struct, frozen=True):
    """A row version at `place` (ctid), and its lines on the primary and on the standby, None where it is not.

    `identity` is the hash of its key; None in a table without a key.
    """

    key: str
    identity: int | None
    place: str
    primary: str | None
    standby: str | None


class TableDifference(Struct, frozen=True):
    """Proven differences of a table: rows with other contents on the standby, or that are missing or extra there.

    `pages` are all pages with such rows. `unproven` lines of a table that is copied whole differed in both turns.
    """

    oid: int
    changed: int = 0
    missing: int = 0
    extra: int = 0
    pages: tuple[int, ...] = ()
    rows: tuple[NamedVersion, ...] = ()
    unproven: int = 0


class ConfirmReport(Struct, frozen=True):
    """The differences, and the tables whose files were replaced meanwhile: nothing is known about these."""

    differences: tuple[TableDifference, ...] = ()
    moved: tuple[int, ...] = ()
    bad: tuple[BadRange, ...] = ()
    problem: ErrorReport | None = None
    failed: str = ""


class Versions(Struct, frozen=True):
    """Row versions that a snapshot shows: rows of (oid, page, item), and a hash of place, xmin and contents."""

    places: Ints
    hashes: Hashes

    @classmethod
    def joined(cls, parts: Sequence[Versions]) -> Versions:
        """Join the versions of several ranges."""
        places = np.concatenate([np.empty((0, 3), np.int64), *(part.places for part in parts)])
        return cls(places, np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)]))

    def take(self, rows: Any) -> Versions:
        """Return the versions of these rows."""
        return Versions(self.places[rows], self.hashes[rows])

    def of(self, oid: int) -> Versions:
        """Return the versions of a table."""
        return self.take(self.places[:, 0] == oid)


def proven_missing(before: Versions, between: Versions, after: Versions) -> Versions:
    """Return the versions that both `before` and `after` have and `between` lacks.

    They are snapshots in this order: `before` and `after` from the same node, and `between` from another.
    """
    lasting = before.take(np.isin(before.hashes, after.hashes))
    return lasting.take(~np.isin(lasting.hashes, between.hashes))


def confirm_ranges(task: ConfirmTask) -> ConfirmReport:
    """Find the versions that are proven to differ. Reports a SnapshotError instead of raising it."""
    node = ""
    try:
        reads: list[NodeRead] = []
        for reading in task.turns:
            node = reading.node.id
            reads.append(_versions(task, reading))
        moved = {part.oid for part in task.ranges if len({read.filenodes.get(part.oid) for read in reads}) > 1}
        bad = {one.oid for read in reads for one in read.bad}
        first, second, third, fourth = (Versions.joined(read.found) for read in reads)
        differences: list[TableDifference] = []
        for oid, group in {part.oid: part.group for part in task.ranges}.items():
            if oid in moved or oid in bad:
                continue
            of_turns = [versions.of(oid) for versions in (first, second, third, fourth)]
            if oid in task.whole:
                found = TableDifference(oid, unproven=count_unproven(*of_turns))
            else:
                missing = proven_missing(*of_turns[:3])
                extra = proven_missing(*of_turns[1:])
                found = _difference(oid, missing, extra)
                found = replace(found, rows=tuple(_name(task, oid, group, missing, extra)))
            if found != TableDifference(oid):
                differences.append(found)
    except SnapshotError as error:
        return ConfirmReport(problem=report_of(error), failed=node)
    everything_bad = tuple(dict.fromkeys(one for read in reads for one in read.bad))
    return ConfirmReport(tuple(differences), tuple(sorted(moved)), everything_bad)


def _versions(task: ConfirmTask, reading: ImportedSnapshot) -> NodeRead:
    def collect(part: PageRange, lines: BytesColumn) -> Versions:
        hashes = xxhash64(lines)
        is_whole = part.oid in task.whole
        pages, items = (_whole_parts(hashes), np.zeros(len(lines), np.int64)) if is_whole else tids_of(lines)
        found = Versions(np.stack([np.full(len(lines), part.oid, np.int64), pages, items], axis=1), hashes)
        if is_whole:
            wanted = task.parts[task.parts[:, 0] == part.oid, 1]
            found = found.take(np.isin(pages, wanted))
        return found

    return RangeReader(reading, task.whole, RateLimit(task.bytes_per_second), collect).read(task.ranges)


def _difference(oid: int, missing: Versions, extra: Versions) -> TableDifference:
    """Count the rows; a missing version and an extra version at the same place are a row that has changed."""
    at_missing, at_extra = (_codes(versions.places) for versions in (missing, extra))
    both = np.isin(at_missing, at_extra)
    changed = int(both.sum())
    pages = np.unique(np.concatenate([missing.places[:, 1], extra.places[:, 1]]))
    return TableDifference(oid, changed, len(at_missing) - changed, len(at_extra) - changed, tuple(pages.tolist()))


def _codes(places: Ints) -> Ints:
    return (places[:, 1] << 16) | places[:, 2]


def count_unproven(first: Versions, second: Versions, third: Versions, fourth: Versions) -> int:
    """Count the lines that occurred equally often in both readings of each node, and not equally often on the nodes."""
    lines = np.unique(np.concatenate([one.hashes for one in (first, second, third, fourth)]))
    counts = []
    for one in (first, second, third, fourth):
        found, times = np.unique(one.hashes, return_counts=True)
        count = np.zeros(len(lines), np.int64)
        count[np.searchsorted(lines, found)] = times
        counts.append(count)
    is_stable = (counts[0] == counts[2]) & (counts[1] == counts[3])
    return int((is_stable & (counts[0] != counts[1])).sum())


def _name(task: ConfirmTask, oid: int, group: Group, missing: Versions, extra: Versions) -> Iterator[NamedVersion]:
    """Read the lines of the first rows again, in the first two snapshots."""
    places = np.unique(np.concatenate([missing.places, extra.places]), axis=0)[: task.rows_max, 1:]
    if not len(places):
        return
    names = [f"({page},{item})" for page, item in places.tolist()]
    # A place may be in use on both nodes although only one of them has lost or gained a version there.
    lines = [lines_at(reading, PageRange(group, oid), names) for reading in task.turns[:2]]
    for name in names:
        primary, standby = (found.get(name) for found in lines)
        key = next((one.key for one in (primary, standby) if one is not None), b"")
        identity = int(xxhash64(from_list([key]))[0]) if group.key_width else None
        texts = [shown(one.line) if one is not None else None for one in (primary, standby)]
        yield NamedVersion(shown(key), identity, name, *texts)


class LineAt(Struct, frozen=True):
    """The key and the line of the row version at a place, its xmin, and the table's file that contains the place."""

    key: bytes
    line: bytes
    xmin: int = 0
    file: int | None = None


def lines_at(reading: ImportedSnapshot, part: PageRange, places: Sequence[str]) -> dict[str, LineAt]:
    """Return the versions at the places (ctid) of a table, a bounded number; raise the errors of `RangeReader.read`."""
    group = part.group

    def collect(_: PageRange, lines: BytesColumn) -> dict[str, LineAt]:
        rows = fields_after(lines, len(VERSION))
        keys = keys_of(rows, group.key_width, len(group.columns))
        pages, items, xmins = (column.tolist() for column in versions_of(lines))
        file = read.filenodes.get(part.oid)
        return {
            f"({page},{item})": LineAt(value_at(keys, number), value_at(rows, number), xmin, file)
            for number, (page, item, xmin) in enumerate(zip(pages, items, xmins, strict=True))
        }

    found: dict[str, LineAt] = {}
    read = NodeRead()
    with open_exported(reading.node, reading.exported) as connection:
        begin_reading(connection, reading.node, [part], read)
        # If the row can't be printed although it was a moment ago, it stays without its line.
        with suppress(StoppedAtRowError):
            for lines in copy_lines(connection, reading.node, part, places_query(group, places)):
                found |= collect(part, lines)
    return found


def value_at(column: BytesColumn, row: int) -> bytes:
    """Return one value of a column."""
    return column.data[int(column.offsets[row]) : int(column.offsets[row + 1])].tobytes()


def shown(line: bytes) -> str:
    """Return a line as text for people: without its newline, and cut off after SHOWN_BYTES."""
    text = line.removesuffix(b"\n")
    return text[:SHOWN_BYTES].decode(errors="backslashreplace") + ("…" if len(text) > SHOWN_BYTES else "")
