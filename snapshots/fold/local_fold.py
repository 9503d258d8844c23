"""Fold few changes in the driver, which is seconds faster than a Spark job and gives the same result.

Sizes decide whether Spark folds the changes instead (snapshots.fold.limits), never their kinds. All lines are held in
memory, including long lines. Base objects are read only if a value or a deleted line is in no segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, column_of
from cutline.columns.lines import concatenate
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changed_keys import Keys, KeySet, have_key_in, overlays
from cutline.snapshots.fold.changes import ChangeForm, changes_in, last_changes
from cutline.snapshots.fold.counted_lines import LINE_NAMES, CountedLines, added_by, count_lines, line_images
from cutline.snapshots.fold.histories import ROW_NAME, find_histories, merge_by_table, named
from cutline.snapshots.fold.key_history import Images, number_rows
from cutline.snapshots.fold.long_lines import as_images, line_names
from cutline.snapshots.fold.sources import (
    LARGE_BYTES,
    BaseSource,
    SegmentSource,
    Sources,
    are_small,
    as_problems,
    converted_to_cut,
    open_object,
    read_opened,
    runs_of,
)
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import HeldObjects, OpensStore
from cutline.wal.segments.segments import DELETE, PARTIAL, SEGMENT_SCHEMA

# Enough runs of segments to keep all readers busy.
READERS, RUNS_MIN = 4, 16
# The bytes that a row of a table takes in addition to its key and its line.
BYTES_PER_ROW = 32
WANTED_SCHEMA = pa.schema([pa.field("node", pa.int32()), *BASE_SCHEMA])


# What a reader has read, or why it can't.
_Answer: TypeAlias = list[pa.RecordBatch] | ErrorReport


class TooLargeError(Exception):
    """There is more to read or to make than the driver should hold."""


class Room:
    """The number of bytes by which a fold may still increase the driver's memory. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._left, self._lock = size_bytes, Lock()

    def take(self, size_bytes: int) -> None:
        """Take this many bytes; raise TooLargeError if they are not left."""
        with self._lock:
            self._left -= size_bytes
            if self._left < 0:
                raise TooLargeError


class LocalFold(Struct, frozen=True):
    """The folded changes of all nodes.

    `images` (IMAGE_SCHEMA) are the rows that changes have produced, ordered by node and group. An image that can't be
    completed, and a row that was deleted but never existed, are in the PROBLEM group, with their own group in
    `partition`. `changed` and `problems` are those of `snapshots.fold.fold.Fold`.
    """

    images: pa.Table
    changed: dict[int, dict[int, Keys]]
    problems: list[ErrorReport]


def fold_locally(sources: Sources, archive: OpensStore, store: StoreLocation) -> LocalFold | None:
    """Fold the changes in `sources`; return None if Spark has to fold them because there is too much of something.

    Segments are read from the `archive`, base objects from the `store`.
    """
    size = sum(segment.source.size for segment in sources.segments)
    if sources.changes > limits.CHANGES_MAX or size > limits.STORED_BYTES_MAX:
        return None
    room = Room(limits.READ_BYTES_MAX)
    try:
        changes, problems = _read_changes(sources, archive, room)
        in_multiset = np.isin(to_numpy(changes["group"]), list(sources.multisets))
        keyed, unkeyed = _filter(changes, ~in_multiset), _filter(changes, in_multiset)
        last = last_changes(keyed)
        if last is None:
            return None
        partial = _merge_changes(keyed, last, sources.column_counts)
        counted = _count_lines(unkeyed)
        deleted = _name_lines(counted.rows_with(counted.net < 0))
        base, more = _read_base(sources, overlays(pa.concat_tables([partial.wanted, deleted])), store, room)
        in_multiset = np.isin(to_numpy(base["group"]), list(sources.multisets))
        images = [
            as_images(_filter(last, ~np.isin(to_numpy(last["op"]), (DELETE, PARTIAL)))),
            _complete(partial, _filter(base, ~in_multiset), sources.column_counts),
            _fold_lines(counted, _filter(base, in_multiset), room),
        ]
    except TooLargeError:
        return None
    changed = overlays(pa.concat_tables([named(last), deleted]))
    ordered = pa.concat_tables(images).sort_by([("node", "ascending"), ("group", "ascending")])
    return LocalFold(ordered, {node: dict(of_groups) for node, of_groups in changed.items()}, problems + more)


