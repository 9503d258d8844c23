"""The load jobs: a task reads a base object and loads it; the folded changes are loaded at the same time.

If a table is partitioned by the hash of an enum, or of an array, a composite or another type with enums inside, its
rows are loaded through that table. PostgreSQL hashes an enum value by its label's oid, and a restored database has
different oids for the labels, so a row may belong to a different partition there; values of regclass and similar types
are oids themselves. pg_dump does the same (`--load-via-partition-root`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain as chain_of
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Ints, runs
from cutline.columns.python_workers import map_batches
from cutline.columns.row_batches import to_stream
from cutline.fleet.progress import Progress, Silent
from cutline.nodes.groups import Group
from cutline.restore.rows.expected_tasks import ExpectedTasks, expect_tasks
from cutline.restore.rows.load import (
    BaseLoadTask,
    Feed,
    ImageLoadTask,
    LoadReport,
    LoadTargets,
    LoadTask,
    Refused,
    SegmentLoadTask,
    check_complete,
    incomplete_error,
    load_again,
    load_images,
    load_task,
    reported,
)
from cutline.restore.rows.rounds import LoadEnd, load_in_rounds
from cutline.snapshots.fold.changes import NO_IMAGES
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader
from cutline.snapshots.fold.long_lines import LongImageReader, order_by_place
from cutline.snapshots.fold.sources import Sources, sources_of
from cutline.snapshots.records.chain import Chain
from cutline.spark.driver_session import cancel_jobs
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import (
    CANCELLED,
    POLL_SECONDS,
    TASKS_PER_JOB_MAX,
    Dealing,
    cores_of,
    job_progress,
    limited_sessions,
    raise_first,
    run_tasks,
    share_rate,
    shared_problem,
)
from cutline.storage.errors import ErrorReport
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# For every leaf partition below a table that is partitioned by such a hash, the topmost of these tables. The type of an
# expression is that of its operator class, which may be one for all arrays, records or ranges.
ROOTS_QUERY = """
WITH RECURSIVE types AS (
    SELECT p.partrelid, coalesce(a.atttypid, o.opcintype) AS type
      FROM pg_partitioned_table p
     CROSS JOIN unnest(p.partattrs::int2[], p.partclass::oid[]) AS k (attnum, opclass)
      JOIN pg_opclass o ON o.oid = k.opclass
      LEFT JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = k.attnum AND k.attnum <> 0
     WHERE p.partstrat = 'h'
    UNION
    SELECT t.partrelid, inner_types.type
      FROM types t
     CROSS JOIN LATERAL (
        SELECT typbasetype FROM pg_type WHERE oid = t.type AND typtype = 'd'
        UNION ALL SELECT typelem FROM pg_type WHERE oid = t.type AND typelem <> 0 AND typlen = -1
        UNION ALL SELECT a.atttypid FROM pg_type y JOIN pg_attribute a ON a.attrelid = y.typrelid
                   WHERE y.oid = t.type AND y.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL SELECT rngsubtype FROM pg_range WHERE rngtypid = t.type
        UNION ALL SELECT rngtypid FROM pg_range WHERE rngmultitypid = t.type) AS inner_types (type)),
unsafe AS (
    SELECT DISTINCT t.partrelid FROM types t JOIN pg_type y ON y.oid = t.type
     WHERE y.typtype IN ('e', 'p')
        OR (y.typname ^@ 'reg' AND y.typcategory = 'N' AND y.typnamespace = 'pg_catalog'::regnamespace)),
below AS (
    SELECT u.partrelid AS relid, u.partrelid AS root FROM unsafe u
     WHERE NOT EXISTS (SELECT FROM pg_partition_ancestors(u.partrelid) AS a (relid)
                         JOIN unsafe v ON v.partrelid = a.relid WHERE a.relid <> u.partrelid)
    UNION
    SELECT h.inhrelid, b.root FROM below b JOIN pg_inherits h ON h.inhparent = b.relid
)
SELECT n.nspname, c.relname, format('%I.%I', rn.nspname, r.relname)
  FROM below b JOIN pg_class c ON c.oid = b.relid AND c.relkind = 'r' JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class r ON r.oid = b.root JOIN pg_namespace rn ON rn.oid = r.relnamespace
