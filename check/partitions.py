"""Hash the rows of every copy by partition: base rows in the tasks that read them, changed rows after the fold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cutline.check.base_hashes import BaseHashReport, BaseHashTask, NodeBase, equal_bases, hash_base
from cutline.check.copies import Copies
from cutline.check.deleted_rows import note_missing
from cutline.check.hashing import Sums, combine_all, combine_hashes, combine_repeated, hash_aggregates, sums_of_table
from cutline.check.new_part import NewPart
from cutline.check.report import Conflict, Findings
from cutline.check.required_values import required_by_node
from cutline.check.sequence_values import KeyExtremes, add_extremes, fed_by_node, keys_of, merge
from cutline.check.streams import StreamHashes, changes_by_node
from cutline.check.table_forms import forms_of_shards
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, from_arrow, xxhash64
from cutline.columns.python_workers import map_batches
from cutline.fleet.progress import Progress
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changed_keys import Keys, exact_keys
from cutline.snapshots.fold.changes import ENTRY, in_base_tables, keys_size
from cutline.snapshots.fold.counted_lines import (
    LINE_NAMES,
    RemovedLines,
    added_by,
    are_contested,
    count_lines,
    deleted_keys,
    hash_line,
    read_contested,
    removed_lines,
)
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader
from cutline.snapshots.fold.long_lines import LongImageReader, order_by_place
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, BaseSources, Sources
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import Dealing, NodeShares, cores_of, run_many, shared_problem, stage_progress
from cutline.storage.errors import ErrorReport, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError, OpensStore
from cutline.wal.segments.segments import DELETE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# The number of rows hashed in one batch, small enough that the hash columns take little memory.
HASHED_AT_ONCE = 1 << 19
ENTRY_ROWS = f"node int, `group` int, partition int, key binary, lsn bigint, {ENTRY} bigint"
PLACES = ["node", "group", "partition"]
ENTRY_NAMES = ["node", "group", "partition", "key", "lsn", ENTRY]
# The combined hashes have columns `low` and `high`.
SMALLEST, LARGEST = "smallest_key", "largest_key"


@dataclass(frozen=True, slots=True)
class PartitionHashes:
    """Combined hashes of rows and of row versions, keyed by (node number, group, partition).

    A row's version is the commit position of its last writer. It is known only for rows written after all base copies
    were taken. `extremes` are the smallest and largest keys of the groups in `Copies.fed`.
    """

    rows: Sums
    versions: Sums
    extremes: KeyExtremes = field(default_factory=dict)

    @classmethod
    def none(cls) -> PartitionHashes:
        """Return the hashes of no rows."""
        return cls(combine_all([], 3), combine_all([], 3))


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
    reported: Reported | None = None
    if streams.sources:
        sources = streams.sources.without(findings.damaged)
        reported = hash_reported(session, sources, copies, streams.last, store)
        # Free unused reports (those for damaged copies, or all if the segments are folded): they may take half a
        # gigabyte.
        streams.last.clear()
        with stage_progress(session, progress):
            folded = Fold(None, reported.changed, [], []) if reported else fold(session, sources, store, hashed=True)
    else:
        sources = _find_sources(copies, part, streams.store, findings)
        with stage_progress(session, progress):
            folded = fold(session, sources, store, hashed=True, held=streams.held)
    changed: dict[int, Any] = {}
    forms: dict[str, Any] = {}
    required: dict[int, Any] = {}
    expected: dict[int, Any] = {}
    try:
        for problem in folded.problems:
            findings.damage(problem)
        changed |= {number: broadcast(session, found) for number, found in folded.changed.items()}
        forms |= forms_of_shards(
            copies.chain, set(copies.shard.values()), copies.own_types, lambda found: broadcast(session, found)
        )
        bases = _all_bases(copies, part, sources)
        progress.step("read base copies", total=len(bases), unit="objects")
        shares = _base_shares(copies, bases, progress)
        extremes, fed = KeyExtremes(), fed_by_node(copies)
        required |= {
            number: broadcast(session, places)
            for number, places in required_by_node(copies.nodes, copies.shard, copies.required).items()
        }
        expected |= {number: broadcast(session, rows) for number, rows in streams.expected.items() if len(rows.hashes)}
        shards, counts = {number: copies.shard[node] for number, node in enumerate(copies.nodes)}, copies.counts

        def hash_task(equal: Sequence[BaseSource]) -> BaseHashTask:
            number = equal[0].source.number
            shard, objects = (
                shards[number],
                [
                    NodeBase(base, changed.get(of), fed.get(of, frozenset()), expected.get(of), of in removed)
                    for base, of in ((base, base.source.number) for base in equal)
                ],
            )
            return BaseHashTask(
                tuple(objects),
                forms[shard],
                store,
                required.get(number),
                is_compared=counts[shard] > 1,
                is_everywhere=len(objects) == counts[shard],
            )

        removed = reported.removed if reported else {}
        tasks = map(hash_task, equal_bases(bases, shards))
        seen = {number: np.zeros(len(rows.hashes), np.bool_) for number, rows in streams.expected.items()}
        base = _hash_bases(session, tasks, findings, shares, extremes, seen, removed)
        note_missing(streams.expected, seen, copies, findings)
        if reported:
            for of_node in removed.values():
                reported.rows += [_hash_left(one) for one in of_node]
                _note_lines(of_node, copies, findings)
            merge(extremes, reported.extremes)
            return PartitionHashes(combine_all([base, *reported.rows], 3), combine_all(reported.versions, 3), extremes)
        if folded.local is not None:
            images = hash_local(folded.local, copies)
        elif folded.images is not None:
            images = hash_folded(folded.images, folded, copies, long_image_reader(sources, store))
        else:
            return PartitionHashes(base, combine_all([], 3), extremes)
        _note_incomplete(images.rows, copies, findings)
        merge(extremes, images.extremes)
        return PartitionHashes(combine_all([base, images.rows], 3), images.versions, extremes)
    finally:
        folded.release()
        for sent in (*changed.values(), *forms.values(), *required.values(), *expected.values()):
            sent.unpersist()


@dataclass(slots=True)
class Reported:
    """The results of the reports of changes: combined hashes by node (PartitionHashes), and `Fold.changed`.

    `removed` are the lines that base rows have to lose, by node number.
    """

    rows: list[Sums] = field(default_factory=list)
    versions: list[Sums] = field(default_factory=list)
    changed: dict[int, dict[int, Keys]] = field(default_factory=dict)
    extremes: KeyExtremes = field(default_factory=dict)
    removed: dict[int, list[RemovedLines]] = field(default_factory=dict)


def hash_reported(
    session: SparkSession,
    sources: Sources,
    copies: Copies,
    reports: MutableMapping[str, bytes | None],
    store: StoreLocation,
) -> Reported | None:
    """Hash the rows that the tasks reported after reading segments; return None if Spark has to fold the changes.

    Removes the entries of `reports` that it uses. Reads segments again if lines of a table without a key were deleted.
    """
    reported, keys_bytes, alone, fed = Reported(), 0, copies.alone, fed_by_node(copies)
    for changes in changes_by_node(sources, reports):
        if changes is None:
            return None
        last, lines = changes
        in_base = in_base_tables(last.select(["node", "group", "key", "op"]), sources)
        if len(lines):
            removed = _hash_lines(session, sources, lines, copies, store, reported)
            if removed is None:
                return None
            in_base = pa.concat_tables([in_base, removed])
        # The driver holds the keys of all nodes, and so does a worker that has read objects from every node.
        keys_bytes += keys_size(in_base)
        if keys_bytes > limits.CHOSEN_KEYS_BYTES_MAX:
            return None
        reported.changed |= exact_keys(in_base).keys
        number = last["node"][0].as_py() if len(last) else None
        if number in alone and number not in fed:
            continue
        rows = last.filter(to_mask(to_numpy(last["op"]) != DELETE))
        del in_base, last, lines, changes
        for start in range(0, len(rows), HASHED_AT_ONCE):
            some = rows.slice(start, HASHED_AT_ONCE)
            if number in alone:
                add_extremes(reported.extremes, number, to_numpy(some["group"]), keys_of(some), fed[number])
                continue
            hashes = hash_local(some, copies)
            reported.rows.append(hashes.rows)
            reported.versions.append(hashes.versions)
            merge(reported.extremes, hashes.extremes)
    return reported


def _hash_lines(
    session: SparkSession, sources: Sources, lines: pa.Table, copies: Copies, store: StoreLocation, reported: Reported
) -> pa.Table | None:
    """Hash the lines that a node's changes add to tables without a key; return the lines that base rows have to lose.

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
    if removed:
        reported.removed[number] = removed
    if number not in copies.alone:
        reported.rows += sums
    return deleted_keys(removed)


