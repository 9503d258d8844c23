"""Hash the segments, and find the last change of every key in the same tasks, so that each segment is read once.

For every key that its segment changes, a task reports the last change that belongs to the state, with a hash instead of
the row; in groups without a key, it reports all changes. The driver compares keys and positions, counts lines, merges
partial images, and gets the same result as a fold. Spark folds the changes if the reports are larger than the driver
should hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cutline.check.copies import Copies
from cutline.check.cuts import READS_AT_ONCE
from cutline.check.deleted_rows import CHANGES_MAX, DeletedKeys, ExpectedRows, KeyDeletes, expected_rows
from cutline.check.hashing import Sums, combine_all, combine_hashes
from cutline.check.new_part import NewPart
from cutline.check.report import Conflict, Findings
from cutline.check.required_values import RequiredSince, check_changes
from cutline.check.segment_transactions import SegmentTransactions
from cutline.check.stored_rows import RowsInvalidError, SegmentChecks
from cutline.check.table_forms import TableForms, forms_of_shards
from cutline.check.transaction_parts import PartReport, PartRules, reduce_parts
from cutline.check.truncates import note_contradicted
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Ints, column_of, from_list, xxhash64
from cutline.columns.row_batches import to_stream
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.progress import Progress, Silent
from cutline.nodes.groups import Group
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changes import (
    CHANGE_SCHEMA,
    ENTRY,
    ChangeForm,
    MergedReports,
    SegmentChanges,
    changes_in,
    merge_reports,
    reported_shares,
)
from cutline.snapshots.fold.sources import (
    SegmentSource,
    Sources,
    are_small,
    converted_to_cut,
    declared_metadata,
    open_body,
    read_opened,
    read_tables,
    runs_of,
)
from cutline.snapshots.records.chain import Chain
from cutline.spark.sent_values import InDriver, broadcast
from cutline.spark.spark_jobs import (
    LANES_AT_LEAST,
    Dealing,
    NodeShares,
    SparkSource,
    if_shared,
    run_tasks,
    shared_problem,
)
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import OpenTransaction, Segment, SegmentMetadata, has_place_of
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError, OpensStore, read_listed
from cutline.wal.segments.segments import (
    CHANGES,
    MARKER,
    NO_GROUP,
    PARTIAL,
    READ_WHOLE_BYTES_MAX,
    ROLLBACK_PREPARED,
    SEGMENT_SCHEMA,
    TRUNCATE,
    are_of,
    check_event_count,
    event_row_groups,
    events_offset,
    read_events,
    seal_fits,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPORTED_SCHEMA = pa.schema(
    [
        *(CHANGE_SCHEMA.field(name) for name in ("group", "partition", "key", "lsn", "seq", "op", "row")),
        (ENTRY, pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class LastTask:
    """A request for the last changes in a segment, unless they take more than `bytes_max`."""

    segment: SegmentSource
    form: ChangeForm
    bytes_max: int


@dataclass(slots=True)
class LastChanges:
    """The last changes in a segment that is being read."""

    task: LastTask
    tables: list[pa.Table] = field(default_factory=lambda: [REPORTED_SCHEMA.empty_table()])
    size_bytes: int = 0
    is_complete: bool = True

    def add(self, table: pa.Table) -> None:
        """Add stored rows (SEGMENT_SCHEMA); raise ObjectDamagedError if they don't match the commit.

        Does nothing once it is known that no report can be made.
        """
        if not self.is_complete:
            return
        for converted in converted_to_cut(table, self.task.segment):
            for batch in changes_in(converted, self.task.segment, self.task.form):
                changes = pa.Table.from_batches([batch]).select(REPORTED_SCHEMA.names)
                # Rows that are kept have no ENTRY.
                changes = changes.set_column(len(REPORTED_SCHEMA) - 1, ENTRY, changes[ENTRY].fill_null(0))
                self.size_bytes += changes.nbytes
                if self.size_bytes > self.task.bytes_max:
                    self.is_complete, self.tables = False, []
                    return
                self.tables.append(changes)

    def report(self) -> bytes | None:
        """Return the changes (REPORTED_SCHEMA, an Arrow stream); None if there are too many."""
        return to_stream(pa.concat_tables(self.tables)) if self.is_complete else None


def last_tasks(sources: Sources, alone: frozenset[int] = frozenset()) -> dict[str, LastTask]:
    """Return the tasks by object key; an empty dictionary if Spark has to fold the changes. `alone`: see Copies."""
    if not sources.segments or sources.changes > limits.CHOSEN_CHANGES_MAX:
        return {}
    if (shares := reported_shares(sources.segments)) is None:
        return {}
    form = ChangeForm.of(sources, hashed=True, for_reports=True, alone=alone)
    return {
        source.source.key: LastTask(source, form, share) for source, share in zip(sources.segments, shares, strict=True)
    }


def read_reports(
    session: SparkSession, sources: Sources, store: StoreLocation, alone: frozenset[int]
) -> dict[str, bytes | None]:
    """Return what tasks report of the segments, which are read for this alone; empty if Spark has to fold them."""
    tasks = [ReportTask(last, store) for last in last_tasks(sources, alone).values()]
    dealing = Dealing[ReportTask](lambda task: task.last.segment.source.size)
    reports = run_tasks(session, report_changes, tasks, Silent(), dealing, problem_of=shared_problem)
    return {task.last.segment.source.key: report.last for task, report in zip(tasks, reports, strict=True)}


@dataclass(frozen=True, slots=True)
class ReportTask:
    """A request for the last changes in a segment alone."""

    last: LastTask
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class ReportedChanges:
    """What `LastChanges` reports of a segment, or the problem with the segment."""

    last: bytes | None = None
    problem: ErrorReport | None = None


def report_changes(task: ReportTask) -> ReportedChanges:
    """Read a segment and report its last changes: the work of a task."""
    changes = LastChanges(task.last)
    try:
        for table in read_tables(task.store.open(), task.last.segment.source, SEGMENT_SCHEMA):
            changes.add(table)
    except SnapshotError as error:
        return ReportedChanges(problem=report_of(error))
    return ReportedChanges(changes.report())


def changes_by_node(sources: Sources, reports: MutableMapping[str, bytes | None]) -> Iterator[MergedReports | None]:
    """Yield the merged reports on each node's segments, or None if Spark has to fold them.

    Removes each node's entries from `reports`, so that only one node's changes are in memory at a time.
    """
    numbers: dict[int, list[int]] = {}
    for place, segment in enumerate(sources.segments):
        numbers.setdefault(segment.source.number, []).append(place)
    for node in sorted(numbers):
        found = [
            SegmentChanges(number, node, reports.pop(sources.segments[number].source.key, None))
            for number in numbers[node]
        ]
        yield merge_reports(sources, found)


# The driver keeps at most this many events from primaries (10 to 30 bytes each, compressed), so that their segments are
# not read again.
EVENTS_MAX = 2_000_000
RUNS_PER_READER = 2
ROW_COUNTS = ("changes", "events", "changes with values left out", "truncates")


@dataclass(frozen=True, slots=True)
class StreamTask:
    """A segment to hash: its changes and events from `since` up to, but not including, the segment's `position`.

    Transactions at the segment's `excluded` positions are left out: PostgreSQL may omit any part of a transaction that
    was rolled back before being decoded. The segment's `mapping` omits the changes of a group that precede the position
    from which all copies have them. `forms` is a broadcast of the TableForms of the node's tables, and `required` of
    the columns that are NOT NULL. `continued` is the transaction that the segment before it has begun, and `base` the
    position at which the node's slot was created. `last`, `with_events` and `with_deletes` request additional results,
    and so does `parts`, a broadcast of the rules for the parts of global transactions. An earlier check has compared
    the segment's changes and events before `checked_to`, except those of the transactions at `decided`. Without
    `is_compared`, no other copy has them: they are checked, but not hashed.
    """

    segment: SegmentSource
    since: Lsn
    store: OpensStore
    forms: Any
    last: LastTask | None = None
    with_events: bool = False
    parts: Any = None
    checked_to: Lsn = ORIGIN
    decided: frozenset[Lsn] = frozenset()
    continued: OpenTransaction | None = None
    base: Lsn = ORIGIN
    with_deletes: bool = False
    required: Any = None
    is_compared: bool = True


StreamRun: TypeAlias = tuple[StreamTask, ...]


class MarkerMessage(NamedTuple):
    """A stored marker, and its position in the WAL."""

    content: bytes
    position: Lsn


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Combined hashes, keyed by (node number, group), where group 0 holds the events; or the problem with the segment.

    `last` (from LastChanges) and `events` (SEGMENT_SCHEMA) are Arrow streams. `parts` reduces the parts of global
    transactions, and `groups` are the numbers under which changes are stored. `lacks_end` and `is_open_prepared` are
    those of SegmentTransactions. `first_changes` are the positions of the first changes under the segment's own
    definitions.
    """

    sums: Sums | None
    changes: int = 0
    markers: tuple[MarkerMessage, ...] = ()
    problem: ErrorReport | None = None
    last: bytes | None = None
    events: bytes | None = None
    parts: PartReport | None = None
    lacks_end: bool = False
    is_open_prepared: bool | None = None
    deletes: KeyDeletes | None = None
    groups: frozenset[int] = frozenset()
    first_changes: Mapping[int, Lsn] = field(default_factory=dict)


