"""Images that lack values, of too many changes for the driver: another row has the values, and stays where it is.

An UPDATE leaves out the large values that it does not change, so the last image of a row may be partial. The driver
merges the partial images of such a row, which are small because of that. The row that has the other values is its
*anchor*: a base row, or a complete image in a segment. The task that reads the anchor completes the image, so large
values are neither collected nor shuffled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, from_list, runs, xxhash64
from cutline.columns.lines import concatenate
from cutline.snapshots.fold.changed_keys import BYTES_PER_KEY, KeySet
from cutline.snapshots.fold.histories import find_histories, merge_by_table, moves_among, named
from cutline.snapshots.fold.key_history import Images, build_key_history, merge_in_blocks
from cutline.snapshots.fold.long_lines import IMAGE_SCHEMA, as_images, complete_image
from cutline.snapshots.fold.sources import BaseSource, SegmentSource, as_problems, filter_effective, read_at_cut
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.wal.segments.damage import OpensStore
from cutline.wal.segments.segments import INSERT, PARTIAL, SEGMENT_SCHEMA, UPSERT

# A merge takes several times as much as the images.
MERGED_BYTES_MAX = 128 << 20
# A task completes rows of at most this size together, or one row.
COMPLETED_BYTES = 32 << 20
COMPLETED_SCHEMA = pa.schema(
    [*(IMAGE_SCHEMA.field(name) for name in ("group", "partition", "key", "lsn", "row")), ("number", pa.int64())]
)


class AnchoredImages(Struct, frozen=True):
    """Partial images of a table with `column_count` columns, by the names of the rows that have the other values.

    Image i (partition, key, lsn, row) belongs to name i. A base row's name is its key, a change's is `change_names`.
    """

    group: int
    column_count: int
    names: KeySet
    images: pa.Table

    @property
    def size_bytes(self) -> int:
        """The bytes that they take in a task."""
        names: int = self.names.keys.lengths.sum() + len(self.names.keys) * BYTES_PER_KEY
        return names + int(self.images.nbytes)

    def complete(self, numbers: Ints, lines: pa.Array | pa.ChunkedArray, rows: Ints) -> Iterator[pa.Table]:
        """Complete images with the lines of these rows; yield them (COMPLETED_SCHEMA), some at a time."""
        own = to_numpy(pc.binary_length(self.images["row"])).astype(np.int64)[numbers]
        ends = np.cumsum(to_numpy(pc.binary_length(lines)).astype(np.int64)[rows] + own)
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + COMPLETED_BYTES, side="right")), first + 1)
            is_large = ends[last - 1] - before > COMPLETED_BYTES
            yield self._complete(numbers[first:last], lines, rows[first:last], is_large=bool(is_large))
            first = last

    def _complete(self, numbers: Ints, lines: pa.Array | pa.ChunkedArray, rows: Ints, *, is_large: bool) -> pa.Table:
        images = self.images.take(to_arrow(numbers))
        own = column_of(images["row"])
        if is_large:
            # A single row, which may be 1 GB: its fields are copied once.
            image, line = (np.frombuffer(value.as_buffer(), np.uint8) for value in (images["row"][0], lines[rows[0]]))
            whole = complete_image(iter([image, line]), self.column_count)
            if whole is None:
                raise ValueError("a row lacks values")
            merged = BytesColumn(whole, np.array([0, len(whole)]))
        else:
            both = concatenate([column_of(lines.take(to_arrow(rows))), own])
            pairs = np.stack([np.arange(len(numbers)), len(numbers) + np.arange(len(numbers))], axis=1).reshape(-1)
            merged, _ = merge_in_blocks(Images(both.take(pairs), np.arange(len(numbers) + 1) * 2), self.column_count)
        columns = {
            "group": to_arrow(np.full(len(numbers), self.group, np.int32)),
            "row": merged.to_arrow(),
            "number": to_arrow(numbers),
        }
        arrays = [columns[name] if name in columns else images[name] for name in COMPLETED_SCHEMA.names]
        return pa.Table.from_arrays(arrays, schema=COMPLETED_SCHEMA)


OfTables = dict[int, AnchoredImages]
# The numbers of images that were completed, and the hash of key and row of each, by group.
Completed = dict[int, tuple[Ints, Ints]]


class Anchors(Struct, frozen=True):
    """The rows whose last images lack values: `in_bases` by node and group, `in_segments` by segment and group.

    `images` (IMAGE_SCHEMA) are those that need no anchor, and those that have none (in the PROBLEM group).
    """

    in_bases: dict[int, OfTables] = field(default_factory=dict)
    in_segments: dict[int, OfTables] = field(default_factory=dict)
    images: pa.Table = field(default_factory=lambda: IMAGE_SCHEMA.empty_table())

    @property
    def size_bytes(self) -> int:
        """The bytes that they take in the driver."""
        tables = [*self.in_bases.values(), *self.in_segments.values()]
        return int(self.images.nbytes) + sum(one.size_bytes for of_tables in tables for one in of_tables.values())


def find_anchors(keyed: pa.Table, last: pa.Table, counts: Mapping[tuple[int, int], int]) -> Anchors | None:
    """Find the anchors of the partial images among the `last` changes; None if the images take too much memory.

    `keyed` are the changes that `are_needed` for that (node, segment, group, partition, key, lsn, seq, op, row), of
    groups with a key; complete images need no row. `counts` are the numbers of columns by node and group.
    """
    rows = last.filter(to_mask(to_numpy(last["op"]) == PARTIAL))
    if len(rows) == 0:
        return Anchors()
    if pc.sum(pc.binary_length(rows["row"])).as_py() > MERGED_BYTES_MAX:
        return None
    rows = rows.sort_by([("node", "ascending"), ("group", "ascending")])
    keyed = _of_their_keys(keyed, rows)
    histories = find_histories(keyed, rows)
    starts, ends = histories.offsets[:-1], histories.offsets[1:]
    op = to_numpy(keyed["op"])[histories.changes]
    is_in_segment = op[starts] != PARTIAL
    # All images of a row but a complete one, which has to be the oldest.
    lengths = ends - starts - is_in_segment
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    partial = np.arange(offsets[-1]) + np.repeat(starts + is_in_segment - offsets[:-1], lengths)
    lines = column_of(keyed["row"].take(to_arrow(histories.changes[partial])))
    merged, is_complete = merge_by_table(rows, Images(lines, offsets), counts)
    whole = rows.set_column(rows.column_names.index("row"), "row", merged.to_arrow())
    is_in_segment &= ~is_complete
    is_in_base = ~is_complete & ~is_in_segment & histories.is_open
    is_lost = ~is_complete & ~is_in_segment & ~is_in_base
    own = as_problems(as_images(whole), is_lost).filter(to_mask(is_complete | is_lost))
    anchors = Anchors(images=own)
    oldest = keyed.take(to_arrow(histories.changes[starts[is_in_segment]]))
    in_segments = whole.filter(to_mask(is_in_segment))
    segments = to_numpy(oldest["segment"])
    for chosen in _by_table(segments, in_segments):
        names = change_names(oldest.take(to_arrow(chosen)))
        images = _anchored(names, in_segments, chosen, counts)
        anchors.in_segments.setdefault(int(segments[chosen[0]]), {})[images.group] = images
    in_bases, base_names = whole.filter(to_mask(is_in_base)), histories.names.filter(to_mask(is_in_base))
    nodes = to_numpy(in_bases["node"])
    for chosen in _by_table(nodes, in_bases):
        names = column_of(base_names["key"].take(to_arrow(chosen)))
        images = _anchored(names, in_bases, chosen, counts)
        anchors.in_bases.setdefault(int(nodes[chosen[0]]), {})[images.group] = images
    return anchors


def _of_their_keys(keyed: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the changes that may belong to the rows: there may be millions of others."""
    periods = build_key_history(named(rows), moves_among(keyed))
    wanted = np.unique(_hash_names(named(periods)))
    chosen = np.isin(_hash_names(keyed), wanted)
    # The moves between their keys are among these.
    return keyed.filter(to_mask(chosen))


