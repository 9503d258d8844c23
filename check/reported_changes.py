"""Hash the rows that changes have produced, with the reports of the tasks that read the segments (last_changes.py)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from msgspec import Struct, field

from cutline.check.copies import Copies
from cutline.check.hashing import Sums, combine_hashes, combine_repeated
from cutline.check.image_hashes import hash_local
from cutline.check.last_changes import changes_by_node
from cutline.check.sequence_values import KeyExtremes, add_extremes, fed_by_node, keys_of, merge
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.progress import Silent
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.anchored_images import (
    AnchoredImages,
    Anchors,
    Completed,
    CompletionTask,
    hash_completed,
)
from cutline.snapshots.fold.changed_keys import Keys, exact_keys
from cutline.snapshots.fold.changes import ENTRY, MergedReports, in_base_tables, keys_size
from cutline.snapshots.fold.counted_lines import (
    LINE_NAMES,
    Matches,
    RemovedLines,
    added_by,
    are_contested,
    count_lines,
    deleted_keys,
    hash_lines,
    read_contested,
    removed_lines,
)
from cutline.snapshots.fold.sources import PROBLEM, Sources
from cutline.spark.spark_jobs import Dealing, run_tasks, shared_problem
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import DELETE, PARTIAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The number of rows hashed in one batch, small enough that the hash columns take little memory.
HASHED_AT_ONCE = 1 << 19
PLACES = ["node", "group", "partition"]


class AwaitedImages(Struct, frozen=True):
    """Images of a node's table that the readers of its base rows complete.

    `entries` are the hashes (ENTRY) of those that are complete, which `is_complete` flags.
    """

    node: int
    images: AnchoredImages
    entries: Ints
    is_complete: Flags

    @classmethod
    def of(cls, node: int, images: AnchoredImages) -> AwaitedImages:
        """Return images of which none is complete."""
        count = len(images.images)
        return cls(node, images, np.zeros(count, np.int64), np.zeros(count, np.bool_))

    def add(self, numbers: Ints, hashes: Ints) -> None:
        """Add images that were completed, by their numbers."""
        self.entries[numbers], self.is_complete[numbers] = hashes, True

    @property
    def lacking(self) -> int:
        """How many images no base row has completed."""
        return int((~self.is_complete).sum())

    def table(self) -> pa.Table:
        """Return the complete images with their ENTRY."""
        images = self.images.images.drop_columns(["row"]).append_column(ENTRY, to_arrow(self.entries))
        for name, value in (("node", self.node), ("group", self.images.group)):
            images = images.append_column(name, to_arrow(np.full(len(images), value, np.int32)))
        return images.filter(to_mask(self.is_complete))


class Reported(Struct):
    """The results of the reports of changes: combined hashes by node (PartitionHashes), and `Fold.changed`.

    `removed` are the lines to remove from the base rows, and `awaited` the images that base rows complete, by node
    number and group. `lacking` counts the images that can't be completed, by the same.
    """

    copies: Copies
    rows: list[Sums] = field(default_factory=list)
    versions: list[Sums] = field(default_factory=list)
    changed: dict[int, dict[int, Keys]] = field(default_factory=dict)
    extremes: KeyExtremes = field(default_factory=dict)
    removed: dict[tuple[int, int], RemovedLines] = field(default_factory=dict)
    awaited: dict[tuple[int, int], AwaitedImages] = field(default_factory=dict)
    lacking: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_images(self, images: pa.Table) -> None:
        """Hash images of a node, which have an ENTRY or a row."""
        for start in range(0, len(images), HASHED_AT_ONCE):
            hashes = hash_local(images.slice(start, HASHED_AT_ONCE), self.copies)
            self.rows.append(hashes.rows)
            self.versions.append(hashes.versions)
            merge(self.extremes, hashes.extremes)

    def add_keys(self, changes: pa.Table, number: int) -> None:
        """Add the smallest and largest keys of a node whose rows are not compared."""
        fed = fed_by_node(self.copies)
        for start in range(0, len(changes) if number in fed else 0, HASHED_AT_ONCE):
            some = changes.slice(start, HASHED_AT_ONCE)
            add_extremes(self.extremes, number, to_numpy(some["group"]), keys_of(some), fed[number])

    def add_base(self, number: int, matches: Matches, completed: Completed) -> None:
        """Add the matches of removed lines, and the completed images, of a node's base object."""
        for group, found in matches.items():
            self.removed[number, group].add(*found)
        for group, made in completed.items():
            self.awaited[number, group].add(*made)

    def end(self) -> None:
        """Hash the base rows that remain after removed lines, and the completed images; count missing rows."""
        for (number, group), lines in self.removed.items():
            if number not in self.copies.alone:
                self.rows.append(_hash_left(lines))
            self.note_lacking(number, group, int((lines.left < 0).sum()))
        for (number, group), images in self.awaited.items():
            if number not in self.copies.alone:
                self.add_images(images.table())
            self.note_lacking(number, group, images.lacking)

    def note_lacking(self, number: int, group: int, count: int) -> None:
        """Count images of a table that can't be completed."""
        if count:
            self.lacking[number, group] = self.lacking.get((number, group), 0) + count