def hash_stream(task: StreamTask) -> StreamReport:
    """Read and hash the whole segment; also read its events as create does, without the changes."""
    return hash_run((task,))[0]


def hash_run(tasks: StreamRun) -> list[StreamReport]:
    """Read and hash each segment as `hash_stream` does; the tasks are a run (`runs_of`).

    The rows of all segments are checked and hashed together. If that finds a problem, each segment is read alone, so
    that its report is the same as without the others. The first report has the hashes and the deletes of all.
    """
    try:
        return _hash_run(tasks)
    except (RowsInvalidError, SnapshotError) as error:
        source = tasks[0].segment.source
        if isinstance(error, RowsInvalidError):
            error = ObjectDamagedError(key=source.key, kind=error.kind, node=source.node, detail=str(error))
        problem = report_of(error)
        if len(tasks) == 1 or if_shared(problem):
            return [StreamReport(None, problem=problem) for _ in tasks]
        return [hash_stream(task) for task in tasks]


def _hash_run(tasks: StreamRun) -> list[StreamReport]:
    store = HeldObjects.of(tasks[0].store).open()
    segments = [_OpenSegment.of(task, store) for task in tasks]
    rows = _RowChecks.of(tasks, segments[0].forms)
    if len(tasks) == 1:
        (segment,) = segments
        for number, table in enumerate(segment.read()):
            rows.add(table, np.zeros(len(table), np.int64))
            segment.add(number, table)
    elif not are_small(segment.file for segment in segments) or any(
        segment.forms is not rows.forms for segment in segments
    ):
        # If the forms differ, some segments have definitions that no commit lists.
        return [report for task in tasks for report in _hash_run((task,))]
    else:
        read = [list(segment.read()) for segment in segments]
        counts = [sum(map(len, tables)) for tables in read]
        together = _joined([table for tables in read for table in tables])
        rows.add(together, np.repeat(np.arange(len(counts)), counts))
        for segment, tables in zip(segments, read, strict=True):
            for number, table in enumerate(tables):
                segment.add(number, table)
    for segment in segments:
        segment.check_counts()
    rows.checks.end(lambda: (table for segment in segments for table in segment.read()))
    rows.transactions.end()
    sums, deletes = combine_all(rows.parts, 2), rows.deletes.report() if rows.deletes else None
    first, *others = [segment.report(rows.transactions) for segment in segments]
    nothing = combine_all([], 2)
    if len(tasks) > 1 and isinstance(held := tasks[0].store, HeldObjects):
        sizes = [task.segment.segment.changes + task.segment.segment.events for task in tasks]
        held.keep_rows(together, dict(zip([task.segment.source.key for task in tasks], sizes, strict=True)))
    return [replace(first, sums=sums, deletes=deletes), *(replace(report, sums=nothing) for report in others)]


