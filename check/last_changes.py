"""Find the last change of every key in the tasks that read segments, so that Spark need not fold the changes.

For every key that its segment changes, a task reports the last change that belongs to the state, with a hash instead of
the row; in groups without a key, it reports all changes. The driver compares keys and positions, counts lines, merges
partial images, and gets the same result as a fold. Spark folds the changes if the reports are larger than the driver
should hold.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec import Struct, field

from cutline.columns.row_batches import to_stream
from cutline.fleet.progress import Silent
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
from cutline.snapshots.fold.sources import SegmentSource, Sources, converted_to_cut, read_tables
from cutline.spark.spark_jobs import Dealing, run_tasks, shared_problem
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import SEGMENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPORTED_SCHEMA = pa.schema(
    [
        *(CHANGE_SCHEMA.field(name) for name in ("group", "partition", "key", "lsn", "seq", "op", "row")),
        (ENTRY, pa.int64()),
    ]
)


class LastTask(Struct, frozen=True):
    """A request for the last changes in a segment, unless they take more than `bytes_max`."""

    segment: SegmentSource
    form: ChangeForm
    bytes_max: int


class LastChanges(Struct):
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


class ReportTask(Struct, frozen=True):
    """A request for the last changes in a segment alone."""

    last: LastTask
    store: StoreLocation


class ReportedChanges(Struct, frozen=True):
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
