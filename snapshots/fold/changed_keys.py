"""The keys that changed since the base copy, as exact sets or filters, and the base rows that remain valid.

The keys are sent to the executors that read base objects, so that valid base rows need no shuffle. Keys in a set are
looked up by hash and then compared, so a hash collision costs time but loses no rows.

A filter is used if a set of all keys would not fit on the driver. It matches all changed keys, and may also match other
keys. Base rows that it does not match are unchanged; the others are compared with the changed keys in a shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, from_list, runs, xxhash64
from cutline.columns.python_workers import map_batches
from cutline.columns.row_batches import row_batches
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.long_lines import NO_PLACE, PLACE_FIELD, line_names, read_with_places, with_stand_ins
from cutline.snapshots.fold.sources import PROBLEM, BaseCursor, BaseSource, BaseSources, problem_row
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import cores_of
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# With 16 bits per key, the filter matches at most one in 16 keys outside the set.
BITS_PER_KEY = 16
BITS_MIN, BITS_MAX = 1 << 6, 1 << 28
WORD_BITS = 64


class KeyFilter(Struct, frozen=True):
    """One bit for each remainder of the hash, set if a key has that remainder. The number of bits is a power of two."""

    words: npt.NDArray[np.uint64]

    def contains(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Flags:
        """Return flags marking the `keys` that may be in the set; pass `hashes` if they are known."""
        places = (xxhash64(keys) if hashes is None else hashes) & np.uint64(len(self.words) * WORD_BITS - 1)
        bits = self.words[places // np.uint64(WORD_BITS)] >> (places % np.uint64(WORD_BITS))
        return np.asarray(bits & np.uint64(1), np.bool_)


def key_filters(changed: DataFrame, count: int, groups: Iterable[tuple[int, int]]) -> dict[int, dict[int, KeyFilter]]:
    """Build filters of the keys in `changed` (node, key; about `count` keys) for each (node, group) in `groups`.

    All of a node's groups share one filter. The data sent to the driver is bounded by BITS_MAX per node.
    """
    bits = min(max(1 << (count * BITS_PER_KEY - 1).bit_length(), BITS_MIN), BITS_MAX)
    # Spark's xxhash64 equals columns.bytes_column.xxhash64.
    places = changed.selectExpr("node", f"xxhash64(key) & {bits - 1}L AS place")
    words = places.selectExpr(
        "node", f"place div {WORD_BITS} AS word", f"shiftleft(1L, int(place % {WORD_BITS})) AS bit"
    )
    table = words.groupBy("node", "word").agg({"bit": "bit_or"}).toDF("node", "word", "bits").toArrow()
    node, word, value = (np.asarray(table[name].to_numpy()) for name in ("node", "word", "bits"))
    filters: dict[int, dict[int, KeyFilter]] = {}
    of_node: dict[int, KeyFilter] = {}
    for number, group in groups:
        if number not in of_node:
            node_words = np.zeros(bits // WORD_BITS, np.uint64)
            node_words[word[node == number]] = value[node == number].view(np.uint64)
            of_node[number] = KeyFilter(node_words)
        filters.setdefault(number, {})[group] = of_node[number]
    return filters


# Hashes are in slots by their highest bits: one or two for each key, or fewer in larger sets.
SLOT_BITS_MAX = 22
# With fewer hashes to find than one for this many keys, a search takes less time than numbering the slots.
SEARCHED_KEYS = 16


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys sorted by their hashes.

    `_slots` holds the index of the first key of each slot, and the number of keys at the end, once they are needed.
    """

    hashes: npt.NDArray[np.uint64]
    keys: BytesColumn
    _slots: npt.NDArray[np.int32] | None = field(default=None, init=False, repr=False, compare=False)

    def find(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Ints:
        """Return the index of each key in this set, or -1; pass the keys' `hashes` if they are known."""
        if hashes is None:
            hashes = xxhash64(keys)
        indexes = np.full(len(keys), -1, np.int64)
        # The keys that may be equal to each key, and those that are still to be compared.
        low, high = self._ranges(hashes)
        rows = np.flatnonzero(low < high)
        low, high, wanted = low[rows], high[rows], hashes[rows]
        while len(rows):
            is_found = self.hashes[low] == wanted
            if is_found.any():
                chosen = np.flatnonzero(is_found)
                same = keys.take(rows[chosen]).equals(self.keys.take(low[chosen]))
                indexes[rows[chosen[same]]] = low[chosen[same]]
                is_found[chosen[~same]] = False
            low = low + 1
            left = np.flatnonzero(~is_found & (low < high))
            rows, low, high, wanted = rows[left], low[left], high[left], wanted[left]
        return indexes

    def _ranges(self, hashes: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """Return, for each hash, the range of this set's keys that contains all keys with this hash, perhaps others."""
        if self._slots is None and len(hashes) * SEARCHED_KEYS < len(self.hashes):
            return np.searchsorted(self.hashes, hashes), np.searchsorted(self.hashes, hashes, side="right")
        bits = min(len(self.hashes).bit_length(), SLOT_BITS_MAX)
        shift = np.uint64(64 - bits)
        slots = self._slots
        if slots is None:
            slots = np.zeros((1 << bits) + 1, np.int32)
            np.cumsum(np.bincount((self.hashes >> shift).astype(np.int64), minlength=1 << bits), out=slots[1:])
            # Tasks look up the keys of many batches in the same set.
            object.__setattr__(self, "_slots", slots)
        slot = (hashes >> shift).view(np.int64)
        return slots[slot].astype(np.int64), slots[slot + 1].astype(np.int64)

    def contains(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Flags:
        """Return flags marking the `keys` that are in this set."""
        return self.find(keys, hashes) >= 0


def overlays(changed: pa.Table) -> dict[int, dict[int, KeySet]]:
    """Build the sets of changed keys, by node and group; `changed` contains node, group and key, each key once."""
    result: dict[int, dict[int, KeySet]] = {}
    node, group = (np.asarray(changed[name].to_numpy()) for name in ("node", "group"))
    keys = column_of(changed["key"]) if len(changed) else from_list([])
    hashes = xxhash64(keys)
    # Sort once for all groups: there may be as many groups as keys.
    order = np.argsort(hashes)
    if len(order) and ((node != node[0]) | (group != group[0])).any():
        order = order[np.lexsort((group[order], node[order]))]
    node, group, hashes, keys = node[order], group[order], hashes[order], keys.take(order)
    for of_node in runs(node):
        sets = result.setdefault(int(node[of_node.start]), {})
        for run in runs(group[of_node]):
            rows = slice(of_node.start + run.start, of_node.start + run.stop)
            sets[int(group[rows.start])] = KeySet(hashes[rows], keys.part(rows))
    return result


Keys: TypeAlias = KeySet | KeyFilter
# Up to this number of changes, the keys are collected without counting them first.
COUNTED_FROM = 200_000
# Memory for the keys in the driver and in each process that reads base objects. Building sets takes several times as
# much.
KEYS_BYTES_MAX = 64 << 20
BYTES_PER_KEY = 24


class ChangedKeys(Struct, frozen=True):
    """The `count` changed keys, by node number and group, and the ops of their last changes.

    All keys are in KeySets if `is_exact`, otherwise in KeyFilters. If `has_long_lines`, stand-ins replace some of the
    last images.
    """

    keys: dict[int, dict[int, Keys]]
    count: int
    ops: frozenset[int]
    is_exact: bool = True
    has_problems: bool = False
    has_long_lines: bool = False


def collect_changed_keys(latest: DataFrame, changes: int) -> ChangedKeys:
    """Collect the keys in `latest` (node, group, key, op, place), where each key occurs once; skip PROBLEM rows.

    `changes` is an upper bound on the number of keys. The data sent to the driver is bounded by KEYS_BYTES_MAX, or by
    the size of the filters and the number of tables.
    """
    if changes > COUNTED_FROM and (filters := _build_filters(latest)):
        return filters
    return exact_keys(latest.select("node", "group", "key", "op", "place").toArrow())


def exact_keys(table: pa.Table) -> ChangedKeys:
    """Return the keys in a table (node, group, key, op, place), where each key occurs once; skip PROBLEM rows.

    The `place` column is optional: without it, no line is a stand-in.
    """
    is_problem = pc.equal(table["group"], PROBLEM)
    has_problems = bool(pc.any(is_problem).as_py())
    sets = overlays(table.filter(pc.invert(is_problem)) if has_problems else table)
    ops = frozenset(np.unique(to_numpy(table["op"])).tolist())
    keys: dict[int, dict[int, Keys]] = {node: dict(of_groups) for node, of_groups in sets.items()}
    is_long = pc.not_equal(table["place"], NO_PLACE) if "place" in table.column_names else pa.array([False])
    has_long_lines = bool(pc.any(is_long).as_py())
    return ChangedKeys(keys, len(table), ops, has_problems=has_problems, has_long_lines=has_long_lines)


def _build_filters(latest: DataFrame) -> ChangedKeys | None:
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    sizes = latest.groupBy("node", "group", "op").agg(
        F.count(F.lit(1)).alias("keys"), F.sum(F.length("key")).alias("bytes"), F.max("place").alias("place")
    )
    counted = sizes.collect()  # bounded by the tables
    sized = [row for row in counted if row["group"] != PROBLEM]
    count = sum(row["keys"] for row in sized)
    if sum(row["bytes"] for row in sized) + count * BYTES_PER_KEY <= KEYS_BYTES_MAX:
        return None
    groups = sorted({(row["node"], row["group"]) for row in sized})
    filters = key_filters(latest.where(f"`group` <> {PROBLEM}"), count, groups)
    keys: dict[int, dict[int, Keys]] = {node: dict(of_groups) for node, of_groups in filters.items()}
    ops = frozenset(row["op"] for row in counted)
    has_long_lines = any(row["place"] != NO_PLACE for row in sized)
    has_problems = len(sized) < len(counted)
    return ChangedKeys(keys, count, ops, is_exact=False, has_problems=has_problems, has_long_lines=has_long_lines)


WANTED_ROWS = "node int, `group` int, partition int, key binary, row binary, place bigint"
WANTED_SCHEMA = pa.schema([pa.field("node", pa.int32()), *BASE_SCHEMA, PLACE_FIELD])


def have_key_in(
    batch: Any, base: BaseSource, keys: Mapping[int, Keys], key_hashes: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.bool_]:
    """Find the rows in `batch` (BASE_SCHEMA) whose keys are among the `keys` for their groups.

    In a group without a key, a row is identified by its line or, if the line is long, by the line's stand-in. Pass the
    `key_hashes` of all rows to avoid hashing the keys again.
    """
    group = np.asarray(batch.column("group").to_numpy())
    matches = np.zeros(len(group), np.bool_)
    # A table's rows are adjacent. Both the batch and the keys may contain thousands of tables.
    for rows in runs(group):
        number = int(group[rows.start])
        if number not in keys:
            continue
        count = rows.stop - rows.start
        if number in base.multisets:
            matches[rows] = keys[number].contains(line_names(batch.column("row").slice(rows.start, count)))
            continue
        names = column_of(batch.column("key").slice(rows.start, count))
        matches[rows] = keys[number].contains(names, key_hashes[rows] if key_hashes is not None else None)
    return matches


def find_valid_rows(
    batch: Any, base: BaseSource, changed: Mapping[int, Keys], key_hashes: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.bool_]:
    """Find the base rows in `batch` that are still part of the state: not changed and not truncated."""
    valid = ~have_key_in(batch, base, changed, key_hashes)
    if base.truncated:
        valid &= ~np.isin(np.asarray(batch.column("group").to_numpy()), list(base.truncated))
    return valid


def read_wanted_rows(
    spark: SparkSession,
    bases: BaseSources,
    wanted: Mapping[int, Mapping[int, Keys]],
    store: StoreLocation,
) -> DataFrame:
    """Read the base rows (WANTED_ROWS) that were not truncated and whose keys are `wanted` (by node number and group).

    Long lines are replaced by their stand-ins and places; the object numbers in places are indexes into `bases`. For an
    object that can't be read, the result contains a row in the PROBLEM group: without the object's rows, no result is
    complete.
    """
    groups = {node: frozenset(keys) for node, keys in wanted.items()}
    # Broadcast values are sent to an executor once; values that a function refers to are sent with every task.
    sent = broadcast(spark, {node: dict(keys) for node, keys in wanted.items()})

    def read(number: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
        return _read_wanted(store, number, base, sent.value)

    return read_bases(spark, bases, groups, read, WANTED_ROWS)


def read_bases(
    spark: SparkSession,
    bases: BaseSources,
    groups: Mapping[int, frozenset[int]],
    read: Callable[[int, BaseSource], Iterator[pa.RecordBatch]],
    columns: str,
) -> DataFrame:
    """Call `read` with the number and source of each object that contains rows of `groups` (by node number).

    A Spark task reads many objects in sequence.
    """
    chosen = bases.numbers_with(groups)
    listed = broadcast(spark, (bases, chosen))

    def read_chosen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bases, chosen = listed.value
        cursor = BaseCursor(bases)
        for batch in batches:
            for number in chosen[to_numpy(batch.column(0))].tolist():
                yield from read(number, cursor.source(number))

    tasks = max(min(len(chosen), cores_of(spark).lanes_max), 1)
    return map_batches(spark.range(0, len(chosen), 1, tasks), read_chosen, columns)


def _read_wanted(
    store: StoreLocation, number: int, base: BaseSource, wanted: Mapping[int, Mapping[int, Keys]]
) -> Iterator[pa.RecordBatch]:
    keys = {g: k for g, k in wanted[base.source.number].items() if g not in base.truncated}
    try:
        for table in read_with_places(store.open(), base, number, BASE_SCHEMA):
            for batch in row_batches(table):
                rows = pa.Table.from_batches([batch]).filter(pa.array(have_key_in(batch, base, keys)))
                if len(rows):
                    node = pa.array(np.full(len(rows), base.source.number, np.int32))
                    short = with_stand_ins(rows).combine_chunks()
                    yield from short.add_column(0, WANTED_SCHEMA.field("node"), node).to_batches()
    except SnapshotError as error:
        yield problem_row(base.source, error, WANTED_SCHEMA)