@dataclass(slots=True)
class _RowChecks:
    """The checks and hashes of rows that need not know which segment of a run has them; `task` is the first's."""

    task: StreamTask
    forms: TableForms
    checks: SegmentChecks
    transactions: SegmentTransactions
    deletes: DeletedKeys | None
    parts: list[Sums] = field(default_factory=list)

    @classmethod
    def of(cls, tasks: StreamRun, forms: TableForms) -> _RowChecks:
        task, (segment, *others) = tasks[0], [task.segment.segment for task in tasks]
        transactions = SegmentTransactions(segment, task.base, task.continued, forms, tuple(others))
        ends = tuple(segment.through for segment in (segment, *others)[:-1])
        deletes = DeletedKeys(task.segment, forms, ends) if task.with_deletes else None
        return cls(task, forms, SegmentChecks(forms), transactions, deletes)

    def add(self, table: pa.Table, place: Ints) -> None:
        """Add stored rows (SEGMENT_SCHEMA); `place` says which segment of the run has each.

        Raises RowsInvalidError or ObjectDamagedError.
        """
        self.checks.add(table)
        self.transactions.add(table, place)
        for converted in converted_to_cut(table, self.task.segment):
            if self.task.is_compared:
                self.parts.append(_hash_table(self.task, converted))
            if self.task.required:
                check_changes(self.forms, converted, self.task.segment, self.task.required.value)
            if self.deletes:
                self.deletes.add(converted)


