"""Completing partial images: which earlier images a row's unchanged values are found in, and merging them.

Only planned where changes left values out. A row may have lived under other keys before: an update that moved
it and left values unchanged says so, and its history is then looked for under the old key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from columns.arrow_numbers import to_arrow, to_numpy
from columns.bytes_column import Ints, column_of
from snapshots.fold.changed_keys import Keys, collect_changed_keys
from snapshots.fold.long_lines import NO_PLACE
from snapshots.fold.merging import Images, merge
from snapshots.fold.sources import PROBLEM, Sources
from wal.segments.segment_schema import DELETE, PARTIAL, UPSERT

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
_ENDS = (
    (BEFORE_ALL[0], "low_lsn"),
    (BEFORE_ALL[1], "low_seq"),
    (AFTER_ALL[0], "high_lsn"),
    (AFTER_ALL[1], "high_seq"),
)
# What Spark collects on the driver to send it to every executor; a row more is shuffled.
BROADCAST_KEYS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class CompletedImages:
    """Rows whose last image left values out: those completed already, and those that are when they are read.

    `histories` is what both are made from, to be forgotten in the end.
    """

    images: DataFrame
    long_images: DataFrame | None
    histories: DataFrame


def complete_images(
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

    wanted = latest.where(f"op = {PARTIAL}").select("node", "group", "key", "op", "place")
    found, count, keys = _lineage(spark, wanted, _moves(changes, sources.multisets), sources.changes)
    base = base_rows(keys)
    base = base.selectExpr(
        "node", "`group`", "key", f"{BASE_LSN}L AS lsn", "0L AS seq", f"{UPSERT}Y AS op", "row", "place"
    )
    images = changes.select("node", "group", "key", "lsn", "seq", "op", "row", "place").unionByName(base)
    place, low, high = (F.struct(f"{n}lsn", f"{n}seq") for n in ("", "low_", "high_"))
    if count <= BROADCAST_KEYS_MAX:
        found = F.broadcast(found)
    mine = images.join(found, ["node", "group", "key"]).where((place >= low) & (place < high))
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
            yield from _complete(batch, counts)

    lines = ready.selectExpr("node", "`group`", "partition", "target", "lsn", "images.line AS lines")
    completed = lines.mapInArrow(complete, HISTORY_ROWS)
    placed = "transform(images, one -> named_struct('line', one.line, 'place', one.place)) AS lines"
    away = histories.where(has_long_lines)
    away = away.selectExpr("node", "`group`", "partition", "target AS key", "lsn", placed)
    return CompletedImages(completed, None if away.isEmpty() else away, histories)


def _moves(changes: DataFrame, multisets: Collection[int]) -> DataFrame:
    """The updates that gave a row another key and left values out: its `key` before, and as `row` the one since."""
    moves = changes.where(f"op = {DELETE} AND length(row) > 0 AND `group` <> {PROBLEM}")
    if multisets:
        # There a row that is gone is known by its line.
        moves = moves.where(f"`group` NOT IN ({', '.join(map(str, sorted(multisets)))})")
    # The line of the new key, which may be empty itself.
    return moves.selectExpr("node", "`group`", "key", "substring(row, 1, length(row) - 1) AS row", "lsn", "seq")


def _lineage(
    spark: SparkSession, wanted: DataFrame, moves: DataFrame, changes: int
) -> tuple[DataFrame, int, Mapping[int, Mapping[int, Keys]]]:
    """The lineage of all `wanted` rows, how many entries it has at most, and the keys in it; of so many `changes`.

    The driver holds the moves alone, and of the wanted keys those that a row moved to.
    """
    own = ["node", "`group`", "key", *(f"{value}L AS {name}" for value, name in _ENDS), "key AS target"]
    moved = moves.toArrow()
    if len(moved) == 0:
        found = collect_changed_keys(wanted, changes)
        return wanted.selectExpr(*own), found.count, found.keys
    arrived = moves.selectExpr("node", "`group`", "row AS key").distinct()
    names = ["node", "group", "key"]
    lineage = lineage_of(wanted.select(*names).join(arrived, names, "left_semi").toArrow(), moved)
    stayed = wanted.join(arrived, names, "left_anti")
    entries = spark.createDataFrame(lineage).unionByName(stayed.selectExpr(*own))
    earlier = entries.select(*names).distinct().selectExpr("*", f"{PARTIAL}Y AS op", f"{NO_PLACE}L AS place")
    found = collect_changed_keys(earlier, 2 * changes)
    # A key may have been several rows' in turn.
    return entries, found.count + len(lineage), found.keys


def lineage_of(wanted: pa.Table, moves: pa.Table) -> pa.Table:
    """LINEAGE_SCHEMA: under which keys, and from when to when, each wanted row lived.

    Takes some 700 bytes for each move, tables included (measured with a million of them, keys of 16 bytes); the loop is
    as long as the longest way of a row.
    """
    names = ["node", "group", "key"]
    arrivals = moves.select(["node", "group", "row"]).rename_columns(names)
    places = pa.concat_tables([wanted.select(names), arrivals, moves.select(names)])
    code = _codes(places)
    target, at, came_from = np.split(code, [len(wanted), len(wanted) + len(moves)])
    lsn, seq = to_numpy(moves["lsn"]), to_numpy(moves["seq"])
    order = np.lexsort((seq, lsn))
    rank = np.empty(len(moves), np.int64)
    rank[order] = np.arange(len(moves))
    # The arrivals at a key stand side by side, the later ones behind.
    by_key = np.lexsort((rank, at))
    index = at[by_key] * (len(moves) + 1) + rank[by_key]
    row, here, until = np.arange(len(wanted)), target, np.full(len(wanted), len(moves))
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    while len(row):
        last = np.searchsorted(index, here * (len(moves) + 1) + until) - 1
        move = by_key[last] if len(moves) else last
        has_come = (last >= 0) & (at[move] == here) if len(moves) else last >= 0
        parts.append((row, here, np.where(has_come, move, -1), until))
        row, move = row[has_come], move[has_come]
        here, until = came_from[move], rank[move]
    return _entries(parts, places, code, (lsn, seq, order))


def _codes(places: pa.Table) -> Ints:
    """For every row a number, equal where node, group and key are."""
    node, group = (to_numpy(places[name]).astype(np.int64) for name in ("node", "group"))
    key = pc.dictionary_encode(places["key"].cast(pa.large_binary()).combine_chunks())
    columns = (np.asarray(key.indices.to_numpy(), np.int64), group, node)
    order = np.lexsort(columns)
    is_new = np.zeros(len(order), np.bool_)
    for column in columns:
        is_new[1:] |= column[order][1:] != column[order][:-1]
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def _entries(
    parts: list[tuple[Ints, Ints, Ints, Ints]], places: pa.Table, code: Ints, moved: tuple[Ints, Ints, Ints]
) -> pa.Table:
    """LINEAGE_SCHEMA of entries: the wanted row, the code of a key, the move there or -1, the rank of the next."""
    if not parts:
        return LINEAGE_SCHEMA.empty_table()
    row, here, move, until = (np.concatenate(column) for column in zip(*parts, strict=True))
    lsn, seq, order = moved
    # Behind the last one: -1 for what never came, and the rank after all.
    low_lsn, low_seq = np.append(lsn, BEFORE_ALL[0])[move], np.append(seq, BEFORE_ALL[1])[move]
    last = np.append(order, len(lsn))[until]
    high_lsn, high_seq = np.append(lsn, AFTER_ALL[0])[last], np.append(seq, AFTER_ALL[1])[last]
    first = np.zeros(int(code.max()) + 1, np.int64)
    first[code] = np.arange(len(code))
    found = places.take(pa.array(first[here]))
    numbers = [to_arrow(values.astype(np.int64)) for values in (low_lsn, low_seq, high_lsn, high_seq)]
    columns = [found["node"], found["group"], found["key"], *numbers, places["key"].take(pa.array(row))]
    return pa.table(columns, names=LINEAGE_SCHEMA.names).cast(LINEAGE_SCHEMA)


def _complete(batch: pa.RecordBatch, counts: Mapping[tuple[int, int], int]) -> Iterator[pa.RecordBatch]:
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
