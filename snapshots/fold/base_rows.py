"""Base rows and the changes since: which still hold, and those that a fold asks for by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from columns.bytes_column import column_of, runs
from columns.row_batches import row_batches
from snapshots.base_copy.copy_ranges import BASE_SCHEMA
from snapshots.fold.changed_keys import Keys
from snapshots.fold.long_lines import PLACED, names_of, read_placed, with_stand_ins
from snapshots.fold.sources import BaseSource, problem_row
from storage.errors import SnapshotError
from storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WANTED_ROWS = "node int, `group` int, partition int, key binary, row binary, place bigint"
WANTED_SCHEMA = pa.schema([pa.field("node", pa.int32()), *BASE_SCHEMA, PLACED])


def is_among(
    batch: Any, base: BaseSource, keys: Mapping[int, Keys], key_hashes: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.bool_]:
    """Which rows of `batch` (BASE_SCHEMA) have one of `keys`, given by group.

    A row of a group without a key is known by its line, a long one by what stands for it. `key_hashes` of all rows
    spare hashing them again.
    """
    group = np.asarray(batch.column("group").to_numpy())
    found = np.zeros(len(group), np.bool_)
    # Rows of a table stand side by side, and both may be of thousands of tables.
    for rows in runs(group):
        number = int(group[rows.start])
        if number not in keys:
            continue
        count = rows.stop - rows.start
        if number in base.multisets:
            found[rows] = keys[number].contains(names_of(batch.column("row").slice(rows.start, count)))
            continue
        names = column_of(batch.column("key").slice(rows.start, count))
        found[rows] = keys[number].contains(names, key_hashes[rows] if key_hashes is not None else None)
    return found


def rows_that_hold(
    batch: Any, base: BaseSource, changed: Mapping[int, Keys], key_hashes: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.bool_]:
    """Which base rows of `batch` are still part of the state: unchanged, and not truncated."""
    holds = ~is_among(batch, base, changed, key_hashes)
    if base.dropped:
        holds &= ~np.isin(np.asarray(batch.column("group").to_numpy()), list(base.dropped))
    return holds


def read_wanted_rows(
    spark: SparkSession,
    bases: tuple[BaseSource, ...],
    wanted: Mapping[int, Mapping[int, Keys]],
    store: StoreLocation,
) -> DataFrame:
    """WANTED_ROWS of the base rows with the `wanted` keys (by node number and group) that were not truncated.

    Long lines are replaced by what stands for them, and their places: the numbers there are those of `bases`.
    An object that can't be read is a row of group PROBLEM: without its rows nothing can be told of any.
    """
    groups = {node: frozenset(found) for node, found in wanted.items()}
    chosen = [
        (number, base) for number, base in enumerate(bases) if groups.get(base.source.number, frozenset()) & base.groups
    ]
    sent = spark.sparkContext.broadcast({node: dict(found) for node, found in wanted.items()})

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opened = store.open()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _read_wanted(opened, chosen[number], sent.value)

    tasks = max(len(chosen), 1)
    return spark.range(0, len(chosen), 1, tasks).mapInArrow(read, WANTED_ROWS)


def _read_wanted(
    store: Any, numbered: tuple[int, BaseSource], wanted: Mapping[int, Mapping[int, Keys]]
) -> Iterator[pa.RecordBatch]:
    number, base = numbered
    keys = {g: k for g, k in wanted[base.source.number].items() if g not in base.dropped}
    try:
        for table in read_placed(store, base, number, BASE_SCHEMA):
            for batch in row_batches(table):
                rows = pa.Table.from_batches([batch]).filter(pa.array(is_among(batch, base, keys)))
                if len(rows):
                    node = pa.array(np.full(len(rows), base.source.number, np.int32))
                    found = with_stand_ins(rows).combine_chunks()
                    yield from found.add_column(0, WANTED_SCHEMA.field("node"), node).to_batches()
    except SnapshotError as error:
        yield problem_row(base.source, error, WANTED_SCHEMA)