@dataclass(slots=True)
class _OpenSegment:
    """A segment that is being read: its bytes, footer and metadata agree with its commit. `forms` include its own.

    Every method raises RowsInvalidError or ObjectDamagedError.
    """

    task: StreamTask
    store: ObjectStore
    file: pq.ParquetFile
    forms: TableForms
    first_changes: Mapping[int, Lsn]
    event_groups: frozenset[int]
    last: LastChanges | None
    counts: Ints = field(default_factory=lambda: np.zeros(len(ROW_COUNTS), np.int64))
    groups: set[int] = field(default_factory=set)
    markers: list[MarkerMessage] = field(default_factory=list)  # two per cut
    events: list[pa.Table] = field(default_factory=list)

    @classmethod
    def of(cls, task: StreamTask, store: ObjectStore) -> _OpenSegment:
        """Read and open the task's segment."""
        source, segment = task.segment.source, task.segment.segment
        body = read_listed(store, source.node, source.key, (source.size, source.digest))
        file = open_body(body, source)
        metadata = declared_metadata(file)
        _check_seal(body, metadata, segment)
        forms = known_forms(task.forms.value, [definition.group for definition in metadata.definitions])
        return cls(
            task,
            store,
            file,
            forms,
            metadata.first_changes,
            frozenset(event_row_groups(file.metadata, segment.changes)),
            LastChanges(task.last) if task.last else None,
        )

    def read(self) -> Iterator[pa.Table]:
        """Read the rows (SEGMENT_SCHEMA), a row group at a time."""
        return read_opened(self.file, self.task.segment.source, SEGMENT_SCHEMA)

    def add(self, number: int, table: pa.Table) -> None:
        """Add the rows of a row group, whose groups `forms` has."""
        op = to_numpy(table["op"])
        self.counts += _count_rows(op)
        self.groups |= _groups_in(table)
        if (is_marker := op == MARKER).any():
            messages = table.filter(to_mask(is_marker))
            positions = map(Lsn, messages["lsn"].to_pylist())
            self.markers += map(MarkerMessage, messages["row"].to_pylist(), positions)
        if number in self.event_groups and not self._has_end_alone:
            self.events.append(table)
        if self.last:
            self.last.add(table)

    def check_counts(self) -> None:
        """Check that all rows were read."""
        _check_counts(self.task, tuple(self.counts.tolist()))

    def report(self, transactions: SegmentTransactions) -> StreamReport:
        """Check the events as create reads them, and return the segment's report, without hashes and deletes."""
        task, segment = self.task, self.task.segment.segment
        _check_events(self.store, segment, self.file.metadata)
        events = self._read_events()
        return StreamReport(
            None,
            segment.changes,
            tuple(self.markers),
            last=self.last.report() if self.last else None,
            events=to_stream(events) if task.with_events else None,
            parts=reduce_parts(events, segment.node, task.parts.value) if task.parts else None,
            lacks_end=transactions.lacks_end,
            is_open_prepared=transactions.is_open_prepared,
            groups=frozenset(self.groups - {NO_GROUP}),
            first_changes=self.first_changes,
        )

    @property
    def _has_end_alone(self) -> bool:
        """Whether a create reads only the end of the segment."""
        segment = self.task.segment.segment
        return segment.events_at is not None and segment.size > READ_WHOLE_BYTES_MAX

    def _read_events(self) -> pa.Table:
        """Return the events as create reads them: of a large segment, only the end is read."""
        segment = self.task.segment.segment
        if self._has_end_alone:
            events = read_events(self.store, segment)
        else:
            check_event_count(segment, sum(map(len, self.events)))
            events = _joined(self.events)
        if are_of(to_numpy(events["op"]), CHANGES).any():
            detail = "it contains changes in the part that should contain only events"
            raise ObjectDamagedError(key=segment.key, kind="rows", node=segment.node, detail=detail)
        return events


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Return the rows of tables (SEGMENT_SCHEMA) as one chunk."""
    return tables[0] if len(tables) == 1 else pa.concat_tables([SEGMENT_SCHEMA.empty_table(), *tables]).combine_chunks()


def known_forms(forms: TableForms, own: Collection[Group]) -> TableForms:
    """Return the forms of the commits' definitions, and those of a segment's own definitions that no commit lists.

    Raises RowsInvalidError if the segment defines a group in another way than a commit.
    """
    if (other := forms.find_other(own)) is not None:
        detail = f"its definition of group {other.number}, {other.name}, is not the commit's"
        raise RowsInvalidError(detail, kind="definition")
    return forms.adding(own)


def _check_seal(body: bytes, metadata: SegmentMetadata, segment: Segment) -> None:
    """Check the parts of a segment's metadata that are read only until a commit lists it: its key and its seal."""
    if not has_place_of(metadata.key, segment.key):
        raise RowsInvalidError(f"key is {metadata.key} in its metadata, but {segment.key} in its commit")
    if not seal_fits(metadata, body):
        raise RowsInvalidError("the seal in its metadata is not the digest of its content", kind="digest")


