"""Complete partial images: find the earlier images of their keys, and fill in the values that an UPDATE left unchanged.

The input is each row's images, from oldest to newest. For each field of a row, the newest image that has its value is
found for all rows at once.

A fold includes this step only if there are partial images. A row may previously have had a different key. An UPDATE
that changed its key and left values unchanged (a *move*) records both keys, so the earlier images are looked up under
the old key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow, to_numpy
from cutline.columns.bytes_column import BytesColumn, Ints, column_of, gather
from cutline.columns.lines import NEWLINE, TAB, UNCHANGED_MARK, concatenate
from cutline.columns.python_workers import local_frame, map_batches
from cutline.snapshots.fold.changed_keys import Keys, collect_changed_keys
from cutline.snapshots.fold.long_lines import NO_PLACE
from cutline.snapshots.fold.sources import PROBLEM, Sources
from cutline.wal.segments.segments import DELETE, PARTIAL, UPSERT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# The most fields that are merged at the same time, if there are many images.
MERGED_FIELDS_MAX = 1 << 20


class Images(Struct, frozen=True):
    """The images of n rows, oldest first: those of row i begin at `offsets[i]` and end before `offsets[i + 1]`.

    The image of a deleted row has a line of length 0.
    """

    lines: BytesColumn
    offsets: Ints


def merge(images: Images, column_count: int) -> tuple[BytesColumn, npt.NDArray[np.bool_]]:
    """Complete the newest image of every row; also return flags marking the rows that could be completed.

    Takes about 30 bytes of memory for each field of the images. Raises ValueError if a row has no image.
    """
    if (np.diff(images.offsets) == 0).any():
        raise ValueError("a row has no image")
    newest = images.offsets[1:] - 1
    starts, lengths = _fields(images.lines, column_count)
    has_value = ~_is_unchanged(images.lines, starts, lengths) & _can_complete(images)[:, None]
    number = np.where(has_value, np.arange(len(images.lines))[:, None], -1)
    # For each field of a row, the newest image that has its value.
    source = np.maximum.reduceat(number, images.offsets[:-1], axis=0) if len(newest) else number
    lacking = source < 0
    source = np.where(lacking, newest[:, None], source)
    fields = (np.take_along_axis(values, source, axis=0) for values in (starts, lengths))
    return _lines(images.lines, *fields), np.logical_not(np.any(lacking, axis=1))


def merge_in_blocks(images: Images, column_count: int) -> tuple[BytesColumn, npt.NDArray[np.bool_]]:
    """Do the same as `merge`, in memory for MERGED_FIELDS_MAX fields in addition to the lines; no image is deleted."""
    images_max = max(MERGED_FIELDS_MAX // max(column_count, 1), 2)
    while np.diff(images.offsets).max(initial=0) > images_max:
        # Merge every run of images first: it serves as a single image.
        low, high = images.offsets[:-1], images.offsets[1:]
        long = np.flatnonzero(high - low > images_max)
        cut = [np.arange(low[row] + images_max, high[row], images_max) for row in long]
        bounds = np.sort(np.concatenate([images.offsets, *cut]))
        lines, _ = _merge_blocks(Images(images.lines, bounds), column_count, images_max)
        images = Images(lines, np.searchsorted(bounds, images.offsets))
    return _merge_blocks(images, column_count, images_max)


def _merge_blocks(images: Images, column_count: int, images_max: int) -> tuple[BytesColumn, npt.NDArray[np.bool_]]:
    """Merge blocks of rows with at most `images_max` images together; no row has more."""
    offsets, merged, complete = images.offsets, [], [np.zeros(0, np.bool_)]
    first = 0
    while first < len(offsets) - 1:
        last = int(np.searchsorted(offsets, offsets[first] + images_max, side="right")) - 1
        rows = slice(int(offsets[first]), int(offsets[last]))
        block = Images(images.lines.part(rows), offsets[first : last + 1] - offsets[first])
        lines, are_complete = merge(block, column_count)
        merged.append(lines)
        complete.append(are_complete)
        first = last
    return concatenate(merged), np.concatenate(complete)


def _can_complete(images: Images) -> npt.NDArray[np.bool_]:
    """Flag the images that may have values of their row's newest image: a deleted row has no earlier values."""
    deleted = np.flatnonzero(images.lines.lengths == 0)
    if len(deleted) == 0:
        return np.ones(len(images.lines), np.bool_)
    last = np.concatenate([[-1], deleted])[np.searchsorted(deleted, images.offsets[1:])]
    after: npt.NDArray[np.bool_] = np.arange(len(images.lines)) > np.repeat(last, np.diff(images.offsets))
    return after