def _hash_left(removed: RemovedLines) -> Sums:
    """Hash the base rows that are left of the removed lines."""
    is_left = removed.left > 0
    return _hash_repeated(removed.rows_with(is_left), removed.left[is_left])


def _hash_repeated(lines: pa.Table, counts: Ints) -> Sums:
    return combine_repeated(_places_of(lines), hash_line(lines["row"]).view(np.uint64), counts)


def _places_of(rows: pa.Table) -> Ints:
    return np.stack([to_numpy(rows[name]).astype(np.int64) for name in PLACES], axis=1)


def _note_lines(removed: Iterable[RemovedLines], copies: Copies, findings: Findings) -> None:
    """Report the tables without a key from which rows are deleted that were never there."""
    for one in removed:
        node, count = copies.nodes[one.node], int((one.left < 0).sum())
        if count and node not in findings.damaged:
            _note_lacking(node, copies.group_name(node, one.group), count, findings)


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
    removed: Mapping[int, Sequence[RemovedLines]],
) -> Sums:
    """Return the combined hashes of all base rows, and add the keys of fed groups to `extremes`.

    Also flags the expected rows that are `seen`, and counts the rows with `removed` lines, both by node number.
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
                findings.count(objects=1, size_bytes=report.bytes, rows=report.rows)
                merge(extremes, report.extremes)
                if report.deleted is not None:
                    seen[report.number][report.deleted] = True
                for one in removed.get(report.number, ()):
                    one.add(report.matches)
        sums = combine_all([sums, *(report.sums for report in reports if report.sums is not None)], 3)
    return sums


def _problem_of_task(reports: Iterable[BaseHashReport]) -> ErrorReport | None:
    return next(filter(None, map(shared_problem, reports)), None)


def _note_incomplete(images: Sums, copies: Copies, findings: Findings) -> None:
    """Report rows whose earlier images are missing from the snapshot although every object of the copy is intact."""
    for (number, group, place), (count, *_) in images.as_dict().items():
        node = copies.nodes[number]
        if group == PROBLEM and node not in findings.damaged:
            name = copies.group_name(node, place)
            _note_lacking(node, name, count, findings)


def _note_lacking(node: str, group: str | None, count: int, findings: Findings) -> None:
    detail = f"the earlier images that are needed to apply the changes to {count:,} rows are missing from the snapshot"
    findings.conflict(Conflict("history", detail, node=node, group=group))
    findings.damaged.add(node)


def hash_local(images: pa.Table, copies: Copies) -> PartitionHashes:
    """Hash rows that the driver folded, and their versions; the hashes are those of `hash_folded`."""
    numbers = ("node", "group", "partition", "lsn")
    node, group, partition, lsn = (to_numpy(images[name]).astype(np.int64) for name in numbers)
    hashed = xxhash64(column_of(images["key"]))
    has_entries = ENTRY in images.column_names
    entries = to_numpy(images[ENTRY]).view(np.uint64) if has_entries else xxhash64(column_of(images["row"]), hashed)
    positions = BytesColumn(np.ascontiguousarray(lsn).view(np.uint8), np.arange(len(lsn) + 1, dtype=np.int64) * 8)
    is_compared = np.zeros(len(lsn), np.bool_)
    extremes, fed = KeyExtremes(), fed_by_node(copies)
    # Most slices contain rows from only one node. Computing the positions of all nodes takes seconds in a large fleet.
    for number in np.unique(node).tolist():
        name, of_node = copies.nodes[number], node == number
        is_compared |= of_node & (lsn >= copies.since(name))
        for recopied, position in copies.recopied_since(name).items():
            of_group = of_node & (group == recopied)
            is_compared[of_group] = lsn[of_group] >= position
        if number in fed:
            add_extremes(extremes, number, group, keys_of(images), fed[number], of_node)
    keys = np.stack([node, group, partition], axis=1)
    rows = combine_hashes(keys, entries)
    versions = combine_hashes(keys[is_compared], xxhash64(positions, hashed)[is_compared])
    return PartitionHashes(rows, versions, extremes)


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
