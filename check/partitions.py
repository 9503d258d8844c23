"""Hash the rows of every copy by partition: base rows in the tasks that read them, changed rows after the fold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from cutline.check.base_hashes import BaseHashReport, BaseHashTask, NodeBase, equal_bases, hash_base
from cutline.check.copies import Copies
from cutline.check.deleted_rows import note_missing
from cutline.check.hashing import Sums, combine_all, hash_aggregates, sums_of_table
from cutline.check.image_hashes import PartitionHashes, hash_local
from cutline.check.last_changes import read_reports
from cutline.check.new_part import NewPart
from cutline.check.report import Conflict, Findings
from cutline.check.reported_changes import Reported, hash_reported
from cutline.check.required_values import required_by_node
from cutline.check.sequence_values import KeyExtremes, fed_by_node, merge
from cutline.check.streams import StreamHashes
from cutline.check.table_forms import forms_of_shards
from cutline.columns.arrow_numbers import to_arrow
from cutline.columns.bytes_column import Flags, from_arrow, xxhash64
from cutline.columns.python_workers import map_batches
from cutline.fleet.progress import Progress
from cutline.snapshots.fold.anchored_images import OfTables
from cutline.snapshots.fold.changes import ENTRY
from cutline.snapshots.fold.fold import Fold, fold, fold_in_driver, long_image_reader
from cutline.snapshots.fold.long_lines import LongImageReader, order_by_place
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, BaseSources, Sources
from cutline.spark.sent_values import broadcast, sending
from cutline.spark.spark_jobs import Dealing, NodeShares, cores_of, run_many, shared_problem, stage_progress
from cutline.storage.errors import ErrorReport, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError, OpensStore

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

ENTRY_ROWS = f"node int, `group` int, partition int, key binary, lsn bigint, {ENTRY} bigint"
ENTRY_NAMES = ["node", "group", "partition", "key", "lsn", ENTRY]
# The combined hashes have columns `low` and `high`.
SMALLEST, LARGEST = "smallest_key", "largest_key"


def hash_partitions(
    session: SparkSession,
    copies: Copies,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    streams: StreamHashes,
    part: NewPart | None = None,
) -> PartitionHashes:
    """Fold the changes and hash every copy's rows; report unreadable objects as damage.

    Uses the reports of last changes in `streams` if they are complete; otherwise folds the segments. With `part`, only
    the rows of tables that were copied in it are hashed.
    """
    progress.step("fold changes", unit="tasks")
    part = part or NewPart(copies.chain)
    found = _fold_changes(session, copies, store, findings, progress, streams, part)
    with ExitStack() as stack:
        stack.callback(found.fold.release)
        for problem in found.fold.problems:
            findings.damage(problem)
        bases = _all_bases(copies, part, found.sources)
        progress.step("read base copies", total=len(bases), unit="objects")
        shares = _base_shares(copies, bases, progress)
        facts = _BaseFacts.of(copies, found, streams, lambda value: stack.enter_context(sending(session, value)))
        shards = {number: copies.shard[node] for number, node in enumerate(copies.nodes)}
        counts = copies.counts
        tasks = (
            facts.task_of(
                equal, shard := shards[equal[0].source.number], store, counts[shard], compares_all=copies.compares_all
            )
            for equal in equal_bases(bases, shards)
        )
        extremes = KeyExtremes()
        seen = {number: np.zeros(len(rows.hashes), np.bool_) for number, rows in streams.expected.items()}
        base = _hash_bases(session, tasks, findings, shares, extremes, seen, found.reported)
        note_missing(streams.expected, seen, copies, findings)
        changed = _hash_changed(found, copies, store, findings)
        merge(extremes, changed.extremes)
        return PartitionHashes(combine_all([base, changed.rows], 3), changed.versions, extremes)


def _hash_changed(found: _Folded, copies: Copies, store: StoreLocation, findings: Findings) -> PartitionHashes:
    """Hash the changed rows, once the base rows have been read; report rows that lack earlier images."""
    if (reported := found.reported) is not None:
        reported.end()
        for (number, group), count in reported.lacking.items():
            _note_lacking(number, group, count, copies, findings)
        return PartitionHashes(combine_all(reported.rows, 3), combine_all(reported.versions, 3), reported.extremes)
    if found.fold.local is not None:
        images = hash_local(found.fold.local, copies)
    elif found.fold.images is not None:
        images = hash_folded(found.fold.images, found.fold, copies, long_image_reader(found.sources, store))
    else:
        return PartitionHashes(combine_all([], 3), combine_all([], 3), KeyExtremes())
    _note_incomplete(images.rows, copies, findings)
    return images


class _BaseFacts(Struct, frozen=True):
    """What the tasks that read base copies need to know, as broadcasts: `forms` by shard, the others by node number.

    `changed`, `required`, `expected` and `awaited` lack nodes without such rows or columns. `fed` and `removed` are
    sent with each task.
    """

    forms: Mapping[str, Any]
    changed: Mapping[int, Any]
    required: Mapping[int, Any]
    expected: Mapping[int, Any]
    awaited: Mapping[int, Any]
    fed: Mapping[int, frozenset[int]]
    removed: Collection[int]

    @classmethod
    def of(cls, copies: Copies, found: _Folded, streams: StreamHashes, send: Callable[[Any], Any]) -> _BaseFacts:
        """Send the facts with `send`."""
        of_nodes: dict[int, OfTables] = {}
        for (number, group), awaited in found.reported.awaited.items() if found.reported else ():
            of_nodes.setdefault(number, {})[group] = awaited.images
        required = required_by_node(copies.nodes, copies.shard, copies.required)
        expected = {number: rows for number, rows in streams.expected.items() if len(rows.hashes)}
        return cls(
            forms_of_shards(copies.chain, set(copies.shard.values()), copies.own_types, send),
            {number: send(keys) for number, keys in found.fold.changed.items()},
            {number: send(places) for number, places in required.items()},
            {number: send(rows) for number, rows in expected.items()},
            {number: send(of_tables) for number, of_tables in of_nodes.items()},
            fed_by_node(copies),
            {number for number, _ in found.reported.removed} if found.reported else (),
        )

    def task_of(
        self, equal: Sequence[BaseSource], shard: str, store: StoreLocation, copies: int, *, compares_all: bool
    ) -> BaseHashTask:
        """Return the task that reads objects which are equal on some of the shard's copies."""
        return BaseHashTask(
            tuple(self._base_of(base, base.source.number) for base in equal),
            self.forms[shard],
            store,
            self.required.get(equal[0].source.number),
            is_compared=copies > 1 or compares_all,
            is_everywhere=len(equal) == copies and not compares_all,
            copies=copies,
        )

    def _base_of(self, base: BaseSource, number: int) -> NodeBase:
        return NodeBase(
            base,
            self.changed.get(number),
            self.fed.get(number, frozenset()),
            self.expected.get(number),
            number in self.removed,
            self.awaited.get(number),
        )


