"""Read the segments' changes that belong to the state, and find each key's last change in each segment.

Superseded changes are not shuffled: a row that is updated a thousand times in a segment counts as one change.

`choose_changes` compares only keys and positions, and counts the lines of groups without a key by their hashes. Rows
stay in the segments, and the tasks that load them read them again, so multi-gigabyte transactions are never shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, runs, xxhash64
from cutline.columns.python_workers import map_batches
from cutline.columns.row_batches import from_stream, row_batches, to_stream
from cutline.fleet.progress import Silent
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.anchored_images import Anchors, OfTables, find_anchors
from cutline.snapshots.fold.changed_keys import BYTES_PER_KEY
from cutline.snapshots.fold.counted_lines import (
    LINE_NAMES,
    added_by,
    are_contested,
    choose_inserted,
    count_lines,
    deleted_keys,
    hash_rows,
    line_images,
    match_base_rows,
    read_contested,
    removed_lines,
)
from cutline.snapshots.fold.histories import are_moves
from cutline.snapshots.fold.long_lines import PLACE_FIELD, read_with_places, with_stand_ins
from cutline.snapshots.fold.sources import SegmentSource, Sources, filter_effective, problem_row, read_at_cut
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import Dealing, run_tasks, shared_problem
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import OpensStore
from cutline.wal.segments.segments import DELETE, PARTIAL, SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def last_of_every_key(groups: Ints, keys: BytesColumn, lsn: Ints, seq: Ints, continues: Flags | None = None) -> Flags:
    """Flag the last row, by (lsn, seq), of each group and key, and the row before each row that `continues` it.

    If two keys have the same hash, all rows are flagged, which costs time but loses no rows.
    """
    if (ordered := _order_by_key(groups, keys, lsn, seq)) is None:
        return np.ones(len(groups), np.bool_)
    order, is_last = ordered
    if continues is not None:
        is_last[:-1] |= continues[order[1:]]
    return _in_row_order(order, is_last)


def find_last(groups: Ints, keys: BytesColumn, lsn: Ints, seq: Ints) -> Flags | None:
    """Flag the last row, by (lsn, seq), of each group and key; return None if two keys have the same hash."""
    ordered = _order_by_key(groups, keys, lsn, seq)
    return None if ordered is None else _in_row_order(*ordered)


def _order_by_key(groups: Ints, keys: BytesColumn, lsn: Ints, seq: Ints) -> tuple[Ints, Flags] | None:
    """Order the rows by key and position, and flag the last row of each key; None if two keys have the same hash."""
    if len(groups) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    hashes = xxhash64(keys, groups.astype(np.uint64))
    # Several times faster than a stable sort by all three, which only keys with several changes need.
    order = np.argsort(hashes)
    ordered = hashes[order]
    is_last = np.concatenate([ordered[1:] != ordered[:-1], [True]])
    if is_last.all():
        return order, is_last
    of_others = np.flatnonzero(~is_last | ~np.concatenate([[True], is_last[:-1]]))
    rows = np.sort(order[of_others])
    rows = rows[np.lexsort((seq[rows], lsn[rows], hashes[rows]))]
    order[of_others] = rows
    # Compare each row with the last one of the same hash.
    ends = np.flatnonzero(is_last[of_others])
    lasts = np.repeat(rows[ends], np.diff(ends, prepend=-1))
    same = (groups[rows] == groups[lasts]) & keys.take(rows).equals(keys.take(lasts))
    return (order, is_last) if same.all() else None


def _in_row_order(order: Ints, flags: Flags) -> Flags:
    in_row_order = np.zeros(len(order), np.bool_)
    in_row_order[order] = flags
    return in_row_order


# Changes that belong to the state. `node` is the node's number in the job. A reader reports an error as a row in the
# PROBLEM group (snapshots.fold.sources): its key is the object, and its row is the report as JSON. For a long line,
# `row` is the stand-in, and `place` is where the line is stored (snapshots.fold.long_lines).
CHANGE_ROWS = (
    "node int, `group` int, partition int, key binary, lsn bigint, seq bigint, op tinyint, row binary, place bigint"
)
# An additional column for changes that are only compared: the hash of key and row, equal to Spark's xxhash64(key, row).
# If `entry` is set, `row` is empty; otherwise `entry` is null.
ENTRY = "entry"
# Enough tasks to balance their different durations, but no more: a task costs more than reading a small segment.
TASKS_PER_CORE = 2
_NAMES = ["node", "group", "partition", "key", "lsn", "seq", "op", "row"]
LINES_SCHEMA = pa.schema([pa.field("node", pa.int32()), *(SEGMENT_SCHEMA.field(name) for name in _NAMES[1:])])
CHANGE_SCHEMA = LINES_SCHEMA.append(PLACE_FIELD)


class ChangeForm(Struct, frozen=True):
    """The form in which changes are read.

    If `hashed`, they have an ENTRY instead of the row. The row is kept in groups without a key (`multisets`), where the
    line identifies the row, and on nodes with partial images (`whole`), which may have to be completed from earlier
    rows. With `for_reports`, lines have an ENTRY as well, and only rows that `keeps_row` flags are kept. On nodes that
    are `alone`, nothing is compared with the ENTRY of a row with a key: it is 0. If `has_stand_ins`, stand-ins and
    places replace long lines; otherwise there is no `place`.
    """

    multisets: frozenset[int]
    hashed: bool = False
    for_reports: bool = False
    whole: frozenset[int] = frozenset()
    has_stand_ins: bool = True
    alone: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, sources: Sources, *, hashed: bool, for_reports: bool = False, alone: frozenset[int] = frozenset()
    ) -> ChangeForm:
        """Return the form for changes from these sources."""
        whole = frozenset(segment.source.number for segment in sources.segments if segment.segment.partials)
        if for_reports:
            # The rows that are kept are needed as they are.
            return cls(sources.multisets, hashed, for_reports=True, has_stand_ins=False, alone=alone)
        return cls(sources.multisets, hashed, whole=whole, alone=alone)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the changes: CHANGE_SCHEMA with or without `place`, and ENTRY if they are hashed."""
        schema = CHANGE_SCHEMA if self.has_stand_ins else LINES_SCHEMA
        return schema.append(pa.field(ENTRY, pa.int64())) if self.hashed else schema

    @property
    def ddl(self) -> str:
        """The columns for Spark: CHANGE_ROWS, and ENTRY if they are hashed."""
        return f"{CHANGE_ROWS}, {ENTRY} bigint" if self.hashed else CHANGE_ROWS