def _hash_names(table: pa.Table) -> Ints:
    hashes = xxhash64(column_of(table["key"])) if len(table) else np.zeros(0, np.uint64)
    numbers = (to_numpy(table["node"]).astype(np.uint64) << np.uint64(32)) ^ to_numpy(table["group"]).astype(np.uint64)
    with np.errstate(over="ignore"):
        return (hashes ^ (numbers * np.uint64(0x9E3779B97F4A7C15))).view(np.int64)


def change_names(changes: pa.Table) -> BytesColumn:
    """Return the names of changes (lsn, seq, key) as anchors, among those of a table in a segment."""
    if len(changes) == 0:
        return from_list([])
    numbers = np.stack([to_numpy(changes[name]).astype(np.int64) for name in ("lsn", "seq")], axis=1)
    data = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)
    positions = BytesColumn(data, np.arange(len(changes) + 1, dtype=np.int64) * numbers.shape[1] * 8).to_arrow()
    keys = column_of(changes["key"]).to_arrow()
    return column_of(pa.chunked_array([pc.binary_join_element_wise(positions, keys, pa.scalar(b"", pa.binary()))]))


def _by_table(place: Ints, images: pa.Table) -> Iterator[Ints]:
    """Yield the rows of each place and group."""
    group = to_numpy(images["group"])
    order = np.lexsort((group, place))
    for run in runs((place[order].astype(np.int64) << 32) + group[order]):
        yield order[run]


