"""The load jobs: the task that reads a base object loads it; the folded changes are loaded after the base."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from columns.python_workers import map_batches
from fleet.progress import Progress
from restore.rows.load import BaseLoadTask, load_base, load_images
from restore.rows.load_target import Feed, LoadTargets
from snapshots.fold.fold import Fold, fold, long_image_reader
from snapshots.fold.long_images import LongImageReader, order_by_place
from snapshots.fold.sources import Sources, sources_of
from snapshots.operations.spark_jobs import job_progress, raise_first, run_tasks
from snapshots.records.chain import Chain
from storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOADED_ROWS = "placed string, problem string"
# A batch costs one COPY per group in it: with more groups than this, sorting is cheaper.
MIXED_GROUPS_MAX = 100


def load_rows(
    session: SparkSession, chain: Chain, targets: LoadTargets, store: StoreLocation, progress: Progress
) -> Counter[int]:
    """Load the rows of shards at the cut into their databases; raise the first error of a task.

    Returns how many rows the tasks have placed on each target, by its number; also those that it had already.
    """
    progress.step("fold changes")
    nodes, parts = targets.nodes, targets.parts
    sources = sources_of(chain, nodes, store.open(), chosen=targets.chosen)
    numbered = {
        number: feed
        for number, node in enumerate(nodes)
        if (feed := targets.feed_of(node, chain.shard_of(node))) is not None
    }
    folded = fold(session, sources, store)
    try:
        raise_first(folded.problems)
        placed = _load_bases(session, _base_tasks(session, sources, folded, numbered, store), progress)
        if folded.images is not None:
            progress.step("load changes")
            placed += _load_images(session, folded.images, numbered, parts, progress)
        if folded.long_images is not None:
            progress.step("load long rows")
            reader = long_image_reader(sources, store)
            placed += _load_long_images(session, folded.long_images, numbered, parts, reader, progress)
    finally:
        folded.release()
    return placed


def _base_tasks(
    session: SparkSession,
    sources: Sources,
    folded: Fold,
    feeds: Mapping[int, Feed],
    store: StoreLocation,
) -> list[BaseLoadTask]:
    changed = {number: session.sparkContext.broadcast(found) for number, found in folded.changed.items()}
    return [
        BaseLoadTask(base, feed, changed.get(base.source.number), store)
        for base in sources.bases
        if base.source.number in feeds and (feed := feeds[base.source.number].select(base.groups)).targets
    ]


def _load_bases(session: SparkSession, tasks: list[BaseLoadTask], progress: Progress) -> Counter[int]:
    progress.step("load base", total=len(tasks), unit="objects")
    reports = run_tasks(session, load_base, tasks, progress)
    raise_first([report.problem for report in reports])
    for broadcast in {id(task.changed): task.changed for task in tasks if task.changed is not None}.values():
        broadcast.unpersist()
    return _sum_placed(report.placed for report in reports)


def _load_images(
    session: SparkSession, images: Any, feeds: Mapping[int, Feed], parts: int, progress: Progress
) -> Counter[int]:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from load_images(batches, feeds, f"images-{context.partitionId() if context else 0}")

    # A fixed number of partitions: else adaptive execution could give a repeated task other rows.
    spread = (
        images.where(f"node IN ({_numbers(feeds)})")
        .select("node", "group", "row", "key")
        .repartition(parts, "node", "group", "key", "row")
    )
    if sum(len(target.groups) for feed in feeds.values() for target in feed.targets.values()) > MIXED_GROUPS_MAX:
        spread = spread.sortWithinPartitions("node", "group")
    return _run(session, map_batches(spread, load, LOADED_ROWS), progress)


def _load_long_images(
    session: SparkSession,
    images: Any,
    feeds: Mapping[int, Feed],
    parts: int,
    reader: LongImageReader,
    progress: Progress,
) -> Counter[int]:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from load_images(reader.read_images(batches), feeds, f"long-{context.partitionId() if context else 0}")

    chosen = order_by_place(images.where(f"node IN ({_numbers(feeds)})"), parts)
    return _run(session, map_batches(chosen, load, LOADED_ROWS), progress)


def _numbers(feeds: Mapping[int, Feed]) -> str:
    return ", ".join(map(str, feeds))


def _run(session: SparkSession, loaded: Any, progress: Progress) -> Counter[int]:
    with job_progress(session, progress):
        reports = loaded.collect()  # a row per partition
    raise_first([json.loads(report["problem"]) if report["problem"] else None for report in reports])
    return _sum_placed({int(number): rows for number, rows in json.loads(one["placed"]).items()} for one in reports)


def _sum_placed(reports: Iterable[Mapping[int, int]]) -> Counter[int]:
    """The sum of the rows placed on each target."""
    placed: Counter[int] = Counter()
    for report in reports:
        placed.update(report)
    return placed