def _check_events(store: ObjectStore, segment: Segment, file: Any) -> None:
    """Check the offset of the events in the commit, which is used only if the segment is large."""
    if segment.events_at is None:
        return
    begin = events_offset(file, segment.changes, segment.size)
    if segment.events_at > begin:
        raise RowsInvalidError(f"its events begin at byte {begin}, before byte {segment.events_at} of its commit")
    if segment.size <= READ_WHOLE_BYTES_MAX:
        read_listed(store, segment.node, segment.key, (segment.size, segment.events_digest), segment.events_at)


def _hash_table(task: StreamTask, table: pa.Table) -> Sums:
    op, lsn = to_numpy(table["op"]), to_numpy(table["lsn"])
    # check_markers compares each archive's markers with the commits. Copies may have different markers, because one of
    # them may be idle while WAL from the other is stored.
    is_compared = (lsn >= task.since) & (lsn < task.segment.position) & ~are_of(op, (ROLLBACK_PREPARED, MARKER))
    if task.segment.excluded:
        is_compared &= ~np.isin(lsn, np.fromiter(task.segment.excluded, np.int64))
    if task.checked_to:
        is_compared &= (lsn >= task.checked_to) | np.isin(lsn, np.fromiter(task.decided, np.int64))
    chosen = table if is_compared.all() else table.filter(to_mask(is_compared))
    group = to_numpy(chosen["group"]).astype(np.int64)
    keys = np.stack([np.full(len(chosen), task.segment.source.number, np.int64), group], axis=1)
    return combine_hashes(keys, _hashes(chosen))


def _hashes(table: pa.Table) -> Any:
    """Hash every change and event, except the fields that may differ by node: the xid and the times of events."""
    count = len(table)
    lsn, end, seq, op, group, partition = (
        to_numpy(table[name]).astype(np.int64) for name in ("lsn", "end_lsn", "seq", "op", "group", "partition")
    )
    numbers = [lsn, end, np.where(are_of(to_numpy(table["op"]), CHANGES), seq, 0), op, group, partition]
    fixed = np.ascontiguousarray(np.stack(numbers, axis=1)).view(np.uint8).reshape(-1)
    width = len(numbers) * 8
    hashes = xxhash64(BytesColumn(fixed, np.arange(count + 1, dtype=np.int64) * width))
    names = table["global_id"].cast(pa.binary()).fill_null(b"")
    for column in (names, table["key"], table["row"]):
        values = column_of(column) if count else from_list([])
        hashes = xxhash64(values, hashes)
    return hashes


def _groups_in(table: pa.Table) -> set[int]:
    group = to_numpy(table["group"])
    # The changes of a table are next to each other.
    starts = np.concatenate([[True], group[1:] != group[:-1]])[: len(group)]
    return set(np.unique(group[starts]).tolist())


def _count_rows(op: npt.NDArray[np.int8]) -> tuple[int, ...]:
    """Count the rows of each kind, in the order of ROW_COUNTS."""
    changes = int(are_of(op, CHANGES).sum())
    return changes, len(op) - changes, int((op == PARTIAL).sum()), int((op == TRUNCATE).sum())


def _check_counts(task: StreamTask, counts: tuple[int, ...]) -> None:
    """Raise ObjectDamagedError unless the commit states the same counts, two of which control how segments are read."""
    source, segment = task.segment.source, task.segment.segment
    expected = (segment.changes, segment.events, segment.partials, segment.truncates)
    if counts != expected:
        raise ObjectDamagedError(
            key=source.key,
            kind="rows",
            node=source.node,
            detail=f"it contains {counts} rows ({', '.join(ROW_COUNTS)}) instead of {expected}",
        )