def hash_reported(
    session: SparkSession,
    sources: Sources,
    copies: Copies,
    reports: MutableMapping[str, bytes | None],
    store: StoreLocation,
) -> Reported | None:
    """Hash the rows that the tasks reported after reading segments; return None if Spark has to fold the changes.

    Removes the entries of `reports` that it uses. Reads segments again if lines of a table without a key were deleted,
    or if they have the values that later images lack.
    """
    reported, held_bytes = Reported(copies), 0
    for changes in changes_by_node(sources, reports):
        if changes is None or (keys := _changed_keys(session, sources, changes, store, reported)) is None:
            return None
        # The driver holds the keys of all nodes, and so does a worker that has read objects from every node.
        held_bytes += keys_size(keys) + changes.anchors.size_bytes
        if held_bytes > limits.CHOSEN_KEYS_BYTES_MAX:
            return None
        reported.changed |= exact_keys(keys).keys
        if not _hash_anchored(session, sources, changes.anchors, store, reported):
            return None
        last = changes.last.filter(to_mask(to_numpy(changes.last["op"]) != DELETE))
        del changes
        number = last["node"][0].as_py() if len(last) else None
        if number in copies.alone:
            reported.add_keys(last, number)
        else:
            reported.add_images(last.filter(to_mask(to_numpy(last["op"]) != PARTIAL)))
    return reported


def _changed_keys(
    session: SparkSession, sources: Sources, changes: MergedReports, store: StoreLocation, reported: Reported
) -> pa.Table | None:
    """Return the keys of a node's base rows that changed, and the lines to remove from the base rows.

    Hashes the lines that were added. Returns None in the cases of `_hash_lines`.
    """
    keys = in_base_tables(changes.last.select(["node", "group", "key", "op"]), sources)
    if len(changes.lines) == 0:
        return keys
    removed = _hash_lines(session, sources, changes.lines, store, reported)
    return None if removed is None else pa.concat_tables([keys, removed])


def _hash_anchored(
    session: SparkSession, sources: Sources, anchors: Anchors, store: StoreLocation, reported: Reported
) -> bool:
    """Hash a node's images that lacked values, except those that base rows complete: those are awaited.

    Returns whether all segments with the values could be read again.
    """
    copies = reported.copies
    is_lost = to_numpy(anchors.images["group"]) == PROBLEM
    lost = anchors.images.filter(to_mask(is_lost))
    # The group of such an image is in the place of the partition.
    places = np.stack([to_numpy(lost[name]).astype(np.int64) for name in ("node", "partition")], axis=1)
    for (number, group), count in zip(*(part.tolist() for part in np.unique(places, axis=0, return_counts=True)),
                                      strict=True):  # fmt: skip
        reported.note_lacking(number, group, count)
    for number, of_tables in anchors.in_bases.items():
        reported.awaited |= {(number, group): AwaitedImages.of(number, images) for group, images in of_tables.items()}
    compared = {place for place in anchors.in_segments if sources.segments[place].source.number not in copies.alone}
    tasks = [CompletionTask(sources.segments[place], anchors.in_segments[place], store) for place in sorted(compared)]
    dealing = Dealing[CompletionTask](lambda task: task.segment.source.size)
    reports = run_tasks(session, hash_completed, tasks, Silent(), dealing, problem_of=shared_problem)
    if any(report.problem for report in reports):
        return False
    for task, report in zip(tasks, reports, strict=True):
        for images in task.anchored.values():
            awaited = AwaitedImages.of(task.segment.source.number, images)
            if (made := report.completed.get(images.group)) is not None:
                awaited.add(*made)
            if awaited.lacking:
                return False
            reported.add_images(awaited.table())
    own = anchors.images.filter(to_mask(~is_lost))
    if len(own) and own["node"][0].as_py() not in copies.alone:
        reported.add_images(own)
    return True


def _hash_lines(
    session: SparkSession, sources: Sources, lines: pa.Table, store: StoreLocation, reported: Reported
) -> pa.Table | None:
    """Hash the lines that a node's changes add to tables without a key; return the lines to remove from the base rows.

    Returns None if the driver can't hold the lines that were deleted, or if a segment can't be read again.
    """
    number = lines["node"][0].as_py()
    are_open = are_contested(to_numpy(lines["op"]), to_numpy(lines[ENTRY]))
    added = lines.filter(to_mask(~are_open)) if are_open.any() else lines
    sums = [combine_hashes(_places_of(added), to_numpy(added[ENTRY]).view(np.uint64))]
    removed: list[RemovedLines] = []
    if are_open.any():
        segment = to_numpy(lines["segment"])[are_open]
        counts = dict(zip(*(column.tolist() for column in np.unique(segment, return_counts=True)), strict=True))
        some = {one: sources.segments[one] for one in counts}
        hashes = to_numpy(lines[ENTRY])[are_open]
        contested = read_contested(session, some, counts, hashes, sources.multisets, store)
        if contested is None or contested.problems:
            return None
        counted = count_lines(contested.changes.select(LINE_NAMES), added_by(to_numpy(contested.changes["op"])))
        removed = removed_lines(counted)
        sums.append(_hash_repeated(counted.rows_with(counted.net > 0), counted.net[counted.net > 0]))
    reported.removed |= {(number, one.group): one for one in removed}
    if number not in reported.copies.alone:
        reported.rows += sums
    return deleted_keys(removed)


def _hash_left(removed: RemovedLines) -> Sums:
    """Hash the base rows that are left of the removed lines."""
    is_left = removed.left > 0
    return _hash_repeated(removed.rows_with(is_left), removed.left[is_left])


def _hash_repeated(lines: pa.Table, counts: Ints) -> Sums:
    return combine_repeated(_places_of(lines), hash_lines(lines["row"]).view(np.uint64), counts)


def _places_of(rows: pa.Table) -> Ints:
    return np.stack([to_numpy(rows[name]).astype(np.int64) for name in PLACES], axis=1)
