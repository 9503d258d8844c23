"""Completing partial images: which earlier images a row's unchanged values are found in, and merging them.

Only planned where changes left values out. A row may have lived under other keys before: an update that moved
it and left values unchanged says so, and its history is then looked for under the old key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snapshots.changed_keys import Keys
from snapshots.long_lines import NO_PLACE
from snapshots.merging import Images, merge
from snapshots.overlay import column_of, overlays
from snapshots.sources import PROBLEM, Sources
from wal.segment_schema import DELETE, PARTIAL, UPSERT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HISTORY_ROWS = "node int, `group` int, partition int, key binary, lsn bigint, row binary"
LINEAGE_SCHEMA = pa.schema(
    [
        pa.field("node", pa.int32()),
        pa.field("group", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("low_lsn", pa.int64()),
        pa.field("low_seq", pa.int64()),
        pa.field("high_lsn", pa.int64()),
        pa.field("high_seq", pa.int64()),
        pa.field("target", pa.binary()),
    ]
)
BEFORE_ALL, AFTER_ALL = (-2, 0), (1 << 62, 0)
BASE_LSN = -1
_Place = tuple[int, int]
_Row = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class CompletedImages:
    """Rows whose last image left values out: those completed already, and those that are when they are read.

    `histories` is what both are made from, to be forgotten in the end.
    """

    images: DataFrame
    long_images: DataFrame | None
    histories: DataFrame


def completed_images(
    spark: SparkSession,
    sources: Sources,
    base_rows: Callable[[Mapping[int, Mapping[int, Keys]]], DataFrame],
    changes: DataFrame,
    latest: DataFrame,
) -> CompletedImages:
    """HISTORY_ROWS of every key whose last image is partial, completed from its earlier ones, `base_rows` among them.

    Where one of the images is a long line they are LONG_IMAGE_ROWS. One that can't be completed, because an object it
    needs is damaged or the archive is not whole, is of group PROBLEM, its `partition` the group.
    """
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    wanted = latest.where(f"op = {PARTIAL}").select("node", "group", "partition", "key").toArrow()
    moves = changes.where(f"op = {DELETE} AND length(row) > 0").select("node", "group", "key", "row", "lsn", "seq")
    lineage = lineage_of(wanted, moves.toArrow())
    found = spark.createDataFrame(lineage)
    keys = lineage.select(["node", "group", "key"]).group_by(["node", "group", "key"]).aggregate([])
    base = base_rows(overlays(keys))
    base = base.selectExpr(
        "node", "`group`", "key", f"{BASE_LSN}L AS lsn", "0L AS seq", f"{UPSERT}Y AS op", "row", "place"
    )
    images = changes.select("node", "group", "key", "lsn", "seq", "op", "row", "place").unionByName(base)
    place, low, high = (F.struct(f"{n}lsn", f"{n}seq") for n in ("", "low_", "high_"))
    mine = images.join(F.broadcast(found), ["node", "group", "key"]).where((place >= low) & (place < high))
    line = F.when(F.col("op") == DELETE, F.lit(b"")).otherwise(F.col("row"))
    history = mine.groupBy("node", "group", "target").agg(
        F.array_sort(F.collect_list(F.struct("lsn", "seq", line.alias("line"), "place"))).alias("images")
    )
    targets = latest.where(f"op = {PARTIAL}").selectExpr("node", "`group`", "partition", "key AS target", "lsn")
    histories = targets.join(history, ["node", "group", "target"], "left").persist()
    has_long_lines = f"coalesce(exists(images, one -> one.place <> {NO_PLACE}), false)"
    ready = histories.where(f"NOT {has_long_lines}")
    counts = dict(sources.column_counts)

    def complete(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _completed(batch, counts)

    lines = ready.selectExpr("node", "`group`", "partition", "target", "lsn", "images.line AS lines")
    completed = lines.mapInArrow(complete, HISTORY_ROWS)
    placed = "transform(images, one -> named_struct('line', one.line, 'place', one.place)) AS lines"
    away = histories.where(has_long_lines)
    away = away.selectExpr("node", "`group`", "partition", "target AS key", "lsn", placed)
    return CompletedImages(completed, None if away.isEmpty() else away, histories)


def lineage_of(wanted: pa.Table, moves: pa.Table) -> pa.Table:
    """LINEAGE_SCHEMA: under which keys, and from when to when, each wanted row lived.

    Bounded by the wanted keys and by the moves that left values out, which are rare.
    """
    arrived: dict[_Row, list[tuple[_Place, bytes]]] = {}
    for move in moves.to_pylist():
        at = (move["node"], move["group"], move["row"])
        arrived.setdefault(at, []).append(((move["lsn"], move["seq"]), move["key"]))
    for found in arrived.values():
        found.sort()
    rows: list[tuple[Any, ...]] = []
    for one in wanted.select(["node", "group", "key"]).to_pylist():
        node, group, key, high = one["node"], one["group"], one["key"], AFTER_ALL
        while True:
            before = [entry for entry in arrived.get((node, group, key), ()) if entry[0] < high]
            low = before[-1][0] if before else BEFORE_ALL
            rows.append((node, group, key, *low, *high, one["key"]))
            if not before:
                break
            high, key = before[-1]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(LINEAGE_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LINEAGE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=LINEAGE_SCHEMA)


def _completed(batch: pa.RecordBatch, counts: Mapping[tuple[int, int], int]) -> Iterator[pa.RecordBatch]:
    node = np.asarray(batch.column("node").to_numpy())
    group = np.asarray(batch.column("group").to_numpy())
    for place in sorted({(int(n), int(g)) for n, g in zip(node, group, strict=True)}):
        rows = batch.filter(pa.array((node == place[0]) & (group == place[1])))
        lists = rows.column("lines")
        lines = column_of(lists.flatten().fill_null(b""))
        sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        merged, complete = merge(Images(lines, offsets), counts[place])
        names = ["node", "group", "partition", "key", "lsn", "row"]
        columns = [rows.column(name) for name in ("node", "group", "partition", "target", "lsn")]
        if not complete.all():
            columns[2] = pc.if_else(pa.array(complete), columns[2], columns[1])
            columns[1] = pc.if_else(pa.array(complete), columns[1], pa.scalar(PROBLEM, pa.int32()))
        yield pa.record_batch([*columns, merged.to_arrow()], names=names)
