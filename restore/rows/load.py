"""Load rows: what a task of the load jobs does in an executor.

A task loads its rows and enters them in the ledger of each database in one transaction. So Spark may repeat a task any
number of times: a task that is in a database's ledger loads nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_mask
from cutline.columns.arrow_streams import from_stream
from cutline.restore.rows.ledger import LoadError
from cutline.restore.rows.load_target import Feed
from cutline.restore.rows.loaders import loading
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.base_rows import find_valid_rows
from cutline.snapshots.fold.by_segment import unpack_flags
from cutline.snapshots.fold.changed_keys import Keys
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, SegmentSource, filter_effective, problem_of, read_at_cut
from cutline.storage.errors import ErrorReport, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segment_schema import SEGMENT_SCHEMA


@dataclass(frozen=True, slots=True)
class BaseLoadTask:
    """A base object to load; `changed` broadcasts the node's changed keys by group: their base rows don't hold.

    `alone` are the groups of which nothing but this object has rows.
    """

    base: BaseSource
    feed: Feed
    changed: Any
    store: StoreLocation
    alone: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        """The bytes of its object."""
        return self.base.source.size

    @property
    def nodes(self) -> set[str]:
        """The targets that it has sessions on."""
        return self.feed.nodes


@dataclass(frozen=True, slots=True)
class ImageLoadTask:
    """Images of one source that the driver has folded: an Arrow stream of group, row and key."""

    name: str
    stream: bytes
    source: int
    feed: Feed

    @property
    def size(self) -> int:
        """The bytes of its images."""
        return len(self.stream)

    @property
    def nodes(self) -> set[str]:
        """The targets that it has sessions on."""
        return self.feed.nodes


@dataclass(frozen=True, slots=True)
class SegmentLoadTask:
    """A segment to load: of its changes that belong to the state those whose flag in `chosen` is set."""

    segment: SegmentSource
    feed: Feed
    chosen: bytes
    store: StoreLocation

    @property
    def size(self) -> int:
        """The bytes of its object."""
        return self.segment.source.size

    @property
    def nodes(self) -> set[str]:
        """The targets that it has sessions on."""
        return self.feed.nodes


LoadTask: TypeAlias = BaseLoadTask | ImageLoadTask | SegmentLoadTask


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How many rows a task has placed on each target, by its number, or the error that ended it."""

    placed: Mapping[int, int] = field(default_factory=dict)
    problem: ErrorReport | None = None


def load_task(task: LoadTask) -> LoadReport:
    """Load the rows of a task."""
    try:
        match task:
            case BaseLoadTask():
                return _load_base(task)
            case SegmentLoadTask():
                return _load_segment(task)
            case ImageLoadTask():
                return _load_images(from_stream(task.stream).to_batches(), {task.source: task.feed}, task.name)
    except SnapshotError as error:
        return LoadReport(problem=report_of(error))


def _load_base(task: BaseLoadTask) -> LoadReport:
    tables = read_at_cut(task.store.open(), task.base, BASE_SCHEMA)
    changed: Mapping[int, Keys] = task.changed.value if task.changed is not None else {}
    number = task.base.source.number
    with loading({number: task.feed}, task.base.source.key, task.alone) as loaders:
        for batch in (batch for table in tables for batch in table.to_batches()):
            holds = find_valid_rows(batch, task.base, changed)
            loaders.add(number, batch if holds.all() else batch.filter(pa.array(holds)))
    return LoadReport(loaders.placed)


def _load_segment(task: SegmentLoadTask) -> LoadReport:
    source, seen = task.segment.source, 0
    with loading({source.number: task.feed}, source.key) as loaders:
        for table in read_at_cut(task.store.open(), task.segment, SEGMENT_SCHEMA):
            effective = filter_effective(table, task.segment).select(["group", "row", "key"])
            flags = unpack_flags(task.chosen, seen, len(effective))
            seen += len(effective)
            # A row may have 1 GB: it is not copied, and not held while the next one is read.
            chosen = effective if flags.all() else effective.filter(to_mask(flags))
            del table, effective
            for batch in chosen.to_batches():
                loaders.add(source.number, batch)
    return LoadReport(loaders.placed)


def load_images(batches: Iterator[pa.RecordBatch], feeds: Mapping[int, Feed], task: str) -> Iterator[pa.RecordBatch]:
    """Load one Spark partition of folded rows (node, group, row, key); yield its report as one LOADED_ROWS row.

    `task` is its name in the ledgers, and `feeds` are by node.
    """
    try:
        report = _load_images(batches, feeds, task)
    except SnapshotError as error:
        report = LoadReport(problem=report_of(error))
    yield report_batch(report)


def _load_images(batches: Iterable[pa.RecordBatch], feeds: Mapping[int, Feed], task: str) -> LoadReport:
    with loading(feeds, task) as loaders:
        for batch in batches:
            _check_whole(batch, feeds)
            node = np.asarray(batch.column("node").to_numpy())
            for number in np.unique(node):
                chosen = batch if (node == number).all() else batch.filter(pa.array(node == number))
                loaders.add(int(number), chosen)
    return LoadReport(loaders.placed)


def _check_whole(batch: pa.RecordBatch, feeds: Mapping[int, Feed]) -> None:
    lacking = np.flatnonzero(np.asarray(batch.column("group").to_numpy()) == PROBLEM)
    if len(lacking):
        if report := problem_of(batch.column("row")[int(lacking[0])].as_py()):
            raise error_of(report)
        feed = feeds[batch.column("node")[int(lacking[0])].as_py()]
        node = feed.routes.source if feed.routes else next(iter(feed.targets.values())).node.id
        key = batch.column("key")[int(lacking[0])].as_py()
        raise LoadError(
            f"node {node}: the row with key {key!r} can't be completed: the snapshot lacks an earlier image of it",
            hint="run: snapshot check   to see what is missing",
            details={"node": node},
        )


def report_batch(report: LoadReport) -> pa.RecordBatch:
    """The report as one LOADED_ROWS row: the rows placed on each target, and the error, as JSON."""
    problem = json.dumps(report.problem) if report.problem else None
    columns = [pa.array([json.dumps(report.placed)], pa.string()), pa.array([problem], pa.string())]
    return pa.record_batch(columns, names=["placed", "problem"])