@dataclass(frozen=True, slots=True)
class StreamHashes:
    """Combined hashes of all streams, keyed by (node number, group), and each node's markers: position by content.

    `store` is where the segments were read. `last` maps object keys to the reports of last changes of `sources` until
    they are used. `events` maps object keys to the events from primaries, or to None if they were not kept. `parts`
    are the reduced parts of global transactions, of every intact segment. `expected` are the base rows that changes
    delete, by node number.
    """

    sums: Sums
    markers: Mapping[str, Mapping[bytes, Lsn]]
    store: OpensStore
    sources: Sources | None = None
    last: dict[str, bytes | None] = field(default_factory=dict)
    events: dict[str, bytes] | None = None
    parts: tuple[PartReport, ...] = ()
    expected: Mapping[int, ExpectedRows] = field(default_factory=dict)

    @property
    def held(self) -> HeldObjects | None:
        """The segments, if the driver holds them."""
        return self.store if isinstance(self.store, HeldObjects) else None


def hash_streams(
    spark: SparkSource,
    copies: Copies,
    store: OpensStore,
    findings: Findings,
    progress: Progress,
    sources: Sources | None = None,
    rules: PartRules | None = None,
    part: NewPart | None = None,
) -> StreamHashes:
    """Hash every copy's segments, in a Spark job unless the driver holds them; report unreadable segments as damage.

    With `sources`, the last changes and the events from primaries are kept if they are small enough, so that the
    segments are not read again. With `rules`, the parts of global transactions are reduced. With `part`, only its
    segments are read, and only their new changes and events are hashed.
    """
    part = part or NewPart(copies.chain)
    segments = _segments_to_read(copies, part)
    before = _segments_before(copies)
    with_events = sources is not None and _count_primary_events(segments, copies) <= EVENTS_MAX
    is_here = isinstance(store, HeldObjects)
    send = InDriver if is_here else lambda value: broadcast(spark.session(), value)
    with _sending_facts(copies, rules, send) as facts:
        tasks = _tasks_of(segments, before, copies, part, store, facts, sources, with_events=with_events)
        progress.step("read WAL archive", total=len(tasks), unit="objects")
        reports = _run_here(tasks, progress) if is_here else _run_tasks(spark.session(), tasks, progress)
    checks = _ReportChecks.of(copies, before, segments, reports, findings)
    results = _ReportedResults.of_nodes(copies.nodes)
    for segment, report in zip(segments, reports, strict=True):
        checks.check(segment, report)
        if report.problem is not None:
            findings.damage(report.problem)
        elif report.sums is not None:
            results.add(segment, report, report.sums)
            findings.count(objects=1, size_bytes=segment.source.size, changes=report.changes)
    note_contradicted(results.deletes, copies, findings)
    return StreamHashes(
        combine_all(results.sums, 2),
        results.markers,
        store,
        sources,
        results.last,
        results.events if with_events else None,
        tuple(report.parts for report in reports if report.parts is not None),
        {number: expected_rows(of_node) for number, of_node in results.deletes.items()},
    )


def _segments_to_read(copies: Copies, part: NewPart) -> list[SegmentSource]:
    return [
        segment
        for number, node in enumerate(copies.nodes)
        for segment in part.segment_sources(number, node, copies.same_shard(node))
    ]


def _count_primary_events(segments: Iterable[SegmentSource], copies: Copies) -> int:
    return sum(segment.segment.events for segment in segments if _is_primary(segment, copies))


@dataclass(frozen=True, slots=True)
class _SentFacts:
    """The facts that many tasks share, as broadcasts: the fields of StreamTask with these names, by shard, and `parts`.

    `required` lacks the shards without columns that are NOT NULL.
    """

    forms: Mapping[str, Any]
    required: Mapping[str, Any]
    parts: Any


@contextmanager
def _sending_facts(copies: Copies, rules: PartRules | None, send: Callable[[Any], Any]) -> Iterator[_SentFacts]:
    """Send the facts with `send`; at the end of the block, executors may forget them."""
    forms = forms_of_shards(copies.chain, set(copies.shard.values()), copies.own_types, send)
    columns = {shard: RequiredSince.of(since) for shard, since in copies.required_since.items()}
    required = {shard: send(found) for shard, found in columns.items() if len(found.columns)}
    parts = send(rules) if rules is not None else None
    try:
        yield _SentFacts(forms, required, parts)
    finally:
        for sent in (*forms.values(), *required.values(), *([parts] if parts else [])):
            sent.unpersist()


