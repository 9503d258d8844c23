"""Base rows: which of them changes have left valid, and reading those with given keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import column_of, runs
from cutline.columns.python_workers import broadcast, map_batches
from cutline.columns.row_batches import row_batches
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.base_sources import BaseCursor, BaseSources
from cutline.snapshots.fold.changed_keys import Keys
from cutline.snapshots.fold.long_lines import PLACE_FIELD, line_names, read_with_places, with_stand_ins
from cutline.snapshots.fold.sources import BaseSource, problem_row
from cutline.snapshots.tasks.spark_jobs import cores_of
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WANTED_ROWS = "node int, `group` int, partition int, key binary, row binary, place bigint"
WANTED_SCHEMA = pa.schema([pa.field("node", pa.int32()), *BASE_SCHEMA, PLACE_FIELD])


def have_key_in(
    batch: Any, base: BaseSource, keys: Mapping[int, Keys], key_hashes: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.bool_]:
    """Find the rows of `batch` (BASE_SCHEMA) whose key is among `keys`, given by group.

    In a group without a key, a row is identified by its line, or by the stand-in of a long line. Pass `key_hashes` of
    all rows to avoid hashing them again.
    """
    group = np.asarray(batch.column("group").to_numpy())
    matches = np.zeros(len(group), np.bool_)
    # Rows of a table are adjacent. Both the batch and the keys may have thousands of tables.
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
    """Find the base rows of `batch` that are still part of the state: not changed and not truncated."""
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
    """Read as WANTED_ROWS the base rows with the `wanted` keys (by node number and group) that were not truncated.

    Long lines are replaced by their stand-ins and places; the object numbers in places are indexes of `bases`.
    An object that can't be read yields a row of group PROBLEM: without its rows, no result is complete.
    """
    groups = {node: frozenset(keys) for node, keys in wanted.items()}
    # What is broadcast goes to an executor once, what a function refers to goes with every task.
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
    """Read the objects with rows of these groups (by node number) by `read`, which gets each with its number.

    Many objects are read by one Spark task, one after the other.
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
