"""Checking a snapshot: every object read back, every copy folded, copies and shards compared.

What is damaged is named and the rest still compared; what could not be compared for that reason is named too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from check.base_hashes import BaseHashTask, hash_base
from check.checking import Checking
from check.copies import Copies, compare_copies, compare_streams
from check.hashing import Sums, combine_all, hash_aggregates, sums_of_table
from check.large_objects import check_large_objects
from check.report import Compared, Conflict
from check.streams import StreamTask, hash_stream
from check.transactions import compare_pairs
from fleet.progress import Progress
from snapshots.folding import Fold, fold, long_image_reader
from snapshots.jobs import SparkSource, run_tasks
from snapshots.long_images import LongImageReader, by_place
from snapshots.sources import PROBLEM, SegmentSource, Sources, base_sources, segment_sources, sources_of
from storage.errors import report_of
from wal.arrow_numbers import to_arrow
from wal.bytes_column import from_arrow, xxhash64
from wal.damage import ObjectDamagedError
from wal.markers import marker_from_bytes

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

ENTRY_ROWS = "node int, `group` int, partition int, key binary, lsn bigint, entry bigint"
ENTRY_NAMES = ["node", "group", "partition", "key", "lsn", "entry"]


def check_contents(checking: Checking, spark: SparkSource, progress: Progress) -> None:
    """Read every object and compare what it holds; `check_structure` has been through the chain before."""
    session = spark.session()
    streams = _streams(checking, session, progress)
    _check_markers(checking, streams[1])
    hashes, versions = _partition_hashes(checking, session, progress)
    check_large_objects(checking, session, progress)
    copies, report = checking.copies, checking.report
    compare_streams(copies, streams[0], checking.damaged, report)
    compare_copies(copies, hashes, versions, checking.damaged, report)
    primaries = tuple(node for node in copies.nodes if copies.shard[node] == node)
    progress.step("compare transactions")
    segments = _segment_sources(checking, primaries)
    pairs = compare_pairs(session, primaries, segments, checking.location)
    report.compared.transactions += pairs.transactions
    report.conflicts += pairs.conflicts
    # They were whole when they were read before: what was compared by then stands, this does not.
    for problem in pairs.problems:
        checking.problem(problem)


def _segment_sources(checking: Checking, nodes: tuple[str, ...]) -> tuple[SegmentSource, ...]:
    """All segments of whole copies, those with events alone too."""
    return tuple(
        one
        for number, node in enumerate(nodes)
        if node not in checking.damaged
        for one in segment_sources(checking.chain, number, node)
    )


def _streams(checking: Checking, session: SparkSession, progress: Progress) -> tuple[Sums, dict[str, dict[bytes, int]]]:
    """Combined hashes of every node's stream by (node, group), and the markers that came out of it."""
    chain, copies = checking.chain, checking.copies
    url, options = checking.location
    tasks = [
        StreamTask(one.source, one.segment, copies.since(node), one.position, one.excluded, one.present, url, options)
        for number, node in enumerate(copies.nodes)
        for one in segment_sources(chain, number, node, copies.alike(node))
    ]
    progress.step("read WAL archive", total=len(tasks), unit="objects")
    reports = run_tasks(session, hash_stream, tasks, progress)
    parts: list[Sums] = []
    markers: dict[str, dict[bytes, int]] = {node: {} for node in copies.nodes}
    for task, found in zip(tasks, reports, strict=True):
        if found.sums is None:
            checking.problem(found.problem or {})
            continue
        parts.append(found.sums)
        markers[task.source.node].update(dict(found.markers))
        _count(checking.report.compared, objects=1, size=task.source.size, changes=found.changes)
    return combine_all(parts, 2), markers


def _count(compared: Compared, *, objects: int = 0, size: int = 0, rows: int = 0, changes: int = 0) -> None:
    compared.objects += objects
    compared.bytes += size
    compared.rows += rows
    compared.changes += changes


def _check_markers(checking: Checking, markers: Mapping[str, Mapping[bytes, int]]) -> None:
    """Every cut's two markers must be in every whole copy's archive, where the commit says."""
    for node, contents in markers.items():
        if node in checking.damaged:
            continue
        found = {}
        for content, position in contents.items():
            try:
                found[marker_from_bytes(content)] = position
            except ValueError:
                continue
        positions = {(marker.cut, marker.kind): position for marker, position in found.items()}
        for commit in checking.chain.commits:
            cut = commit.cut.cut.nodes[checking.chain.shard_of(node)]
            for kind, position in (("start", cut.start), ("finish", cut.finish)):
                if positions.get((commit.cut.id, kind)) != position:
                    checking.report.conflicts.append(
                        Conflict("marker", f"the {kind} marker of cut {commit.cut.id} is missing", node=node)
                    )