class _Folded(Struct, frozen=True):
    """The folded changes of the `sources`. `reported` is set if they were folded with the reports of tasks."""

    sources: Sources
    fold: Fold
    reported: Reported | None = None


def _fold_changes(
    session: SparkSession,
    copies: Copies,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    streams: StreamHashes,
    part: NewPart,
) -> _Folded:
    """Fold the changes with the reports of tasks if they suffice, otherwise by rows."""
    if streams.sources:
        sources = streams.sources.without(findings.damaged)
        reports = streams.last
    else:
        sources = _find_sources(copies, part, streams.store, findings)
        folded = fold_in_driver(sources, store, streams.held)
        if folded is not None:
            return _Folded(sources, folded)
        reports = read_reports(session, sources, store, copies.alone)
    with stage_progress(session, progress):
        reported = hash_reported(session, sources, copies, reports, store)
        # Free unused reports (those for damaged copies, or all if the segments are folded): they may take half a
        # gigabyte.
        reports.clear()
        if reported is not None:
            return _Folded(sources, Fold(None, reported.changed, [], []), reported)
        return _Folded(sources, fold(session, sources, store, hashed=True, held=streams.held))


def _find_sources(copies: Copies, part: NewPart, store: OpensStore, findings: Findings) -> Sources:
    try:
        return part.sources(copies.nodes, store.open(), skip=findings.damaged)
    except ObjectDamagedError as error:
        findings.damage(report_of(error))
        return Sources(tuple(copies.nodes), BaseSources(), (), frozenset(), {})


def _all_bases(copies: Copies, part: NewPart, sources: Sources) -> BaseSources:
    """Return the bases of all copies, including damaged copies, which are read so that all damage is reported."""
    folded = {bases.number for bases in sources.bases.nodes}
    unfolded = [part.bases(number, node) for number, node in enumerate(copies.nodes) if number not in folded]
    return BaseSources((*sources.bases.nodes, *unfolded))


def _base_shares(copies: Copies, bases: BaseSources, progress: Progress) -> NodeShares[BaseHashTask]:
    totals = {copies.nodes[node.number]: sum(part.size for part in node.parts) for node in bases.nodes}
    shares = NodeShares[BaseHashTask](progress, totals, lambda task: task.shares)
    shares.begin()
    return shares