"""


def find_roots(connection: psycopg.Connection[Any], groups: Iterable[Group]) -> dict[int, str]:
    """Find the quoted names of the roots through which groups' rows must be loaded, keyed by group number."""
    roots = {(schema, table): root for schema, table, root in connection.execute(ROOTS_QUERY)}
    return {group.number: roots[group.schema, group.table] for group in groups if (group.schema, group.table) in roots}


LOADED_ROWS = "placed string, problem string, rest string"
# Each batch needs one COPY per group, so with more groups than this, sorting is cheaper.
MIXED_GROUPS_MAX = 100
# The JVM holds the images that the driver sends to tasks.
IMAGES_PER_TASK, IMAGE_BYTES_PER_TASK = 50_000, 8 << 20
# A load waits for its server half of the time. With one load for each of two cores, the cores were idle for 11 to 16 %
# of the time; with three in total, for 8 to 12 %, and a load of two million rows took 6 % less time.
LOADS_PER_CORE = 1.5
# Partitions of changed rows per core if there are many sources, and the number of concurrent load jobs.
PARTS_PER_CORE, JOBS_MAX = 4, 3


class Spread(Struct, frozen=True):
    """How changed rows are divided: into `parts` for each of the `nodes`, or in total if `nodes` is 0.

    If the rows are divided by node, a task has sessions only on its node's target.
    """

    parts: int
    nodes: int

    def divide(self, rows: DataFrame, by: str) -> DataFrame:
        """Divide the rows (node, …) into a fixed number of partitions, so that a retried task gets the same rows."""
        from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

        part = f"pmod(hash({by}), {self.parts})"
        place = f"node * {self.parts} + {part}" if self.nodes else part
        return rows.repartitionById(self.parts * max(self.nodes, 1), F.expr(place).cast("int"))


def count_parts(session: SparkSession, sources: int, sessions: Mapping[str, int], *, is_routed: bool) -> int:
    """Return the number of parts for changed rows (LoadTargets.parts); `sessions` limits task sessions, by node."""
    cores = max(cores_of(session).now, 2)
    limited = limited_sessions(session, sessions, jobs=JOBS_MAX)
    parts = cores if is_routed else min(cores, max(2, math.ceil(PARTS_PER_CORE * cores / sources)))
    return min([parts, *limited.values()])


def load_rows(
    session: SparkSession,
    chain: Chain,
    targets: LoadTargets,
    store: StoreLocation,
    progress: Progress,
    announce: Callable[[Mapping[int, ExpectedTasks]], None] | None = None,
) -> Counter[int]:
    """Load the shards' rows at the cut into their databases; raise the first error of any task.

    Rows that a table refuses, but may accept once other rows are there, are loaded again after all others
    (restore/rows/rounds.py).

    Returns the number of rows that the tasks placed on each target, keyed by the target's number, including rows that
    were already there. Before the first task starts, calls `announce` with the tasks that each target is to expect,
    unless there are more than a job can have.
    """
    progress.step("fold changes")
    nodes = targets.nodes
    sources = sources_of(chain, nodes, store.open(), chosen=targets.chosen)
    feeds = {
        number: feed
        for number, node in enumerate(nodes)
        if (feed := targets.feed_of(node, chain.shard_of(node))) is not None
    }
    folded = fold(session, sources, store, for_loading=True, completes=not targets.is_routed)
    changed: dict[int, Any] = {}
    anchored: dict[int, Any] = {}
    try:
        raise_first(folded.problems)
        frames = sum(frame is not None for frame in (folded.images, folded.long_images))
        limited, share = share_rate(
            session, targets.task_sessions, targets.bytes_per_second, frames + 1, LOADS_PER_CORE
        )
        feeds = {number: feed.at_rate(share) for number, feed in feeds.items()}
        local = None if folded.local is None else _images_for(feeds, folded.local)
        progress.step("load rows")
        changed |= {number: broadcast(session, keys) for number, keys in folded.changed.items()}
        anchored |= {number: broadcast(session, of_tables) for number, of_tables in folded.in_bases.items()}
        # If there are more tasks than one job can have, the tasks for changed rows are part of the first job.
        tasks: Iterator[LoadTask] = chain_of(
            _image_tasks(local, feeds),
            _segment_tasks(sources, folded, feeds, store),
            base_tasks(sources, _groups_alone(sources, folded), changed, feeds, store, anchored),
        )
        if announce:
            first = list(islice(tasks, TASKS_PER_JOB_MAX + 1))
            if len(first) <= TASKS_PER_JOB_MAX:
                of_feeds = (feed.targets for feed in targets.feeds.values())
                loaded = {number: target for of_feed in of_feeds for number, target in of_feed.items()}
                announce(expect_tasks(first, loaded, _groups_in_frames(sources, folded, feeds)))
            tasks = chain_of(first, tasks)
        spread = Spread(targets.parts, 0 if targets.is_routed else len(nodes))
        jobs: list[Callable[[], LoadEnd]] = []
        if (images := folded.images) is not None:
            jobs.append(lambda: _load_images(session, images, feeds, spread))
        if (long_images := folded.long_images) is not None:
            reader = long_image_reader(sources, store)
            jobs.append(lambda: load_long_images(session, long_images, feeds, spread, reader))
        dealing = Dealing[LoadTask](lambda task: task.size, lambda task: task.nodes, limited, LOADS_PER_CORE)
        completed: Counter[tuple[int, int]] = Counter()
        jobs.append(lambda: _run_tasks(session, load_task, tasks, dealing, completed, Counter()))
        placed = load_in_rounds(partial(run_together, session), jobs)
        _check_completed(folded, feeds, completed)
        return placed
    finally:
        folded.release()
        for sent in (*changed.values(), *anchored.values()):
            sent.unpersist()


