"""The load jobs: the task that reads a base object loads it; the folded changes are loaded after the base."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from columns.python_workers import map_batches
from fleet.progress import Progress
from restore.rows.load import BaseLoadTask, load_base, load_images
from restore.rows.load_target import LoadTarget, LoadTargets
from snapshots.fold.fold import Fold, fold, long_image_reader
from snapshots.fold.long_images import LongImageReader, order_by_place
from snapshots.fold.sources import Sources, sources_of
from snapshots.operations.spark_jobs import job_progress, raise_first, run_tasks
from snapshots.records.chain import Chain
from storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOADED_ROWS = "rows bigint, problem string"
# A batch costs one COPY per group in it: with more groups than this, sorting is cheaper.
MIXED_GROUPS_MAX = 100


def load_rows(
    session: SparkSession, chain: Chain, targets: LoadTargets, store: StoreLocation, progress: Progress
) -> None:
    """Load the rows of shards at the cut into their databases; raise the first error of a task."""
    progress.step("fold changes")
    nodes, parts = targets.nodes, targets.parts
    sources = sources_of(chain, nodes, store.open(), chosen=targets.chosen)
    numbered = {
        number: target
        for number, node in enumerate(nodes)
        if (target := targets.target_of(node, chain.shard_of(node))) is not None
    }
    folded = fold(session, sources, store)
    try:
        raise_first(folded.problems)
        _load_bases(session, _base_tasks(session, sources, folded, numbered, store), progress)
        if folded.images is not None:
            progress.step("load changes")
            _load_images(session, folded.images, numbered, parts, progress)
        if folded.long_images is not None:
            progress.step("load long rows")
            reader = long_image_reader(sources, store)
            _load_long_images(session, folded.long_images, numbered, parts, reader, progress)
    finally:
        folded.release()


def _base_tasks(
    session: SparkSession,
    sources: Sources,
    folded: Fold,
    targets: Mapping[int, LoadTarget],
    store: StoreLocation,
) -> list[BaseLoadTask]:
    changed = {number: session.sparkContext.broadcast(found) for number, found in folded.changed.items()}
    return [
        BaseLoadTask(base, target, changed.get(base.source.number), store)
        for base in sources.bases
        if base.source.number in targets and (target := targets[base.source.number].select(base.groups)).groups
    ]


def _load_bases(session: SparkSession, tasks: list[BaseLoadTask], progress: Progress) -> None:
    progress.step("load base", total=len(tasks), unit="objects")
    reports = run_tasks(session, load_base, tasks, progress)
    raise_first([report.problem for report in reports])
    for broadcast in {id(task.changed): task.changed for task in tasks if task.changed is not None}.values():
        broadcast.unpersist()


def _load_images(
    session: SparkSession, images: Any, targets: Mapping[int, LoadTarget], parts: int, progress: Progress
) -> None:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from load_images(batches, targets, f"images-{context.partitionId() if context else 0}")

    # A fixed number of partitions: else adaptive execution could give a repeated task other rows.
    spread = (
        images.where(f"node IN ({_numbers(targets)})")
        .select("node", "group", "row", "key")
        .repartition(parts, "node", "group", "key", "row")
    )
    if sum(len(target.groups) for target in targets.values()) > MIXED_GROUPS_MAX:
        spread = spread.sortWithinPartitions("node", "group")
    _run(session, map_batches(spread, load, LOADED_ROWS), progress)


def _load_long_images(
    session: SparkSession,
    images: Any,
    targets: Mapping[int, LoadTarget],
    parts: int,
    reader: LongImageReader,
    progress: Progress,
) -> None:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from load_images(reader.read_images(batches), targets, f"long-{context.partitionId() if context else 0}")

    chosen = order_by_place(images.where(f"node IN ({_numbers(targets)})"), parts)
    _run(session, map_batches(chosen, load, LOADED_ROWS), progress)


def _numbers(targets: Mapping[int, LoadTarget]) -> str:
    return ", ".join(map(str, targets))


def _run(session: SparkSession, loaded: Any, progress: Progress) -> None:
    with job_progress(session, progress):
        reports = loaded.collect()  # a row per partition
    raise_first([json.loads(report["problem"]) if report["problem"] else None for report in reports])
