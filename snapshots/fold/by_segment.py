"""Folding by segment: which changes of each segment are the last of their keys.

Only keys and positions are compared. The rows stay in the segments, where the tasks that load them read them again, so
that transactions of gigabytes are never shuffled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.arrow_streams import from_stream, to_stream
from cutline.columns.bytes_column import Flags, column_of, runs
from cutline.fleet.progress import Silent
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changed_keys import BYTES_PER_KEY
from cutline.snapshots.fold.find_sources import Sources
from cutline.snapshots.fold.local import last_changes
from cutline.snapshots.fold.sources import SegmentSource, filter_effective, read_at_cut
from cutline.snapshots.fold.superseding import last_of_every_key
from cutline.snapshots.tasks.spark_jobs import Dealing, run_tasks
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segment_schema import DELETE, SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Of all segments together, and of each at least.
REPORTED_BYTES_MAX, REPORTED_BYTES_MIN = 512 << 20, 1 << 14
COMPARED = ["group", "key", "lsn", "seq", "op"]
# `index` is the change's place among the segment's changes that belong to the state.
LAST_SCHEMA = pa.schema([*(SEGMENT_SCHEMA.field(name) for name in COMPARED), pa.field("index", pa.int64())])


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """A segment to read; rows of groups in `multisets` have no key. More than `bytes_max` of keys are not reported."""

    segment: SegmentSource
    multisets: frozenset[int]
    bytes_max: int
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """The last changes of the segment's keys (LAST_SCHEMA, an Arrow stream), or an error.

    None if the keys are too many, or some changes have none.
    """

    last: bytes | None = None
    problem: ErrorReport | None = None


@dataclass(frozen=True, slots=True)
class SegmentImages:
    """Which of a segment's changes that belong to the state are images: a bit for each; and their groups."""

    flags: bytes
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class ChosenChanges:
    """The last change of every key (node, group, key, op) of tables with base rows, and by segment the images.

    A segment is named by its object.
    """

    last: pa.Table
    images: Mapping[str, SegmentImages]
    problems: list[ErrorReport]


def choose_changes(spark: SparkSession, sources: Sources, store: StoreLocation) -> ChosenChanges | None:
    """Choose the changes that produce the state; None if that needs their rows, or more memory than the driver has.

    It needs them for groups without a key and for partial images.
    """
    fewest = limits.CHANGES_PER_SEGMENT * len(sources.segments)
    if sources.has_partials or not fewest <= sources.changes <= limits.CHOSEN_CHANGES_MAX:
        return None
    # The largest first.
    segments = sorted(sources.segments, key=lambda one: -one.source.size)
    if (shares := reported_shares(segments)) is None:
        return None
    tasks = [SegmentTask(one, sources.multisets, share, store) for one, share in zip(segments, shares, strict=True)]
    reports = run_tasks(spark, find_last_changes, tasks, Silent(), Dealing(lambda task: task.segment.source.size))
    problems = [report.problem for report in reports if report.problem]
    if problems:
        return ChosenChanges(LAST_SCHEMA.append(pa.field("node", pa.int32())).empty_table(), {}, problems)
    tables: list[pa.Table] = []
    for number, (one, report) in enumerate(zip(segments, reports, strict=True)):
        if report.last is None:
            return None
        found = from_stream(report.last)
        for name, value in (("segment", number), ("node", one.source.number)):
            found = found.append_column(name, to_arrow(np.full(len(found), value, np.int32)))
        tables.append(found)
    last = last_changes(pa.concat_tables(tables))
    if last is None:
        return None
    in_base = in_base_tables(last, sources)
    if keys_size(in_base) > limits.CHOSEN_KEYS_BYTES_MAX:
        return None
    return ChosenChanges(in_base, _images_by_segment(last, segments), [])


def reported_shares(segments: Sequence[SegmentSource]) -> list[int] | None:
    """How many bytes of keys may be reported of each segment: REPORTED_BYTES_MAX, shared by the number of changes.

    None if they are too many for each to have REPORTED_BYTES_MIN.
    """
    shared = REPORTED_BYTES_MAX - REPORTED_BYTES_MIN * len(segments)
    if shared < 0:
        return None
    changes = max(sum(one.segment.changes for one in segments), 1)
    return [REPORTED_BYTES_MIN + shared * one.segment.changes // changes for one in segments]


def keys_size(changes: pa.Table) -> int:
    """The bytes of the changes' keys where tasks look them up."""
    size: int = changes["key"].nbytes + len(changes) * BYTES_PER_KEY
    return size


def in_base_tables(changes: pa.Table, sources: Sources) -> pa.Table:
    """The changes of tables that have rows in the base copies."""
    node, group = to_numpy(changes["node"]), to_numpy(changes["group"])
    has_rows = np.zeros(len(changes), np.bool_)
    for number in np.unique(node).tolist():
        has_rows |= (node == number) & np.isin(group, list(sources.bases.groups_of(number)))
    return changes.filter(to_mask(has_rows))


def find_last_changes(task: SegmentTask) -> SegmentReport:
    """Find the last changes of the segment's keys; what a Spark task does."""
    one, seen, tables = task.segment, 0, [LAST_SCHEMA.empty_table()]
    try:
        for table in read_at_cut(task.store.open(), one, SEGMENT_SCHEMA):
            effective = filter_effective(table, one).select(COMPARED)
            if np.isin(to_numpy(effective["group"]), list(task.multisets)).any():
                return SegmentReport()
            index = to_arrow(np.arange(seen, seen + len(effective)))
            tables.append(effective.append_column(LAST_SCHEMA.field("index"), index).cast(LAST_SCHEMA))
            seen += len(effective)
    except SnapshotError as error:
        return SegmentReport(problem=report_of(error))
    found = pa.concat_tables(tables)
    if found.nbytes > task.bytes_max:
        return SegmentReport()
    group, lsn, seq = (to_numpy(found[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
    last = found.filter(to_mask(last_of_every_key(group, column_of(found["key"]), lsn, seq)))
    return SegmentReport(to_stream(last))


def _images_by_segment(last: pa.Table, segments: list[SegmentSource]) -> dict[str, SegmentImages]:
    segment, index, group = (to_numpy(last[name]) for name in ("segment", "index", "group"))
    is_image = to_numpy(last["op"]) != DELETE
    order = np.flatnonzero(is_image)
    order = order[np.argsort(segment[order], kind="stable")]
    images: dict[str, SegmentImages] = {}
    for rows in (order[one] for one in runs(segment[order])):
        wanted = np.zeros(int(index[rows].max()) + 1, np.bool_)
        wanted[index[rows]] = True
        groups = frozenset(np.unique(group[rows]).tolist())
        name = segments[int(segment[rows[0]])].source.key
        images[name] = SegmentImages(np.packbits(wanted).tobytes(), groups)
    return images


def unpack_flags(flags: bytes, first: int, count: int) -> Flags:
    """The flags of `count` changes from number `first` on; those beyond the end are not set."""
    packed = np.frombuffer(flags, np.uint8)[first // 8 : (first + count + 7) // 8]
    found = np.unpackbits(packed)[first % 8 :][:count].astype(np.bool_)
    return np.concatenate([found, np.zeros(count - len(found), np.bool_)])