def _partition_hashes(checking: Checking, session: SparkSession, progress: Progress) -> tuple[Sums, Sums]:
    """Combined hashes of entries and of versions of every copy, by (node, group, partition)."""
    progress.step("fold changes")
    copies = checking.copies
    whole = tuple(copies.nodes)
    try:
        sources = sources_of(checking.chain, whole, checking.store, skip=checking.damaged)
    except ObjectDamagedError as error:
        checking.problem(report_of(error))
        sources = Sources(whole, (), (), frozenset(), {})
    folded = fold(session, sources, checking.location)
    try:
        for problem in folded.problems:
            checking.problem(problem)
        base = _base_hashes(checking, session, sources, folded, progress)
        if folded.images is None:
            return base, combine_all([], 3)
        images, versions = _image_hashes(folded, copies, long_image_reader(sources, checking.location))
        _note_incomplete(checking, images)
        return combine_all([base, images], 3), versions
    finally:
        folded.release()


def _base_hashes(checking: Checking, session: SparkSession, sources: Sources, folded: Fold, progress: Progress) -> Sums:
    copies = checking.copies
    url, options = checking.location
    changed = {number: session.sparkContext.broadcast(found) for number, found in folded.changed.items()}
    # Of a copy that can't be compared every object is still read, and named if it is damaged.
    read = {base.source.number for base in sources.bases}
    unfolded = [
        base
        for number, node in enumerate(copies.nodes)
        if number not in read
        for base in base_sources(checking.chain, number, node)
    ]
    partitions = {node: copies.partitions(node) for node in copies.nodes}
    tasks = [
        BaseHashTask(
            base,
            {number: count for number in base.rows if (count := partitions[base.source.node].get(number))},
            changed.get(base.source.number),
            url,
            options,
        )
        for base in (*sources.bases, *unfolded)
    ]
    progress.step("read base copies", total=len(tasks), unit="objects")
    parts: list[Sums] = []
    for found in run_tasks(session, hash_base, tasks, progress):
        if found.sums is None:
            checking.problem(found.problem or {})
            continue
        parts.append(found.sums)
        _count(checking.report.compared, objects=1, size=found.bytes, rows=found.rows)
    for sent in changed.values():
        sent.unpersist()
    return combine_all(parts, 3)


def _note_incomplete(checking: Checking, images: Sums) -> None:
    """Rows whose unchanged values are stored nowhere, though every object of their copy is whole."""
    for (number, group, place), (count, *_) in images.as_dict().items():
        node = checking.copies.nodes[number]
        if group == PROBLEM and node not in checking.damaged:
            name = checking.copies.group_name(node, place)
            detail = f"{count} rows whose earlier images, which their changes need, are stored nowhere"
            checking.report.conflicts.append(Conflict("history", detail, node=node, group=name))
            checking.damaged.add(node)


def _image_hashes(folded: Fold, copies: Copies, reader: LongImageReader) -> tuple[Sums, Sums]:
    """The same of the rows that changes have made, and of their versions."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    images = folded.images
    if images is None:
        raise RuntimeError("there are no images")
    compared = _written_since(copies)
    version = F.xxhash64("key", "lsn")
    keys = ["node", "group", "partition"]
    entries = images.select(*keys, "key", "lsn", F.xxhash64("key", "row").alias("entry"))
    if folded.long_images is not None:
        placed = by_place(images.sparkSession, folded.long_images)
        entries = entries.unionByName(placed.mapInArrow(partial(hash_images, reader=reader), ENTRY_ROWS))
    table = (
        entries.groupBy(*keys)
        .agg(
            *hash_aggregates(F.col("entry")),
            *hash_aggregates(version, "version_", compared),
        )
        .toArrow()
    )
    return sums_of_table(table, keys), sums_of_table(table, keys, "version_")


def hash_images(batches: Iterable[pa.RecordBatch], reader: LongImageReader) -> Iterator[pa.RecordBatch]:
    """ENTRY_ROWS of LONG_IMAGE_ROWS: hashed where they are read, as Spark hashes the others."""
    for batch in reader.images(batches):
        hashes = xxhash64(from_arrow(batch.column("row")), xxhash64(from_arrow(batch.column("key"))))
        columns = [batch.column(name) for name in ("node", "group", "partition", "key", "lsn")]
        yield pa.record_batch([*columns, to_arrow(hashes.view(np.int64))], names=ENTRY_NAMES)


def _written_since(copies: Copies) -> Column:
    """Whether an image is of a change that all copies of its group have, and none in its base."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    def numbers(values: Iterable[int]) -> Column:
        return F.create_map(*(F.lit(value).cast("bigint") for value in values))

    since = numbers(value for number, node in enumerate(copies.nodes) for value in (number, copies.since(node)))[
        F.col("node")
    ]
    later = {
        (number << 32) + group: position
        for number, node in enumerate(copies.nodes)
        for group, position in copies.copied_anew(node).items()
    }
    if later:
        place = F.shiftleft(F.col("node").cast("bigint"), 32) + F.col("group")
        since = F.coalesce(numbers(value for entry in later.items() for value in entry)[place], since)
    return F.col("lsn") >= since