def _read_changes(sources: Sources, archive: OpensStore, room: Room) -> tuple[pa.Table, list[ErrorReport]]:
    """Read the changes that belong to the state, and the reports about segments that can't be read."""
    form = ChangeForm(sources.multisets, has_stand_ins=False)

    def read(run: tuple[SegmentSource, ...]) -> list[_Answer]:
        batches: list[pa.RecordBatch] = []
        # The conversion of partial images looks at the whole table.
        one = max(run, key=lambda source: source.segment.partials)
        try:
            for table in _tables_of_run(archive, run):
                for batch in changes_in(table, one, form):
                    room.take(batch.nbytes)
                    batches.append(batch)
        except SnapshotError as error:
            if len(run) > 1:
                # Read each alone, to learn which of them can't be read.
                return [answer for source in run for answer in read((source,))]
            return [report_of(error)]
        return [batches]

    runs = runs_of(sources.segments, lambda source: source.segment, lambda source: source.source.number, RUNS_MIN)
    with ThreadPoolExecutor(READERS) as threads:
        answers = threads.map(read, runs)
        return _gather((answer for of_run in answers for answer in of_run), form.schema)


def _read_base(
    sources: Sources, wanted: Mapping[int, Mapping[int, KeySet]], store: StoreLocation, room: Room
) -> tuple[pa.Table, list[ErrorReport]]:
    """Read the base rows (WANTED_SCHEMA) that are `wanted`, by node number and group, and that were not truncated."""
    chosen: list[tuple[BaseSource, dict[int, KeySet]]] = []
    size = 0
    for base in sources.bases.with_rows_of({node: frozenset(of_groups) for node, of_groups in wanted.items()}):
        of_groups = wanted[base.source.number]
        if keys := {group: of_groups[group] for group in base.groups & of_groups.keys() - base.truncated}:
            chosen.append((base, keys))
            size += base.source.size
        if size > limits.BASE_BYTES_MAX:
            raise TooLargeError

    def read(one: tuple[BaseSource, dict[int, KeySet]]) -> _Answer:
        base, keys = one
        found: list[pa.RecordBatch] = []
        try:
            for batch in (batch for table in _tables_of(store, base, BASE_SCHEMA) for batch in table.to_batches()):
                rows = batch.filter(to_mask(have_key_in(batch, base, keys)))
                if len(rows):
                    room.take(rows.nbytes)
                    node = to_arrow(np.full(len(rows), base.source.number, np.int32))
                    found.append(pa.record_batch([node, *rows.columns], schema=WANTED_SCHEMA))
        except SnapshotError as error:
            return report_of(error)
        return found

    with ThreadPoolExecutor(READERS) as threads:
        return _gather(threads.map(read, chosen), WANTED_SCHEMA)