def segment_numbers(sources: Sources) -> Mapping[str, int]:
    """Return the segments' numbers as used in places, which follow those of the base copy objects."""
    return {one.source.key: number for number, one in enumerate(sources.segments, len(sources.bases))}


def read_changes(spark: SparkSession, sources: Sources, store: StoreLocation, *, hashed: bool = False) -> DataFrame:
    """Read the CHANGE_ROWS from the segments, except those that a later change in the same segment supersedes.

    With `hashed`, they also have an ENTRY: a row is not shuffled if its hash is enough.
    """
    form = ChangeForm.of(sources, hashed=hashed)
    tasks = min(len(sources.segments), TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    segments = balance_by_size(sources.segments, tasks)
    number_of = segment_numbers(sources)
    # Broadcast values are sent to an executor once; values that a function refers to are sent with every task.
    listed = broadcast(spark, [(number_of[segment.source.key], segment) for segment in segments])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                place, segment = listed.value[number]
                yield from changes_of(store, place, segment, form)

    return map_batches(spark.range(0, len(segments), 1, tasks), read, form.ddl)


def balance_by_size(segments: tuple[SegmentSource, ...], tasks: int) -> tuple[SegmentSource, ...]:
    """Order the segments so that splitting them into `tasks` runs of equal count gives runs of about equal size."""
    largest_first = sorted(segments, key=lambda segment: -segment.source.size)
    return tuple(source for task in range(tasks) for source in largest_first[task::tasks])


def changes_of(store: OpensStore, number: int, one: SegmentSource, form: ChangeForm) -> Iterator[pa.RecordBatch]:
    """Yield a segment's changes that belong to the state, in `form`; `number` is the segment's number in places."""
    try:
        for table in read_with_places(store.open(), one, number, SEGMENT_SCHEMA):
            yield from changes_in(table, one, form)
    except SnapshotError as error:
        yield problem_row(one.source, error, form.schema)


def changes_in(table: pa.Table, one: SegmentSource, form: ChangeForm) -> Iterator[pa.RecordBatch]:
    """Yield the changes that belong to the state, from a segment's rows in the schema at the cut.

    The rows have a `place` if the form has stand-ins. Changes that no image is made of are left out.
    """
    table = filter_effective(table, one)
    is_multiset = np.isin(to_numpy(table["group"]), list(form.multisets))
    needed = _are_needed(table, one) | is_multiset
    if not needed.all():
        table, is_multiset = table.filter(to_mask(needed)), is_multiset[needed]
    entries = None
    if form.hashed:
        is_hashed = np.full(len(table), one.source.number not in form.whole)
        is_hashed &= is_multiset | ~keeps_row(table) if form.for_reports else ~is_multiset
        needs_hash = is_hashed if one.source.number not in form.alone else is_hashed & is_multiset
        table, entries = _with_entries(table, is_hashed, needs_hash)
    if form.has_stand_ins:
        # A DELETE by key has no line: its `row` may contain the row's new key.
        table = with_stand_ins(table, (to_numpy(table["op"]) != DELETE) | is_multiset)
    columns = {"node": to_arrow(np.full(len(table), one.source.number, np.int32)), ENTRY: entries}
    # All batches in a partition must have the same schema, including problem rows.
    arrays = [columns[name] if name in columns else table[name] for name in form.schema.names]
    yield from row_batches(pa.Table.from_arrays(arrays, schema=form.schema))


def _are_needed(table: pa.Table, one: SegmentSource) -> Flags:
    """Flag the changes of groups with a key that the state may need, among those in the table."""
    if one.segment.partials and one.mapping and one.mapping.conversions:
        # Converted changes are in another table than the moves between them.
        return np.ones(len(table), np.bool_)
    group, lsn, seq = (to_numpy(table[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
    # A partial image is completed from the images before it, which are under another key if the row was moved.
    moves = are_moves(table)
    continues = moves | (to_numpy(table["op"]) == PARTIAL)
    return last_of_every_key(group, column_of(table["key"]), lsn, seq, continues) | moves


def _with_entries(table: pa.Table, is_hashed: Flags, needs_hash: Flags) -> tuple[pa.Table, pa.Array[Any]]:
    """Return the table with some rows emptied, and the ENTRY column, which is 0 except where a row `needs_hash`."""
    hashes = hash_rows(table, needs_hash)
    row = table.column_names.index("row")
    kept = pc.if_else(to_mask(is_hashed), pa.scalar(b"", pa.binary()), table["row"])
    return table.set_column(row, table.schema.field("row"), kept), pa.array(hashes, mask=~is_hashed)


def last_changes(changes: pa.Table) -> pa.Table | None:
    """Find the last change for every key; return None if two keys have the same hash.

    `changes` has at least the columns node, group, key, lsn and seq.
    """
    last = [changes.slice(0, 0)]
    node = to_numpy(changes["node"])
    numbers = np.unique(node)
    for number in numbers:
        # Don't copy the changes if there is only one node.
        of_node = changes.filter(to_mask(node == number)) if len(numbers) > 1 else changes
        group, lsn, seq = (to_numpy(of_node[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
        is_last = find_last(group, column_of(of_node["key"]), lsn, seq)
        if is_last is None:
            return None
        last.append(of_node if is_last.all() else of_node.filter(to_mask(is_last)))
    return pa.concat_tables(last)


# Limits on the bytes of reported keys: the maximum for all segments together, and the minimum share for a segment.
REPORTED_BYTES_MAX, REPORTED_BYTES_MIN = 512 << 20, 1 << 14
COMPARED = ["group", "key", "lsn", "seq", "op"]
# `index` is the change's index among the segment's changes that belong to the state; ENTRY is 0 for rows with a key.
LAST_SCHEMA = pa.schema(
    [*(SEGMENT_SCHEMA.field(name) for name in COMPARED), pa.field("index", pa.int64()), pa.field(ENTRY, pa.int64())]
)
# With partial images; `row` is that of a partial image, or the new key of a move, and empty for all other changes.
PARTIAL_SCHEMA = pa.schema([*LAST_SCHEMA, SEGMENT_SCHEMA.field("partition"), SEGMENT_SCHEMA.field("row")])


class SegmentTask(Struct, frozen=True):
    """A segment to read. Rows of groups in `multisets` have no key. Nothing is reported if it exceeds `bytes_max`.

    If there are partial images (`with_partials`), also in other segments, changes that may complete them are reported.
    """

    segment: SegmentSource
    multisets: frozenset[int]
    bytes_max: int
    store: StoreLocation
    with_partials: bool = False


class SegmentReport(Struct, frozen=True):
    """The last change for each of the segment's keys (LAST_SCHEMA or PARTIAL_SCHEMA, an Arrow stream), or an error.

    It also has all changes of groups without a key. `last` is None if there is too much of them.
    """

    last: bytes | None = None
    problem: ErrorReport | None = None


class SegmentImages(Struct, frozen=True):
    """The images in a segment: one bit for each change that belongs to the state, and the groups of the images."""

    flags: bytes
    groups: frozenset[int]


NO_IMAGES = SegmentImages(b"", frozenset())


class ChosenChanges(Struct, frozen=True):
    """The last change (node, group, key, op) for every key in tables with base rows, and the images by segment.

    Segments are identified by the keys of their objects. In groups without a key, a line counts as a key if base rows
    have to lose it. `added` (IMAGE_SCHEMA) are rows that are neither in segments nor anchored: those that replace lines
    of base rows, and merged images. `in_bases` and `in_segments` are images that lack values (Anchors).
    """

    last: pa.Table
    images: Mapping[str, SegmentImages]
    problems: list[ErrorReport]
    added: pa.Table | None = None
    in_bases: Mapping[int, OfTables] = field(default_factory=dict)
    in_segments: Mapping[str, OfTables] = field(default_factory=dict)

    @classmethod
    def failed(cls, problems: Sequence[ErrorReport]) -> ChosenChanges:
        """Return the problems of objects that can't be read."""
        return cls(deleted_keys([]), {}, list(problems))


def choose_changes(
    spark: SparkSession, sources: Sources, store: StoreLocation, *, completes: bool = True
) -> ChosenChanges | None:
    """Choose the changes that produce the state; None if that takes more memory than the driver should use.

    Unless the caller `completes` images, it is also None if there are partial images.
    """
    fewest = limits.CHANGES_PER_SEGMENT * len(sources.segments)
    if not fewest <= sources.changes <= limits.CHOSEN_CHANGES_MAX or (sources.has_partials and not completes):
        return None
    # Read the largest segments first.
    segments = sorted(sources.segments, key=lambda segment: -segment.source.size)
    if (shares := reported_shares(segments)) is None:
        return None
    tasks = [
        SegmentTask(source, sources.multisets, share, store, sources.has_partials)
        for source, share in zip(segments, shares, strict=True)
    ]
    dealing = Dealing[SegmentTask](lambda task: task.segment.source.size)
    reports = run_tasks(spark, find_last_changes, tasks, Silent(), dealing, problem_of=shared_problem)
    problems = [report.problem for report in reports if report.problem]
    if problems:
        return ChosenChanges.failed(problems)
    merged = merge_reports(sources, (
        SegmentChanges(number, segment.source.number, report.last)
        for number, (segment, report) in enumerate(zip(segments, reports, strict=True))
    ))  # fmt: skip
    if merged is None:
        return None
    last, lines_changed, anchors = merged
    keys, images = in_base_tables(last, sources).select(NAMED), last.filter(to_mask(to_numpy(last["op"]) != PARTIAL))
    if keys_size(keys) + anchors.size_bytes > limits.CHOSEN_KEYS_BYTES_MAX:
        return None
    added, problems = [anchors.images], list[ErrorReport]()
    images = images.select(IMAGES)
    if len(lines_changed):
        lines = _choose_lines(spark, sources, lines_changed, dict(enumerate(segments)), store)
        if lines is None:
            return None
        keys = pa.concat_tables([keys, lines.last])
        if keys_size(keys) + anchors.size_bytes > limits.CHOSEN_KEYS_BYTES_MAX:
            return None
        images, problems = pa.concat_tables([images, lines.images]), lines.problems
        added += [lines.added] if lines.added is not None else []
    rows = pa.concat_tables(added).sort_by([("node", "ascending"), ("group", "ascending")])
    return ChosenChanges(
        keys,
        _images_by_segment(images, segments),
        problems,
        rows if len(rows) else None,
        anchors.in_bases,
        {segments[number].source.key: of_tables for number, of_tables in anchors.in_segments.items()},
    )


class MergedReports(NamedTuple):
    """The reports on several segments: the last changes of rows with a key, and all changes of rows without one.

    Both have their `node` and the number of their `segment`. `anchors` has the rows whose last change is partial.
    """

    last: pa.Table
    lines: pa.Table
    anchors: Anchors


def merge_reports(sources: Sources, reports: Iterable[SegmentChanges]) -> MergedReports | None:
    """Merge the changes that tasks reported of segments; None if any report or the result would be too large."""
    tables: list[pa.Table] = []
    for report in reports:
        if report.stream is None:
            return None
        changes = from_stream(report.stream)
        for name, value in (("segment", report.number), ("node", report.node)):
            changes = changes.append_column(name, to_arrow(np.full(len(changes), value, np.int32)))
        tables.append(changes)
    changes = pa.concat_tables(tables)
    is_line = np.isin(to_numpy(changes["group"]), list(sources.multisets))
    keyed = changes.filter(to_mask(~is_line)) if is_line.any() else changes
    last = last_changes(keyed)
    if last is None:
        return None
    anchors = find_anchors(keyed, last, sources.column_counts) if sources.has_partials else Anchors()
    return None if anchors is None else MergedReports(last, changes.filter(to_mask(is_line)), anchors)


class SegmentChanges(NamedTuple):
    """A report on a segment, and the numbers of the segment and its node; `stream` is None if it was too large."""

    number: int
    node: int
    stream: bytes | None


NAMED, IMAGES = ["node", "group", "key", "op"], ["segment", "index", "group", "op"]


class _ChosenLines(Struct, frozen=True):
    """The fields of ChosenChanges about groups without a key; `images` are the inserted rows that count (IMAGES)."""

    images: pa.Table
    last: pa.Table
    problems: list[ErrorReport]
    added: pa.Table | None = None


def _choose_lines(
    spark: SparkSession, sources: Sources, lines: pa.Table, segments: Mapping[int, SegmentSource], store: StoreLocation
) -> _ChosenLines | None:
    """Choose the changes of groups without a key; None if the driver can't hold the contested lines."""
    are_open = are_contested(to_numpy(lines["op"]), to_numpy(lines[ENTRY]))
    images = lines.select(IMAGES)
    if not are_open.any():
        return _ChosenLines(images, deleted_keys([]), [])
    number = to_numpy(lines["segment"])[are_open]
    counts = dict(zip(*(column.tolist() for column in np.unique(number, return_counts=True)), strict=True))
    hashes = to_numpy(lines[ENTRY])[are_open]
    some = {one: segments[one] for one in counts}
    contested = read_contested(spark, some, counts, hashes, sources.multisets, store)
    if contested is None:
        return None
    if contested.problems:
        return _ChosenLines(images, deleted_keys([]), list(contested.problems))
    changes = contested.changes
    counted = count_lines(changes.select(LINE_NAMES), added_by(to_numpy(changes["op"])))
    removed = removed_lines(counted)
    problems = match_base_rows(spark, sources.bases, removed, store)
    rows = pa.concat_tables([one.rows_with(one.left != 0) for one in removed]) if removed else changes.slice(0, 0)
    left = np.concatenate([np.zeros(0, np.int64), *(one.left[one.left != 0] for one in removed)])
    size = int((np.abs(left) * to_numpy(pc.binary_length(rows["row"]))).sum())
    if size > limits.READ_BYTES_MAX:
        return None
    chosen = choose_inserted(changes, counted)
    images = pa.concat_tables([images.filter(to_mask(~are_open)), chosen.select(IMAGES).cast(images.schema)])
    added = line_images(rows, left) if len(left) else None
    return _ChosenLines(images, deleted_keys(removed), problems, added)


def reported_shares(segments: Sequence[SegmentSource]) -> list[int] | None:
    """Divide REPORTED_BYTES_MAX among the segments: REPORTED_BYTES_MIN each, and the rest in proportion to changes.

    Returns None if there are too many segments for that.
    """
    shared = REPORTED_BYTES_MAX - REPORTED_BYTES_MIN * len(segments)
    if shared < 0:
        return None
    changes = max(sum(segment.segment.changes for segment in segments), 1)
    return [REPORTED_BYTES_MIN + shared * segment.segment.changes // changes for segment in segments]


def keys_size(changes: pa.Table) -> int:
    """Return how many bytes the changes' keys occupy in a task that looks them up."""
    size: int = changes["key"].nbytes + len(changes) * BYTES_PER_KEY
    return size


def in_base_tables(changes: pa.Table, sources: Sources) -> pa.Table:
    """Return the changes to tables that have rows in the base copies."""
    node, group = to_numpy(changes["node"]), to_numpy(changes["group"])
    has_rows = np.zeros(len(changes), np.bool_)
    for number in np.unique(node).tolist():
        has_rows |= (node == number) & np.isin(group, list(sources.bases.groups_of(number)))
    return changes.filter(to_mask(has_rows))


def find_last_changes(task: SegmentTask) -> SegmentReport:
    """Find the last change for each of the segment's keys: the work of a task."""
    schema = PARTIAL_SCHEMA if task.with_partials else LAST_SCHEMA
    segment, seen, size, tables = task.segment, 0, 0, [schema.empty_table()]
    try:
        for table in read_at_cut(task.store.open(), segment, SEGMENT_SCHEMA):
            effective = filter_effective(table, segment)
            found = _compared(effective, seen, task, schema)
            seen += len(effective)
            size += found.nbytes
            if size > task.bytes_max:
                return SegmentReport()
            tables.append(found)
    except SnapshotError as error:
        return SegmentReport(problem=report_of(error))
    changes = pa.concat_tables(tables)
    is_kept = np.isin(to_numpy(changes["group"]), list(task.multisets))
    keyed = changes.filter(to_mask(~is_kept)) if is_kept.any() else changes
    if task.with_partials:
        is_kept[~is_kept] = _are_needed(keyed, segment)
    else:
        group, lsn, seq = (to_numpy(keyed[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
        is_kept[~is_kept] = last_of_every_key(group, column_of(keyed["key"]), lsn, seq)
    return SegmentReport(to_stream(changes.filter(to_mask(is_kept))))


def _compared(effective: pa.Table, seen: int, task: SegmentTask, schema: pa.Schema) -> pa.Table:
    """Return what the driver compares of changes that belong to the state, of which `seen` others precede these."""
    is_line = np.isin(to_numpy(effective["group"]), list(task.multisets))
    columns = {
        "index": to_arrow(np.arange(seen, seen + len(effective))),
        ENTRY: to_arrow(hash_rows(effective, is_line)),
    }
    if task.with_partials:
        columns["row"] = pc.if_else(
            to_mask(keeps_row(effective) & ~is_line), effective["row"], pa.scalar(b"", pa.binary())
        )
    arrays = [columns[name] if name in columns else effective[name] for name in schema.names]
    return pa.Table.from_arrays(arrays, schema=schema)


def keeps_row(changes: pa.Table) -> Flags:
    """Flag the changes of groups with a key whose row helps to complete partial images without being complete."""
    flags: Flags = are_moves(changes) | (to_numpy(changes["op"]) == PARTIAL)
    return flags


def _images_by_segment(last: pa.Table, segments: list[SegmentSource]) -> dict[str, SegmentImages]:
    segment, index, group = (to_numpy(last[name]) for name in ("segment", "index", "group"))
    is_image = to_numpy(last["op"]) != DELETE
    order = np.flatnonzero(is_image)
    order = order[np.argsort(segment[order], kind="stable")]
    images: dict[str, SegmentImages] = {}
    for rows in (order[run] for run in runs(segment[order])):
        wanted = np.zeros(int(index[rows].max()) + 1, np.bool_)
        wanted[index[rows]] = True
        groups = frozenset(np.unique(group[rows]).tolist())
        name = segments[int(segment[rows[0]])].source.key
        images[name] = SegmentImages(np.packbits(wanted).tobytes(), groups)
    return images


def unpack_flags(flags: bytes, first: int, count: int) -> Flags:
    """Return the flags of `count` changes, starting at number `first`; flags beyond the end are not set."""
    packed = np.frombuffer(flags, np.uint8)[first // 8 : (first + count + 7) // 8]
    bits = np.unpackbits(packed)[first % 8 :][:count].astype(np.bool_)
    return np.concatenate([bits, np.zeros(count - len(bits), np.bool_)])