def _tasks_of(
    segments: Sequence[SegmentSource],
    before: Mapping[str, Segment],
    copies: Copies,
    part: NewPart,
    store: OpensStore,
    facts: _SentFacts,
    sources: Sources | None,
    *,
    with_events: bool,
) -> list[StreamTask]:
    """Return the task of each segment; `before` is the segment before each in its archive, by key."""
    since = {node: copies.since(node) for node in copies.nodes}
    decided = {node: part.decided(node) for node in copies.nodes}
    alone = copies.alone
    last = last_tasks(sources, alone) if sources else {}
    # For a part of a chain, the base copies are not read again, so nothing shows whether they have deleted rows.
    with_deletes = part.after is None and sum(segment.segment.changes for segment in segments) <= CHANGES_MAX

    def task_of(segment: SegmentSource) -> StreamTask:
        key, node = segment.source.key, segment.source.node
        shard = copies.shard[node]
        return StreamTask(
            segment,
            since[node],
            store,
            facts.forms[shard],
            last=last.get(key),
            with_events=with_events and _is_primary(segment, copies),
            parts=facts.parts,
            # A new segment of an idle node may begin before the cut that was checked.
            checked_to=ORIGIN if part.is_new(segment.segment) else part.checked_to(node),
            decided=decided[node],
            continued=before[key].open if key in before else None,
            base=copies.chain.slot_position(node),
            with_deletes=with_deletes,
            required=facts.required.get(shard),
            is_compared=segment.source.number not in alone,
        )

    return [task_of(segment) for segment in segments]


@dataclass(frozen=True, slots=True)
class _ReportChecks:
    """Compares the reports with each other and with the chain's commits.

    `reports` are keyed by the segment's key, and so is `before`, the segment before each in its archive. `ended` are
    the definitions that had ended before a segment, by node and segment number, and `continued` the results of
    `continued_from` by node.
    """

    chain: Chain
    before: Mapping[str, Segment]
    reports: Mapping[str, StreamReport]
    ended: Mapping[tuple[str, int], frozenset[int]]
    continued: Mapping[str, Mapping[int, Lsn]]
    findings: Findings

    @classmethod
    def of(
        cls,
        copies: Copies,
        before: Mapping[str, Segment],
        segments: Iterable[SegmentSource],
        reports: Iterable[StreamReport],
        findings: Findings,
    ) -> _ReportChecks:
        chain = copies.chain
        by_key = {segment.source.key: report for segment, report in zip(segments, reports, strict=True)}
        ended = {(node, number): groups for node in copies.nodes for number, groups in find_ended(chain, node).items()}
        return cls(chain, before, by_key, ended, {node: continued_from(chain, node) for node in copies.nodes}, findings)

    def check(self, segment: SegmentSource, report: StreamReport) -> None:
        """Add what a segment's report contradicts to the findings."""
        self._check_end(segment, report)
        self._check_ended(segment, report)
        self._check_first_changes(segment, report)

    def _check_end(self, segment: SegmentSource, report: StreamReport) -> None:
        """Check that the segment has the end of the transaction that the segment before it has begun."""
        before = self.before.get(segment.source.key)
        if before is None or not report.lacks_end:
            return
        begun = self.reports.get(before.key)
        if begun is not None and begun.is_open_prepared is False:
            self.findings.damage(_lacks_end(segment, before))

    def _check_ended(self, segment: SegmentSource, report: StreamReport) -> None:
        """Check that the segment has no changes under definitions that had ended before it."""
        ended = self.ended.get((segment.source.node, segment.segment.number), frozenset()) & report.groups
        if ended:
            self.findings.damage(_is_ended(self.chain, segment, min(ended)))

    def _check_first_changes(self, segment: SegmentSource, report: StreamReport) -> None:
        """Check that no change precedes the position from which the changes of its definition count."""
        source, continued = segment.source, self.continued[segment.source.node]
        for number, first in report.first_changes.items():
            if first < (counted_from := continued.get(number, first)):
                group = self.chain.definitions(source.node)[number].name
                detail = f"changes under group {number} count from {counted_from}, but one is at {first}"
                self.findings.conflict(Conflict("commit", detail, node=source.node, group=group, object=source.key))


@dataclass(frozen=True, slots=True)
class _ReportedResults:
    """The results of the reports on intact segments, as in StreamHashes; `deletes` are keyed by node number."""

    markers: Mapping[str, dict[bytes, Lsn]]
    sums: list[Sums] = field(default_factory=list)
    last: dict[str, bytes | None] = field(default_factory=dict)
    events: dict[str, bytes] = field(default_factory=dict)
    deletes: dict[int, list[KeyDeletes]] = field(default_factory=dict)

    @classmethod
    def of_nodes(cls, nodes: Iterable[str]) -> _ReportedResults:
        return cls({node: {} for node in nodes})

    def add(self, segment: SegmentSource, report: StreamReport, sums: Sums) -> None:
        """Add a report whose sums are `sums`."""
        source = segment.source
        self.sums.append(sums)
        self.markers[source.node].update(dict(report.markers))
        self.last[source.key] = report.last
        if report.events is not None:
            self.events[source.key] = report.events
        if report.deletes is not None:
            self.deletes.setdefault(source.number, []).append(report.deletes)