def _fields(lines: BytesColumn, column_count: int) -> tuple[Ints, Ints]:
    """Return the starts and lengths of each line's fields; lines of length 0 have no fields."""
    present = np.flatnonzero(lines.lengths > 0)
    starts = np.zeros((len(lines), column_count), np.int64)
    lengths = np.zeros((len(lines), column_count), np.int64)
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    tabs = first + np.flatnonzero(lines.data[first:last] == TAB).reshape(len(present), column_count - 1)
    begins = np.concatenate([lines.offsets[:-1][present, None], tabs + 1], axis=1)
    ends = np.concatenate([tabs, lines.offsets[1:][present, None] - 1], axis=1)
    starts[present], lengths[present] = begins, ends - begins
    return starts, lengths


def _is_unchanged(lines: BytesColumn, starts: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
    first, second = UNCHANGED_MARK
    last = max(len(lines.data) - 1, 0)
    is_mark: npt.NDArray[np.bool_] = (lengths == len(UNCHANGED_MARK)) & (lines.data[np.minimum(starts, last)] == first)
    is_mark &= lines.data[np.minimum(starts + 1, last)] == second
    return is_mark


def _lines(lines: BytesColumn, starts: Ints, lengths: Ints) -> BytesColumn:
    rows, width = starts.shape
    source = np.concatenate([lines.data, np.array([TAB, NEWLINE], np.uint8)])
    piece_starts = np.empty((rows, 2 * width), np.int64)
    piece_lengths = np.ones((rows, 2 * width), np.int64)
    piece_starts[:, ::2], piece_lengths[:, ::2] = starts, lengths
    piece_starts[:, 1::2] = len(lines.data)
    piece_starts[:, -1] = len(lines.data) + 1
    pieces = gather(source, piece_starts.reshape(-1), piece_lengths.reshape(-1))
    return BytesColumn(pieces.data, np.ascontiguousarray(pieces.offsets[:: 2 * width]))


COMPLETED_ROWS = "node int, `group` int, partition int, key binary, lsn bigint, row binary"
KEY_HISTORY_SCHEMA = pa.schema(
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
# Up to this number of entries, Spark broadcasts the history through the driver. A larger history is shuffled.
BROADCAST_KEYS_MAX = 100_000


class KeyHistory(Struct, frozen=True):
    """The keys under which rows were stored, and the period of each.

    `entries` (KEY_HISTORY_SCHEMA) has at most `count` rows; `keys` are the keys in it.
    """

    entries: DataFrame
    count: int
    keys: Mapping[int, Mapping[int, Keys]]


class _Moves(NamedTuple):
    """The positions of all moves, and the moves in order of position."""

    lsn: Ints
    seq: Ints
    order: Ints


class _Step(NamedTuple):
    """One step back for several rows: the row, the code of its key, and the move to that key (-1 if there is no move).

    `until` is the rank of the move away from the key, or the number of moves if the row did not move away.
    """

    row: Ints
    key_code: Ints
    move: Ints
    until: Ints


class CompletedImages(Struct, frozen=True):
    """Rows whose last image is partial: `images` are complete, `long_images` are completed when they are read.

    Both are computed from `image_lists`, which is cached and which the caller must release.
    """

    images: DataFrame
    long_images: DataFrame | None
    image_lists: DataFrame


def complete_images(
    spark: SparkSession,
    sources: Sources,
    base_rows: Callable[[Mapping[int, Mapping[int, Keys]]], DataFrame],
    changes: DataFrame,
    latest: DataFrame,
) -> CompletedImages:
    """Fill in the missing values in partial last images from earlier images and `base_rows`.

    The results are COMPLETED_ROWS, or LONG_IMAGE_ROWS if one of a row's images has a long line. An image that can't be
    completed, because an object is damaged or the archive has a gap, is put in the PROBLEM group, with its own group in
    `partition`.
    """
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    wanted = latest.where(f"op = {PARTIAL}").select("node", "group", "key", "op", "place")
    history = _find_key_history(spark, wanted, _moves(changes, sources.multisets), sources.changes)
    base = base_rows(history.keys)
    base = base.selectExpr(
        "node", "`group`", "key", f"{BASE_LSN}L AS lsn", "0L AS seq", f"{UPSERT}Y AS op", "row", "place"
    )
    images = changes.select("node", "group", "key", "lsn", "seq", "op", "row", "place").unionByName(base)
    position, low, high = (F.struct(f"{n}lsn", f"{n}seq") for n in ("", "low_", "high_"))
    entries = F.broadcast(history.entries) if history.count <= BROADCAST_KEYS_MAX else history.entries
    own = images.join(entries, ["node", "group", "key"]).where((position >= low) & (position < high))
    line = F.when(F.col("op") == DELETE, F.lit(b"")).otherwise(F.col("row"))
    collected = own.groupBy("node", "group", "target").agg(
        F.array_sort(F.collect_list(F.struct("lsn", "seq", line.alias("line"), "place"))).alias("images")
    )
    targets = latest.where(f"op = {PARTIAL}").selectExpr("node", "`group`", "partition", "key AS target", "lsn")
    image_lists = targets.join(collected, ["node", "group", "target"], "left").persist()
    has_long_lines = f"coalesce(exists(images, one -> one.place <> {NO_PLACE}), false)"
    ready = image_lists.where(f"NOT {has_long_lines}")
    counts = dict(sources.column_counts)

    def complete(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _complete(batch, counts)

    lines = ready.selectExpr("node", "`group`", "partition", "target", "lsn", "images.line AS lines")
    completed = map_batches(lines, complete, COMPLETED_ROWS)
    with_places = "transform(images, one -> named_struct('line', one.line, 'place', one.place)) AS lines"
    remote = image_lists.where(has_long_lines)
    remote = remote.selectExpr("node", "`group`", "partition", "target AS key", "lsn", with_places)
    return CompletedImages(completed, None if remote.isEmpty() else remote, image_lists)


def _moves(changes: DataFrame, multisets: Collection[int]) -> DataFrame:
    """Select the moves among the changes: `key` is the old key, and `row` is the new key."""
    moves = changes.where(f"op = {DELETE} AND length(row) > 0 AND `group` <> {PROBLEM}")
    if multisets:
        # In these groups, the `row` of a DELETE is the line of the deleted row.
        moves = moves.where(f"`group` NOT IN ({', '.join(map(str, sorted(multisets)))})")
    # `row` is the new key as a line, because a key may be empty; drop the newline.
    return moves.selectExpr("node", "`group`", "key", "substring(row, 1, length(row) - 1) AS row", "lsn", "seq")


def _find_key_history(spark: SparkSession, wanted: DataFrame, moves: DataFrame, changes: int) -> KeyHistory:
    """Find the key history of all `wanted` rows; `changes` is an upper bound on their number.

    The driver holds only the moves, and the wanted keys that a row moved to.
    """
    own = ["node", "`group`", "key", *(f"{value}L AS {name}" for value, name in _ENDS), "key AS target"]
    moved = moves.toArrow()
    if len(moved) == 0:
        changed = collect_changed_keys(wanted, changes)
        return KeyHistory(wanted.selectExpr(*own), changed.count, changed.keys)
    arrived = moves.selectExpr("node", "`group`", "row AS key").distinct()
    names = ["node", "group", "key"]
    history = build_key_history(wanted.select(*names).join(arrived, names, "left_semi").toArrow(), moved)
    stayed = wanted.join(arrived, names, "left_anti")
    entries = local_frame(spark, history).unionByName(stayed.selectExpr(*own))
    earlier = entries.select(*names).distinct().selectExpr("*", f"{PARTIAL}Y AS op", f"{NO_PLACE}L AS place")
    changed = collect_changed_keys(earlier, 2 * changes)
    # Several rows may have had the same key at different times.
    return KeyHistory(entries, changed.count + len(history), changed.keys)


def build_key_history(wanted: pa.Table, moves: pa.Table) -> pa.Table:
    """Compute the keys under which each wanted row was stored, and the period of each, as KEY_HISTORY_SCHEMA.

    Takes about 700 bytes per move, including the tables (measured with a million moves and 16-byte keys). The number of
    iterations is the largest number of moves that any row made.
    """
    names = ["node", "group", "key"]
    arrivals = moves.select(["node", "group", "row"]).rename_columns(names)
    keys_of_rows = pa.concat_tables([wanted.select(names), arrivals, moves.select(names)])
    code = number_rows(keys_of_rows["key"], *(to_numpy(keys_of_rows[name]) for name in ("group", "node")))
    target, at, came_from = np.split(code, [len(wanted), len(wanted) + len(moves)])
    lsn, seq = to_numpy(moves["lsn"]), to_numpy(moves["seq"])
    order = np.lexsort((seq, lsn))
    rank = np.empty(len(moves), np.int64)
    rank[order] = np.arange(len(moves))
    # Sort the arrivals at the same key by time.
    by_key = np.lexsort((rank, at))
    index = at[by_key] * (len(moves) + 1) + rank[by_key]
    row, here, until = np.arange(len(wanted)), target, np.full(len(wanted), len(moves))
    steps: list[_Step] = []
    while len(row):
        last = np.searchsorted(index, here * (len(moves) + 1) + until) - 1
        move = by_key[last] if len(moves) else last
        arrived = (last >= 0) & (at[move] == here) if len(moves) else last >= 0
        steps.append(_Step(row, here, np.where(arrived, move, -1), until))
        row, move = row[arrived], move[arrived]
        here, until = came_from[move], rank[move]
    return _build_entries(steps, keys_of_rows, code, _Moves(lsn, seq, order))


def number_rows(values: pa.ChunkedArray, *numbers: npt.NDArray[Any]) -> Ints:
    """Number the rows: rows with the same value and the same numbers get the same number, from 0 on."""
    value = pc.dictionary_encode(values.cast(pa.large_binary()).combine_chunks())
    columns = (np.asarray(value.indices.to_numpy(), np.int64), *numbers)
    order = np.lexsort(columns)
    is_new = np.zeros(len(order), np.bool_)
    for column in columns:
        is_new[1:] |= column[order][1:] != column[order][:-1]
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def _build_entries(steps: list[_Step], keys_of_rows: pa.Table, code: Ints, moves: _Moves) -> pa.Table:
    if not steps:
        return KEY_HISTORY_SCHEMA.empty_table()
    row, here, move, until = (np.concatenate(column) for column in zip(*steps, strict=True))
    # The appended value stands for "no move": `move` refers to it as -1, `until` as the number of moves.
    low_lsn, low_seq = np.append(moves.lsn, BEFORE_ALL[0])[move], np.append(moves.seq, BEFORE_ALL[1])[move]
    last = np.append(moves.order, len(moves.lsn))[until]
    high_lsn, high_seq = np.append(moves.lsn, AFTER_ALL[0])[last], np.append(moves.seq, AFTER_ALL[1])[last]
    first = np.zeros(int(code.max()) + 1, np.int64)
    first[code] = np.arange(len(code))
    keys = keys_of_rows.take(pa.array(first[here]))
    numbers = [to_arrow(values.astype(np.int64)) for values in (low_lsn, low_seq, high_lsn, high_seq)]
    columns = [keys["node"], keys["group"], keys["key"], *numbers, keys_of_rows["key"].take(pa.array(row))]
    return pa.table(columns, names=KEY_HISTORY_SCHEMA.names).cast(KEY_HISTORY_SCHEMA)


def _complete(batch: pa.RecordBatch, counts: Mapping[tuple[int, int], int]) -> Iterator[pa.RecordBatch]:
    node = np.asarray(batch.column("node").to_numpy())
    group = np.asarray(batch.column("group").to_numpy())
    for copy in sorted({(int(n), int(g)) for n, g in zip(node, group, strict=True)}):
        rows = batch.filter(pa.array((node == copy[0]) & (group == copy[1])))
        lists = rows.column("lines")
        lines = column_of(lists.flatten().fill_null(b""))
        sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        merged, complete = merge(Images(lines, offsets), counts[copy])
        names = ["node", "group", "partition", "key", "lsn", "row"]
        columns = [rows.column(name) for name in ("node", "group", "partition", "target", "lsn")]
        if not complete.all():
            columns[2] = pc.if_else(pa.array(complete), columns[2], columns[1])
            columns[1] = pc.if_else(pa.array(complete), columns[1], pa.scalar(PROBLEM, pa.int32()))
        yield pa.record_batch([*columns, merged.to_arrow()], names=names)