def _check_completed(folded: Fold, feeds: Mapping[int, Feed], completed: Mapping[tuple[int, int], int]) -> None:
    """Raise LoadError if there was no base row for an image that lacks values."""
    for number, of_tables in folded.in_bases.items():
        for group, images in of_tables.items():
            of_group = feeds[number].select([group]).targets if number in feeds else {}
            for target in of_group.values():
                lacking = len(images.images) - completed.get((number, group), 0)
                if lacking > 0:
                    raise incomplete_error(target.node.id, f"{lacking:,} rows of {target.groups[group].name}")


def base_tasks(
    sources: Sources,
    alone: Mapping[int, frozenset[int]],
    changed: Mapping[int, Any],
    feeds: Mapping[int, Feed],
    store: StoreLocation,
    anchored: Mapping[int, Any] = MappingProxyType({}),
) -> Iterator[BaseLoadTask]:
    """Yield the tasks for the base objects.

    `alone` is the result of _groups_alone; `changed` are broadcast keys, and `anchored` broadcast images that the base
    rows complete, by node number.

    Tasks of different nodes alternate, because the tasks per job and the sessions per node are limited.
    """
    unfed = {node.number for node in sources.bases.nodes} - feeds.keys()
    for base in sources.bases.without(unfed).interleaved():
        number = base.source.number
        if (feed := feeds[number].select(base.groups)).targets:
            of_node = alone[number] & base.groups
            yield BaseLoadTask(base, feed, changed.get(number), store, of_node, anchored.get(number))


def _groups_alone(sources: Sources, folded: Fold) -> dict[int, frozenset[int]]:
    """Return the groups whose rows are all in a single base object, keyed by node number."""
    objects: dict[int, Counter[int]] = {}
    for base in sources.bases:
        objects.setdefault(base.source.number, Counter()).update(base.groups)
    # The changed keys don't include inserted lines of groups without a key.
    unsure = sources.multisets if sources.segments else frozenset[int]()
    return {
        number: frozenset(group for group, count in listed.items() if count == 1)
        - folded.changed.get(number, {}).keys()
        - unsure
        for number, listed in objects.items()
    }


def _groups_in_frames(sources: Sources, folded: Fold, feeds: Mapping[int, Feed]) -> dict[int, set[int]]:
    """Return the groups that may have images in the fold's DataFrames, keyed by target; no feed has routes."""
    unsure: dict[int, set[int]] = {}
    if folded.images is not None or folded.long_images is not None:
        for number, feed in feeds.items():
            for target in feed.targets:
                unsure.setdefault(target, set()).update(folded.changed.get(number, {}), sources.multisets)
    return unsure


