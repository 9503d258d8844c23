"""Base rows: which of them changes have left valid, and reading those with given keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from columns.bytes_column import column_of, runs
from columns.python_workers import map_batches
from columns.row_batches import row_batches
from snapshots.base_copy.copy_ranges import BASE_SCHEMA
from snapshots.fold.changed_keys import Keys
from snapshots.fold.long_lines import PLACE_FIELD, line_names, read_with_places, with_stand_ins
from snapshots.fold.sources import BaseSource, problem_row
from storage.errors import SnapshotError
from storage.location import StoreLocation

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
    bases: tuple[BaseSource, ...],
    wanted: Mapping[int, Mapping[int, Keys]],
    store: StoreLocation,
) -> DataFrame:
    """Read as WANTED_ROWS the base rows with the `wanted` keys (by node number and group) that were not truncated.

    Long lines are replaced by their stand-ins and places; the object numbers in places are indexes of `bases`.
    An object that can't be read yields a row of group PROBLEM: without its rows, no result is complete.
    """
    groups = {node: frozenset(keys) for node, keys in wanted.items()}
    chosen = [
        (number, base) for number, base in enumerate(bases) if groups.get(base.source.number, frozenset()) & base.groups
    ]
    # What is broadcast goes to an executor once, what a function refers to goes with every task.
    sent = spark.sparkContext.broadcast({node: dict(keys) for node, keys in wanted.items()})
    listed = spark.sparkContext.broadcast(chosen)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _read_wanted(store, listed.value[number], sent.value)

    tasks = max(len(chosen), 1)
    return map_batches(spark.range(0, len(chosen), 1, tasks), read, WANTED_ROWS)


def _read_wanted(
    store: StoreLocation, numbered: tuple[int, BaseSource], wanted: Mapping[int, Mapping[int, Keys]]
) -> Iterator[pa.RecordBatch]:
    number, base = numbered
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