def _tables_of(store: OpensStore, source: BaseSource | SegmentSource, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read an object's rows in the schema at the cut; raise TooLargeError if a single row may be too large to hold."""
    file = open_object(store.open(), source.source)
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    if any(group.total_byte_size > LARGE_BYTES for group in groups):
        raise TooLargeError
    for table in read_opened(file, source.source, schema):
        yield from converted_to_cut(table, source)


def _tables_of_run(store: OpensStore, run: tuple[SegmentSource, ...]) -> Iterator[pa.Table]:
    """Read the rows of a run of segments (`runs_of`) in the schema at the cut; small segments as one table."""
    if len(run) == 1:
        yield from _tables_of(store, run[0], SEGMENT_SCHEMA)
        return
    held = store.rows if isinstance(store, HeldObjects) else {}
    files = {one.source.key: open_object(store.open(), one.source) for one in run if one.source.key not in held}
    if not are_small(files.values()):
        for one in run:
            yield from _tables_of(store, one, SEGMENT_SCHEMA)
        return
    tables: list[pa.Table] = []
    for one in run:
        key = one.source.key
        tables += [held[key].part()] if key in held else read_opened(files[key], one.source, SEGMENT_SCHEMA)
    yield from converted_to_cut(pa.concat_tables(tables).combine_chunks(), run[0])


def _gather(answers: Iterable[_Answer], schema: pa.Schema) -> tuple[pa.Table, list[ErrorReport]]:
    batches: list[pa.RecordBatch] = []
    problems: list[ErrorReport] = []
    for answer in answers:
        if isinstance(answer, list):
            batches += answer
        else:
            problems.append(answer)
    return pa.Table.from_batches(batches, schema), problems


def _filter(table: pa.Table, rows: Flags) -> pa.Table:
    return table if rows.all() else table.filter(to_mask(rows))


class PartialImages(Struct, frozen=True):
    """The rows whose last image is partial, ordered by node and group; `lines` have all values that the changes have.

    If `is_open`, the values that a line lacks may be in the base row, whose name is in `names`.
    """

    rows: pa.Table
    lines: BytesColumn
    is_complete: Flags
    is_open: Flags
    names: pa.Table

    @property
    def wanted(self) -> pa.Table:
        """The names of the base rows that are needed."""
        return _filter(self.names, ~self.is_complete & self.is_open)


def _merge_changes(keyed: pa.Table, last: pa.Table, counts: Mapping[tuple[int, int], int]) -> PartialImages:
    """Fill in the missing values in partial `last` images from the earlier changes."""
    rows = _filter(last, to_numpy(last["op"]) == PARTIAL).sort_by([("node", "ascending"), ("group", "ascending")])
    if len(rows) == 0:
        none = np.zeros(0, np.bool_)
        return PartialImages(rows, column_of(rows["row"]), none, none, named(rows))
    histories = find_histories(keyed, rows)
    lines = column_of(keyed["row"].take(to_arrow(histories.changes)))
    merged, is_complete = merge_by_table(rows, Images(lines, histories.offsets), counts)
    return PartialImages(rows, merged, is_complete, histories.is_open, histories.names)


def _complete(partial: PartialImages, base: pa.Table, counts: Mapping[tuple[int, int], int]) -> pa.Table:
    """Fill in the values that the changes lack from the base rows; return all images (IMAGE_SCHEMA)."""
    rows, lines, is_complete = partial.rows, partial.lines, partial.is_complete.copy()
    names = pa.concat_tables([partial.names, named(base)])
    code = number_rows(names["key"], *(to_numpy(names[name]) for name in ROW_NAME[:2]))
    of_row, of_base = code[: len(rows)], code[len(rows) :]
    by_code = np.argsort(of_base, kind="stable")
    place = np.searchsorted(of_base[by_code], of_row)
    is_found = np.append(of_base[by_code], -1)[place] == of_row
    chosen = np.flatnonzero(is_found & partial.is_open & ~is_complete)
    if len(chosen):
        both = concatenate([column_of(base["row"]), lines])
        pairs = np.stack([by_code[place[chosen]], len(base) + chosen], axis=1).reshape(-1)
        images = Images(both.take(pairs), np.arange(len(chosen) + 1) * 2)
        merged, is_complete[chosen] = merge_by_table(rows.take(to_arrow(chosen)), images, counts)
        index = np.arange(len(rows))
        index[chosen] = len(rows) + np.arange(len(chosen))
        lines = concatenate([lines, merged]).take(index)
    completed = rows.set_column(rows.column_names.index("row"), "row", lines.to_arrow())
    return as_images(as_problems(completed, ~is_complete))


def _count_lines(unkeyed: pa.Table) -> CountedLines:
    return count_lines(unkeyed.select(LINE_NAMES), added_by(to_numpy(unkeyed["op"])))


def _name_lines(rows: pa.Table) -> pa.Table:
    """Return the rows' names, as a base object's rows in groups without a key are looked up."""
    return pa.table([rows["node"], rows["group"], line_names(rows["row"]).to_arrow()], names=ROW_NAME)


def _fold_lines(counted: CountedLines, base: pa.Table, room: Room) -> pa.Table:
    """Return the images (IMAGE_SCHEMA) of lines without a key: as often as in `base`, plus inserts, minus deletes."""
    changed = counted.net != 0
    rows = pa.concat_tables([_unlabelled(counted.rows_with(changed)), _unlabelled(base)])
    total = count_lines(rows, np.concatenate([counted.net[changed], np.ones(len(base), np.int64)]))
    lines, copies = total.rows.take(to_arrow(total.first)), np.maximum(np.abs(total.net), 1)
    lengths = to_numpy(pc.binary_length(lines["row"])).astype(np.int64)
    room.take(int((copies * (lengths + BYTES_PER_ROW)).sum()))
    return line_images(lines, total.net)


def _unlabelled(rows: pa.Table) -> pa.Table:
    """Return the rows (LINE_NAMES) with fields that are the same for changes and for base rows."""
    return pa.table([rows[name] for name in LINE_NAMES], names=LINE_NAMES)