def _hash_bases(
    session: SparkSession,
    tasks: Iterator[BaseHashTask],
    findings: Findings,
    shares: NodeShares[BaseHashTask],
    extremes: KeyExtremes,
    seen: Mapping[int, Flags],
    reported: Reported | None,
) -> Sums:
    """Return the combined hashes of all base rows, and add the keys of fed groups to `extremes`.

    Also flags the expected rows that are `seen`, by node number, and adds the rows that `reported` awaits.
    """
    sums = combine_all([], 3)
    # Of equal objects, only one is expanded.
    dealing = Dealing[BaseHashTask](lambda task: task.objects[0].base.source.size)
    for by_task in run_many(session, hash_base, tasks, shares, dealing, _problem_of_task):
        reports = [report for of_task in by_task for report in of_task]
        for report in reports:
            if report.problem is not None:
                findings.damage(report.problem)
            elif report.sums is not None:
                findings.count(objects=report.objects, size_bytes=report.bytes)
                if report.is_read_once:
                    findings.count(rows_read_once=report.rows)
                else:
                    findings.count(rows=report.rows)
                merge(extremes, report.extremes)
                if report.deleted is not None:
                    seen[report.number][report.deleted] = True
                if reported is not None:
                    reported.add_base(report.number, report.matches, report.completed)
        sums = combine_all([sums, *(report.sums for report in reports if report.sums is not None)], 3)
    return sums


def _problem_of_task(reports: Iterable[BaseHashReport]) -> ErrorReport | None:
    return next(filter(None, map(shared_problem, reports)), None)


def _note_incomplete(images: Sums, copies: Copies, findings: Findings) -> None:
    """Report rows whose earlier images are missing from the snapshot although every object of the copy is intact."""
    for (number, group, place), (count, *_) in images.as_dict().items():
        if group == PROBLEM:
            _note_lacking(number, place, count, copies, findings)


def _note_lacking(number: int, group: int, count: int, copies: Copies, findings: Findings) -> None:
    node = copies.nodes[number]
    if node in findings.damaged:
        return
    detail = f"the earlier images that are needed to apply the changes to {count:,} rows are missing from the snapshot"
    findings.conflict(Conflict("history", detail, node=node, group=copies.group_name(node, group)))
    findings.damaged.add(node)


def hash_folded(images: DataFrame, folded: Fold, copies: Copies, reader: LongImageReader) -> PartitionHashes:
    """Hash rows that Spark folded, and their versions."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    compared = _written_after_bases(copies)
    version = F.xxhash64("key", "lsn")
    keys = ["node", "group", "partition"]
    entries = images.select(*keys, "key", "lsn", F.coalesce(ENTRY, F.xxhash64("key", "row")).alias(ENTRY))
    if folded.long_images is not None:
        # Broadcast the reader: in the function's closure, the object lists of all nodes would be sent with every task.
        sent = broadcast(images.sparkSession, reader)

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from hash_images(batches, sent.value)

        entries = entries.unionByName(map_batches(order_by_place(folded.long_images, _divide), read, ENTRY_ROWS))
    places = [(number << 32) + group for number, fed in fed_by_node(copies).items() for group in fed]
    is_fed = (F.shiftleft(F.col("node").cast("bigint"), 32) + F.col("group")).isin(places)
    value = F.when(is_fed, F.expr("try_cast(string(key) AS bigint)"))
    table = (
        entries.groupBy(*keys)
        .agg(
            *hash_aggregates(F.col(ENTRY)),
            *hash_aggregates(version, "version_", compared),
            *([F.min(value).alias(SMALLEST), F.max(value).alias(LARGEST)] if places else []),
        )
        .toArrow()
    )
    extremes = KeyExtremes()
    # One row for each partition.
    for row in table.select([*keys, SMALLEST, LARGEST]).to_pylist() if places else ():
        if row[SMALLEST] is not None:
            merge(extremes, {(row["node"], row["group"]): (row[SMALLEST], row[LARGEST])})
    return PartitionHashes(sums_of_table(table, keys), sums_of_table(table, keys, "version_"), extremes)


def _divide(rows: DataFrame, by: str) -> DataFrame:
    return rows.repartition(cores_of(rows.sparkSession).now, by)


def hash_images(batches: Iterable[pa.RecordBatch], reader: LongImageReader) -> Iterator[pa.RecordBatch]:
    """Convert LONG_IMAGE_ROWS to ENTRY_ROWS, with the same hash that Spark computes for the other rows."""
    for batch in reader.read_images(batches):
        hashes = xxhash64(from_arrow(batch.column("row")), xxhash64(from_arrow(batch.column("key"))))
        columns = [batch.column(name) for name in ("node", "group", "partition", "key", "lsn")]
        yield pa.record_batch([*columns, to_arrow(hashes.view(np.int64))], names=ENTRY_NAMES)


def _written_after_bases(copies: Copies) -> Column:
    """Return the condition that a row was last written after its group was copied on all nodes of the shard."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    def numbers(values: Iterable[int]) -> Column:
        return F.create_map(*(F.lit(int(value)).cast("bigint") for value in values))

    since = numbers(value for number, node in enumerate(copies.nodes) for value in (number, copies.since(node)))[
        F.col("node")
    ]
    recopied = {
        (number << 32) + group: position
        for number, node in enumerate(copies.nodes)
        for group, position in copies.recopied_since(node).items()
    }
    if recopied:
        place = F.shiftleft(F.col("node").cast("bigint"), 32) + F.col("group")
        since = F.coalesce(numbers(value for entry in recopied.items() for value in entry)[place], since)
    return F.col("lsn") >= since