def _segments_before(copies: Copies) -> dict[str, Segment]:
    """Return the segment before each in the archive of its node, by the later segment's key."""
    archives = (copies.chain.segments(node) for node in copies.nodes)
    return {later.key: earlier for archive in archives for earlier, later in pairwise(archive)}


def find_ended(chain: Chain, node: str) -> dict[int, frozenset[int]]:
    """Return the definitions that no longer existed when each of a node's segments was written, by segment number.

    A drain knows the definitions in the commit before it, and those that are new. Segments without such definitions are
    left out.
    """
    found: dict[int, frozenset[int]] = {}
    shard, ended = chain.shard_of(node), frozenset[int]()
    for commit in chain.commits:
        if ended and commit.increment >= chain.begun(node):
            found |= {segment.number: ended for segment in commit.segments.get(node, ())}
        if commit.definition_changes:
            ended |= set(commit.definition_changes.gone.get(shard, ()))
    return found


def continued_from(chain: Chain, node: str) -> dict[int, Lsn]:
    """Return the positions from which changes of a node count under definitions that continue others, by number.

    A create sets them to the first change. In a table that was copied, changes before the copy don't count.
    """
    shard = chain.shard_of(node)
    changes = [
        commit.definition_changes
        for commit in chain.commits
        if commit.definition_changes and commit.increment >= chain.begun(node)
    ]
    return {
        number: begun
        for one in changes
        for number, begun in one.begun.get(node, {}).items()
        if number in one.successions.get(shard, {})
    }


def _is_ended(chain: Chain, segment: SegmentSource, number: int) -> ErrorReport:
    group, node = chain.definitions(segment.source.node)[number], segment.source.node
    detail = f"it contains changes of table {group.name} under a definition that had ended before (group {number})"
    return report_of(ObjectDamagedError(key=segment.source.key, kind="rows", node=node, detail=detail))


def _lacks_end(segment: SegmentSource, before: Segment) -> ErrorReport:
    """Return the error for a segment that lacks the end of the transaction that the segment before it has begun.

    PostgreSQL may omit the rest of a two-phase transaction that was rolled back meanwhile.
    """
    at = before.open.lsn if before.open else segment.segment.after
    detail = f"it lacks the end of the transaction at {at}, which begins in segment {before.number}"
    return report_of(ObjectDamagedError(key=segment.source.key, kind="rows", node=segment.source.node, detail=detail))


def _segment_of(task: StreamTask) -> Segment:
    return task.segment.segment


def _shared_by_run(task: StreamTask) -> object:
    """Return what the tasks of a run have in common; all tasks of a node have the rest in common."""
    return task.segment.source.number, task.checked_to, task.continued


def _is_primary(segment: SegmentSource, copies: Copies) -> bool:
    return copies.shard[segment.source.node] == segment.source.node


def _run_tasks(session: SparkSession, tasks: Sequence[StreamTask], progress: Progress) -> list[StreamReport]:
    runs = list(runs_of(tasks, _segment_of, _shared_by_run, LANES_AT_LEAST))
    dealing = Dealing[StreamRun](lambda run: sum(task.segment.source.size for task in run))
    reports = run_tasks(session, hash_run, runs, _shares_of(tasks, progress), dealing, problem_of=_problem_of_run)
    return [report for of_run in reports for report in of_run]


def _problem_of_run(reports: list[StreamReport]) -> ErrorReport | None:
    return next(filter(None, map(shared_problem, reports)), None)


def _run_here(tasks: Sequence[StreamTask], progress: Progress) -> list[StreamReport]:
    shares = _shares_of(tasks, progress)

    def read(run: StreamRun) -> list[StreamReport]:
        reports = hash_run(run)
        shares.end([run])
        return reports

    with ThreadPoolExecutor(READS_AT_ONCE) as threads:
        of_runs = threads.map(read, runs_of(tasks, _segment_of, _shared_by_run, RUNS_PER_READER * READS_AT_ONCE))
        return [report for of_run in of_runs for report in of_run]


def _shares_of(tasks: Sequence[StreamTask], progress: Progress) -> NodeShares[StreamRun]:
    def shares_of(run: Sequence[StreamTask]) -> list[tuple[str, int]]:
        return [(task.segment.source.node, task.segment.source.size) for task in run]

    totals = Counter[str]()
    for node, size in shares_of(tasks):
        totals[node] += size
    shares = NodeShares[StreamRun](progress, totals, shares_of)
    shares.begin()
    return shares