def _anchored(
    names: BytesColumn, images: pa.Table, chosen: Ints, counts: Mapping[tuple[int, int], int]
) -> AnchoredImages:
    hashes = xxhash64(names)
    order = np.argsort(hashes, kind="stable")
    node, group = (images[name][int(chosen[0])].as_py() for name in ("node", "group"))
    kept = images.select(["partition", "key", "lsn", "row"]).take(to_arrow(chosen[order]))
    return AnchoredImages(group, counts[node, group], KeySet(hashes[order], names.take(order)), kept)


def complete_base_rows(
    batch: pa.RecordBatch, base: BaseSource, anchored: Mapping[int, AnchoredImages], rows: Flags
) -> Iterator[pa.Table]:
    """Yield the images (COMPLETED_SCHEMA) whose anchors are among `rows` of a base object's batch (BASE_SCHEMA)."""
    for found in find_base_rows(batch, base, anchored, rows):
        yield from anchored[found.group].complete(found.numbers, batch.column("row"), found.rows)


class FoundAnchors(NamedTuple):
    """The numbers of images of a group, and the rows that are their anchors."""

    group: int
    numbers: Ints
    rows: Ints


def find_base_rows(
    batch: pa.RecordBatch, base: BaseSource, anchored: Mapping[int, AnchoredImages], rows: Flags
) -> Iterator[FoundAnchors]:
    """Find the anchors among `rows` of a base object's batch."""
    group = to_numpy(batch.column("group"))
    for run in runs(group):
        number = int(group[run.start])
        if number in anchored and number not in base.truncated and rows[run].any():
            chosen = np.flatnonzero(rows[run]) + run.start
            names = column_of(batch.column("key").take(to_arrow(chosen)))
            yield _found(anchored[number], names, chosen)


def _found(images: AnchoredImages, names: BytesColumn, rows: Ints) -> FoundAnchors:
    found = images.names.find(names)
    return FoundAnchors(images.group, found[found >= 0], rows[found >= 0])


class CompletedHashes(Struct):
    """Collects the hashes of completed images, by group."""

    _found: dict[int, list[tuple[Ints, Ints]]] = field(default_factory=dict)

    def add(self, images: pa.Table) -> None:
        """Add images (COMPLETED_SCHEMA) of a table."""
        if len(images):
            hashes = xxhash64(column_of(images["row"]), xxhash64(column_of(images["key"]))).view(np.int64)
            self.add_numbers(images["group"][0].as_py(), to_numpy(images["number"]), hashes)

    def add_numbers(self, group: int, numbers: Ints, hashes: Ints) -> None:
        """Add the numbers and the hashes of images of a table."""
        self._found.setdefault(group, []).append((numbers, hashes))

    def all(self) -> Completed:
        """Return all of them."""
        return {
            group: (np.concatenate([numbers for numbers, _ in found]), np.concatenate([hashes for _, hashes in found]))
            for group, found in self._found.items()
        }


class CompletionTask(Struct, frozen=True):
    """A segment with complete images, with which the `anchored` images are to be completed."""

    segment: SegmentSource
    anchored: OfTables
    store: OpensStore


class CompletionReport(Struct, frozen=True):
    """The images that were completed, or the problem with the segment."""

    completed: Completed = field(default_factory=dict)
    problem: ErrorReport | None = None


def hash_completed(task: CompletionTask) -> CompletionReport:
    """Complete images with those in a segment, and hash them: the work of a task."""
    found = CompletedHashes()
    try:
        for table in read_at_cut(task.store.open(), task.segment, SEGMENT_SCHEMA):
            for images in complete_changes(filter_effective(table, task.segment), task.anchored):
                found.add(images)
    except SnapshotError as error:
        return CompletionReport(problem=report_of(error))
    return CompletionReport(found.all())


def complete_changes(effective: pa.Table, anchored: Mapping[int, AnchoredImages]) -> Iterator[pa.Table]:
    """Yield the images (COMPLETED_SCHEMA) whose anchors are among a segment's changes that belong to the state."""
    group, op = to_numpy(effective["group"]), to_numpy(effective["op"])
    rows = np.flatnonzero(np.isin(group, list(anchored)) & np.isin(op, (INSERT, UPSERT)))
    rows = rows[np.argsort(group[rows], kind="stable")]
    for run in runs(group[rows]):
        chosen = rows[run]
        names = change_names(effective.select(["lsn", "seq", "key"]).take(to_arrow(chosen)))
        found = _found(anchored[int(group[chosen[0]])], names, chosen)
        yield from anchored[found.group].complete(found.numbers, effective["row"], found.rows)