def _images_for(feeds: Mapping[int, Feed], images: pa.Table) -> pa.Table:
    """Return the images of nodes with feeds; raise SnapshotError if a row can't be completed."""
    chosen = images.filter(to_mask(np.isin(to_numpy(images["node"]), list(feeds))))
    check_complete(chosen, feeds)
    return chosen


def _image_tasks(images: pa.Table | None, feeds: Mapping[int, Feed]) -> Iterator[ImageLoadTask]:
    """Yield the tasks for the images that the driver folded, in node order; all their nodes have feeds."""
    if images is None:
        return
    sizes = to_numpy(pc.binary_length(images["row"])).astype(np.int64)
    for rows in runs(to_numpy(images["node"])):
        number = images["node"][rows.start].as_py()
        for start, end in _shares(sizes[rows]):
            part = images.slice(rows.start + start, end - start).select(["node", "group", "row", "key"])
            if (feed := feeds[number].select(pc.unique(part["group"]).to_pylist())).targets:
                # Serialize each slice as a stream, because a pickled slice would include its whole table.
                yield ImageLoadTask(f"images-{number}-{start}", to_stream(part), number, feed)


def _shares(sizes: Ints) -> Iterator[tuple[int, int]]:
    """Divide rows of these sizes into ranges of up to IMAGES_PER_TASK rows and IMAGE_BYTES_PER_TASK, or one row."""
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + IMAGE_BYTES_PER_TASK, side="right"))
        last = min(max(last, first + 1), first + IMAGES_PER_TASK)
        yield first, min(last, len(sizes))
        first = last


def _segment_tasks(
    sources: Sources, folded: Fold, feeds: Mapping[int, Feed], store: StoreLocation
) -> Iterator[SegmentLoadTask]:
    """Yield the tasks for the images that were left in their segments, or that are completed there."""
    for segment in sources.segments:
        images = folded.segment_images.get(segment.source.key, NO_IMAGES)
        anchored = folded.in_segments.get(segment.source.key, {})
        groups = images.groups | anchored.keys()
        if groups and segment.source.number in feeds and (feed := feeds[segment.source.number].select(groups)).targets:
            yield SegmentLoadTask(segment, feed, images.flags, store, anchored)


End = TypeVar("End")


def run_together(session: SparkSession, jobs: Sequence[Callable[[], End]]) -> list[End]:
    """Run jobs concurrently and return their results in order; after the first error, cancel the other jobs."""
    stopped: KeyboardInterrupt | None = None
    with ThreadPoolExecutor(max_workers=len(jobs)) as threads:
        running = [threads.submit(job) for job in jobs]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            # Wait until the jobs have released their sessions, before the caller undoes anything. Ignore further
            # signals: on a signal, py4j closes the connections of all threads, and a thread that waits for a job then
            # restarts the job.
            while any(not future.done() for future in running):
                try:
                    with suppress(Exception):
                        cancel_jobs(session)
                    wait(running, timeout=POLL_SECONDS)
                except KeyboardInterrupt as interrupt:
                    stopped = interrupt
            if stopped is not None:
                raise stopped
    if errors := [error for future in running if (error := future.exception())]:
        # Prefer an error other than cancellation, because a failing job may cancel the others before it ends.
        raise next((error for error in errors if CANCELLED not in str(error)), errors[0])
    return [future.result() for future in running]


def _run_tasks(
    session: SparkSession,
    work: Callable[[LoadTask], LoadReport],
    tasks: Iterable[LoadTask],
    dealing: Dealing[LoadTask],
    completed: Counter[tuple[int, int]],
    placed: Counter[int],
) -> LoadEnd:
    """Run the tasks, and add the rows that they `placed` and the images that they `completed`.

    At most TASKS_PER_JOB_MAX tasks are kept to be loaded again; with more than that, their first error is raised.
    """
    refused: list[LoadTask] = []
    problems: list[ErrorReport] = []
    has_progressed, left = False, iter(tasks)
    while some := list(islice(left, TASKS_PER_JOB_MAX)):
        reports = run_tasks(session, work, some, Silent(), dealing, problem_of=shared_problem)
        _raise_final(reports)
        for task, report in zip(some, reports, strict=True):
            has_progressed = has_progressed or report.has_progressed
            if report.problem:
                refused.append(task)
                problems += report.problems
            else:
                placed.update(report.placed)
                completed.update(report.completed)
        if len(refused) > TASKS_PER_JOB_MAX:
            raise_first(problems)
    again = partial(_run_tasks, session, load_again, refused, dealing, completed, placed) if refused else None
    return LoadEnd(placed, problems, has_progressed, again)


