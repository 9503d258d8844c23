"""Compare the global transactions that pairs of primaries share.

A transaction with parts on two nodes belongs to the state at the cut on both or on neither. A part is a prepared
transaction, or a transaction that was committed in one phase and tagged with the global id. Each node's parts are
hashed separately; transactions are listed only where the hashes differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.check.cuts import StoredEvents
from cutline.check.hashing import hash_aggregates
from cutline.check.report import Conflict
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import runs
from cutline.columns.python_workers import broadcast, map_batches
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.changes import TASKS_PER_CORE, balance_by_size
from cutline.snapshots.fold.sources import SegmentSource
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import COMMIT, PREPARE, read_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART_ROWS = "node int, global_id string, included boolean"
PART_SCHEMA = pa.schema([("node", pa.int32()), ("global_id", pa.string()), ("included", pa.bool_())])
PAIR_ORDER = ("node", "other", "global_id")
NAMED_MAX = 100
PAIRS_AT_ONCE = 1 << 20

# An unreadable object is represented as a transaction shared by these two nodes, so that its report survives the join.
UNREAD_NODES = (-2, -1)


@dataclass(frozen=True, slots=True)
class ComparedParts:
    """The parts of one node's transactions that an earlier check has not compared.

    These are all parts in `new_segments`, the parts in other segments at or after `checked_to`, and the parts that the
    cut that was checked left undecided: `undecided` has their global ids, and whether the state now contains them.
    """

    checked_to: Lsn
    new_segments: Set[str]
    undecided: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class PairReport:
    """The number of shared transactions compared, the conflicts between nodes, and errors for unreadable objects."""

    transactions: int
    conflicts: list[Conflict]
    problems: list[ErrorReport]


def compare_pairs(
    spark: SparkSource,
    nodes: tuple[str, ...],
    segments: tuple[SegmentSource, ...],
    store: StoreLocation,
    events: StoredEvents | None = None,
    compared: Mapping[int, ComparedParts] = MappingProxyType({}),
) -> PairReport:
    """Compare the parts of every transaction that two of the primaries share.

    Runs in the driver if it has the `events` in memory, otherwise as a Spark job. With `compared`, by node number, only
    these parts are compared.
    """
    if len(nodes) < 2 or not segments:
        return PairReport(0, [], [])
    if events:
        return _compare_held(nodes, segments, events, compared)
    return _compare_in_job(spark.session(), nodes, segments, store, compared)


def _compare_held(
    nodes: tuple[str, ...],
    segments: tuple[SegmentSource, ...],
    events: StoredEvents,
    compared: Mapping[int, ComparedParts],
) -> PairReport:
    parts = [_undecided_parts(compared)]
    try:
        for segment in segments:
            parts += _part_batches(segment, events.read(segment.segment), compared.get(segment.source.number))
    except SnapshotError as error:
        return PairReport(0, [], [report_of(error)])
    names = ["global_id", "node"]
    by_node = (
        pa.Table.from_batches(parts, PART_SCHEMA)
        .group_by(names)
        .aggregate([("included", "max")])
        .select([*names, "included_max"])
        .rename_columns([*names, "included"])
    )
    counted = by_node.group_by("global_id").aggregate([("node", "count"), ("included", "min"), ("included", "max")])
    count = to_numpy(counted["node_count"]).astype(np.int64)
    torn = counted.filter(pc.field("included_min") != pc.field("included_max"))
    conflicts = [_torn_conflict(nodes, row) for row in _torn_pairs(by_node, torn).to_pylist()]
    return PairReport(int((count * (count - 1) // 2).sum()), conflicts, [])


def _torn_pairs(by_node: pa.Table, torn: pa.Table) -> pa.Table:
    """Return the first NAMED_MAX transactions that differ between each pair of nodes, in PAIR_ORDER.

    `by_node` contains the parts, and `torn` the transactions (global_id, node_count) that differ. Holds about
    PAIRS_AT_ONCE pairs in memory, plus up to NAMED_MAX rows for each pair of nodes.
    """
    named: list[pa.Table] = []
    at = np.cumsum(to_numpy(torn["node_count"]).astype(np.int64) ** 2) // PAIRS_AT_ONCE
    for rows in runs(at):
        chosen = torn.slice(rows.start, rows.stop - rows.start)["global_id"].combine_chunks()
        here = by_node.filter(pc.is_in(by_node["global_id"], chosen)).rename_columns(["global_id", "node", "here"])
        there = here.rename_columns(["global_id", "other", "there"])
        pairs = here.join(there, "global_id", join_type="inner").filter(
            (pc.field("node") < pc.field("other")) & (pc.field("here") != pc.field("there"))
        )
        named = [_first_of_pairs(pa.concat_tables([*named, pairs]))]
    return named[0] if named else by_node.slice(0, 0)


def _first_of_pairs(pairs: pa.Table) -> pa.Table:
    """Return the first NAMED_MAX rows for each pair of nodes, in PAIR_ORDER."""
    pairs = pairs.sort_by([(name, "ascending") for name in PAIR_ORDER])
    pair = (to_numpy(pairs["node"]).astype(np.int64) << 32) + to_numpy(pairs["other"])
    first = np.flatnonzero(np.concatenate([[True], pair[1:] != pair[:-1]])) if len(pair) else np.zeros(0, np.int64)
    place = np.arange(len(pair)) - np.repeat(first, np.diff(np.append(first, len(pair))))
    return pairs.filter(to_mask(place < NAMED_MAX))


def _compare_in_job(
    spark: SparkSession,
    nodes: tuple[str, ...],
    segments: tuple[SegmentSource, ...],
    store: StoreLocation,
    compared: Mapping[int, ComparedParts],
) -> PairReport:
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    found = read_parts(spark, segments, store, compared)
    if len(undecided := _undecided_parts(compared)):
        found = found.unionByName(spark.createDataFrame(pa.Table.from_batches([undecided])))
    parts = found.groupBy("global_id", "node").agg(F.max("included").alias("included"))
    pairs = pair_up(parts).persist()
    hashed = F.xxhash64("global_id")
    sides = pairs.groupBy("node", "other").agg(
        F.count(F.lit(1)).alias("shared"),
        *hash_aggregates(hashed, "left_", F.col("here")),
        *hash_aggregates(hashed, "right_", F.col("there")),
    )
    conflicts: list[Conflict] = []
    problems: list[ErrorReport] = []
    shared = 0
    for row in sides.orderBy("node", "other").collect():  # bounded by the pairs of primaries
        if row["node"] == UNREAD_NODES[0]:
            unread = pairs.where(F.col("node") == row["node"]).collect()  # bounded by the objects
            problems += [json.loads(pair["global_id"]) for pair in unread]
            continue
        shared += row["shared"]
        if any(row[f"left_{name}"] != row[f"right_{name}"] for name in ("count", "xor", "low", "high")):
            chosen = (F.col("node") == row["node"]) & (F.col("other") == row["other"])
            torn = pairs.where(chosen & (F.col("here") != F.col("there"))).orderBy("global_id")
            conflicts += [_torn_conflict(nodes, pair) for pair in torn.limit(NAMED_MAX).collect()]
    pairs.unpersist()
    return PairReport(shared, conflicts, problems)


def pair_up(parts: DataFrame) -> DataFrame:
    """Join PART_ROWS (one row per node and transaction) into pairs: node, other, global_id, here, there."""
    left = parts.selectExpr("global_id", "node", "included AS here")
    right = parts.selectExpr("global_id", "node AS other", "included AS there")
    return left.join(right, "global_id").where("node < other")


def read_parts(
    spark: SparkSession,
    segments: tuple[SegmentSource, ...],
    store: StoreLocation,
    compared: Mapping[int, ComparedParts] = MappingProxyType({}),
) -> DataFrame:
    """Read the segments' PART_ROWS; for UNREAD_NODES, `global_id` is the error report on an unreadable segment."""
    tasks = min(len(segments), TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    listed = broadcast(spark, balance_by_size(segments, tasks))
    limits = dict(compared)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                segment = listed.value[number]
                try:
                    events = read_events(store.open(), segment.segment)
                    yield from _part_batches(segment, events, limits.get(segment.source.number))
                except SnapshotError as error:
                    yield pa.record_batch(
                        [pa.array(UNREAD_NODES, pa.int32()), [json.dumps(report_of(error))] * 2, [True, True]],
                        names=["node", "global_id", "included"],
                    )

    return map_batches(spark.range(0, len(segments), 1, tasks), read, PART_ROWS)


def _part_batches(
    segment: SegmentSource, events: pa.Table, compared: ComparedParts | None = None
) -> Iterator[pa.RecordBatch]:
    op = np.asarray(events["op"].to_numpy())
    is_part = (op == PREPARE) | (op == COMMIT)
    if compared is not None and segment.source.key not in compared.new_segments:
        is_part &= np.asarray(events["lsn"].to_numpy()) >= compared.checked_to
    # Most commits are local to one node and have no global id.
    events = events.filter(pa.array(is_part)).filter(pc.field("global_id").is_valid())
    lsn = np.asarray(events["lsn"].to_numpy())
    included = lsn < segment.position
    if segment.excluded:
        included &= ~np.isin(lsn, np.fromiter(segment.excluded, np.int64))
    node = np.full(len(events), segment.source.number, np.int32)
    table = pa.table([node, events["global_id"], included], schema=PART_SCHEMA)
    yield from table.to_batches()


def _undecided_parts(compared: Mapping[int, ComparedParts]) -> pa.RecordBatch:
    """Return the parts that were undecided at the cut that was checked (PART_SCHEMA)."""
    rows = [(number, *part) for number, parts in compared.items() for part in parts.undecided]
    columns = [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(PART_SCHEMA)]
    return pa.RecordBatch.from_arrays(columns, schema=PART_SCHEMA)


def _torn_conflict(nodes: tuple[str, ...], row: Any) -> Conflict:
    here, there = nodes[row["node"]], nodes[row["other"]]
    has, lacks = (here, there) if row["here"] else (there, here)
    return Conflict(
        "transaction",
        f"it is included in the state on {has}, but not in the state on {lacks}",
        node=here,
        other_node=there,
        global_id=row["global_id"],
    )
