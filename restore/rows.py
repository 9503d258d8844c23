"""The load jobs: base objects loaded where they are read, folded changes after them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fleet.progress import Progress
from fleet.watch import Watch
from restore.large_objects import load_large_objects
from restore.load import BaseLoadTask, LoadTarget, load_base, load_images
from snapshots.folding import Fold, fold, long_image_reader
from snapshots.jobs import SparkSource, job_progress, raise_first, run_tasks
from snapshots.long_images import LongImageReader, by_place
from snapshots.sources import Sources, sources_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from restore.restore import Restoring

LOADED_ROWS = "rows bigint, problem string"
# A batch costs a COPY for each group that is in it: with more groups they are better sorted than mixed.
MIXED_GROUPS_MAX = 100


def load_rows(restoring: Restoring, spark: SparkSource, progress: Progress, watch: Watch) -> None:
    """Load the state of every shard into its database; raise the first error that a task met.

    The jobs are cancelled when `watch` finds a target silent.
    """
    began = time.monotonic()
    session = spark.session()
    with watch.on_silence(session.sparkContext.cancelAllJobs):
        _load_rows(restoring, session, progress)
    for report in restoring.report.nodes:
        report.seconds += time.monotonic() - began


def _load_rows(restoring: Restoring, session: SparkSession, progress: Progress) -> None:
    progress.step("fold changes")
    nodes = tuple(target.shard for target in restoring.targets)
    sources = sources_of(restoring.chain, nodes, restoring.store)
    folded = fold(session, sources, restoring.location)
    try:
        raise_first(folded.problems)
        targets = {
            number: LoadTarget(
                target.loaded,
                {g.number: g for g in restoring.groups(target.shard)},
                restoring.roots.get(target.shard, {}),
                restoring.search_paths[target.shard],
            )
            for number, target in enumerate(restoring.targets)
        }
        _load_bases(restoring, session, sources, (folded, targets), progress)
        load_large_objects(restoring, session, progress)
        if folded.images is not None:
            progress.step("load changes")
            _load_images(session, folded.images, targets, progress)
        if folded.long_images is not None:
            progress.step("load long rows")
            reader = long_image_reader(sources, restoring.location)
            _load_long_images(session, folded.long_images, (targets, reader), progress)
    finally:
        folded.release()


def _load_bases(
    restoring: Restoring,
    session: SparkSession,
    sources: Sources,
    work: tuple[Fold, dict[int, LoadTarget]],
    progress: Progress,
) -> None:
    folded, targets = work
    url, options = restoring.location
    changed = {number: session.sparkContext.broadcast(found) for number, found in folded.changed.items()}
    tasks = [
        BaseLoadTask(base, target, changed.get(base.source.number), url, options)
        for base in sources.bases
        if (target := targets[base.source.number].only(base.groups)).groups
    ]
    progress.step("load base", total=len(tasks), unit="objects")
    reports = run_tasks(session, load_base, tasks, progress)
    raise_first([report.problem for report in reports])
    for sent in changed.values():
        sent.unpersist()


def _load_images(session: SparkSession, images: Any, targets: dict[int, LoadTarget], progress: Progress) -> None:
    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from load_images(batches, targets, f"images-{context.partitionId() if context else 0}")

    # By number, so that no planner changes what a partition holds when a task is repeated.
    parts = max(session.sparkContext.defaultParallelism, 2)
    spread = images.select("node", "group", "row", "key").repartition(parts, "node", "group", "key", "row")
    if sum(len(target.groups) for target in targets.values()) > MIXED_GROUPS_MAX:
        spread = spread.sortWithinPartitions("node", "group")
    _run(session, spread.mapInArrow(load, LOADED_ROWS), progress)


def _load_long_images(
    session: SparkSession, images: Any, work: tuple[dict[int, LoadTarget], LongImageReader], progress: Progress
) -> None:
    targets, reader = work

    def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from load_images(reader.images(batches), targets, f"long-{context.partitionId() if context else 0}")

    _run(session, by_place(session, images).mapInArrow(load, LOADED_ROWS), progress)


def _run(session: SparkSession, loaded: Any, progress: Progress) -> None:
    with job_progress(session, progress):
        reports = loaded.collect()  # a row per partition
    raise_first([json.loads(report["problem"]) if report["problem"] else None for report in reports])
