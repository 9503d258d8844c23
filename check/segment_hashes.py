"""Check and hash the rows of segments: the work of a task of `hash_streams`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.check.deleted_rows import DeletedKeys, KeyDeletes
from cutline.check.hashing import Sums, combine_all, combine_hashes
from cutline.check.last_changes import LastChanges, LastTask
from cutline.check.required_values import check_changes
from cutline.check.segment_transactions import SegmentTransactions
from cutline.check.stored_rows import RowsInvalidError, SegmentChecks
from cutline.check.table_forms import TableForms
from cutline.check.transaction_parts import PartReport, reduce_parts
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Ints, column_of, from_list, xxhash64
from cutline.columns.row_batches import to_stream
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.groups import Group
from cutline.snapshots.fold.sources import (
    OpenedObject,
    SegmentSource,
    are_small,
    converted_to_cut,
    declared_metadata,
    open_body,
    read_opened,
)
from cutline.spark.spark_jobs import if_shared
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
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

ROW_COUNTS = ("changes", "events", "changes with values left out", "truncates")


class StreamTask(Struct, frozen=True):
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


class StreamReport(Struct, frozen=True):
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


class _RowChecks(Struct):
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


class _OpenSegment(Struct):
    """A segment that is being read: its bytes, footer and metadata agree with its commit. `forms` include its own.

    Every method raises RowsInvalidError or ObjectDamagedError.
    """

    task: StreamTask
    store: ObjectStore
    file: OpenedObject
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