def _raise_final(reports: Sequence[LoadReport]) -> None:
    """Raise the first error that no other rows can end, with all others in its details, if there is one."""
    final = [report for report in reports if report.problem and not report.may_be_accepted]
    if final:
        others = [report for report in reports if report.may_be_accepted]
        raise_first([problem for report in (*final, *others) for problem in report.problems])


def _load_images(session: SparkSession, images: Any, feeds: Mapping[int, Feed], spread: Spread) -> LoadEnd:
    @contextmanager
    def frame(left_out: Mapping[str, Refused] | None) -> Iterator[DataFrame]:
        def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _load_partition("images", batches, feeds, left_out)

        chosen = images.where(f"node IN ({_numbers(feeds)})").select("node", "group", "row", "key")
        parts = spread.divide(chosen, "`group`, key, row")
        if sum(len(target.groups) for feed in feeds.values() for target in feed.targets.values()) > MIXED_GROUPS_MAX:
            parts = parts.sortWithinPartitions("node", "group")
        yield map_batches(parts, load, LOADED_ROWS)

    return _run(session, frame)


def load_long_images(
    session: SparkSession,
    images: DataFrame,
    feeds: Mapping[int, Feed],
    spread: Spread,
    reader: LongImageReader,
) -> LoadEnd:
    """Load LONG_IMAGE_ROWS; each task reads the lines from their objects."""

    @contextmanager
    def frame(left_out: Mapping[str, Refused] | None) -> Iterator[DataFrame]:
        # Broadcast the reader: as part of a closure, the object lists of all nodes would be sent with every task.
        sent = broadcast(session, reader)

        def load(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _load_partition("long", sent.value.read_images(batches), feeds, left_out)

        try:
            chosen = order_by_place(images.where(f"node IN ({_numbers(feeds)})"), spread.divide)
            yield map_batches(chosen, load, LOADED_ROWS)
        finally:
            sent.unpersist()

    return _run(session, frame)


def _load_partition(
    kind: str,
    batches: Iterator[pa.RecordBatch],
    feeds: Mapping[int, Feed],
    left_out: Mapping[str, Refused] | None,
) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    task = f"{kind}-{context.partitionId() if context else 0}"
    yield from load_images(batches, feeds, task, None if left_out is None else left_out.get(task, {}))


def _numbers(feeds: Mapping[int, Feed]) -> str:
    return ", ".join(map(str, feeds))


def _run(
    session: SparkSession,
    frame: Callable[[Mapping[str, Refused] | None], AbstractContextManager[DataFrame]],
    *,
    is_again: bool = False,
) -> LoadEnd:
    """Load a frame; `frame` provides its LOADED_ROWS, given the tables to leave out of each task that is loaded again.

    Tasks that are done load nothing when the frame is loaded again.
    """
    left_out: dict[str, Refused] | None = {} if is_again else None
    has_progressed = False
    while True:
        with frame(left_out) as loaded, job_progress(session, Silent()):
            rows = loaded.collect()  # a row per partition
        reports = dict(reported(*row) for row in rows)
        _raise_final(list(reports.values()))
        has_progressed = has_progressed or any(report.has_progressed for report in reports.values())
        torn = {task: report.torn for task, report in reports.items() if report.torn}
        if left_out is None or not torn:
            break
        left_out |= torn
    problems = [problem for report in reports.values() for problem in report.problems]
    again = partial(_run, session, frame, is_again=True) if problems else None
    return LoadEnd(_sum_placed(report.placed for report in reports.values()), problems, has_progressed, again)


def _sum_placed(reports: Iterable[Mapping[int, int]]) -> Counter[int]:
    placed: Counter[int] = Counter()
    for report in reports:
        placed.update(report)
    return placed
