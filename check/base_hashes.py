"""Hashing base copies: what a task of the base hash job does, in an executor.

Base rows are hashed where they are read and never shuffled; rows whose key has changed since are left to the
folded changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from check.hashing import Sums, combine_hashes
from snapshots.base_copy import BASE_SCHEMA
from snapshots.base_rows import rows_that_hold
from snapshots.damage import ObjectDamagedError
from snapshots.overlay import KeySet
from snapshots.sources import BaseSource, read_table
from storage.errors import SnapshotError, report_of
from storage.open import open_store
from wal.bytes_column import BytesColumn, from_arrow, xxhash64


@dataclass(frozen=True, slots=True)
class BaseHashTask:
    """A base object to hash. `partitions` by group number; `changed` gives the node's changed keys by group."""

    base: BaseSource
    partitions: Mapping[int, int]
    changed: Any
    store_url: str
    store_options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BaseHashReport:
    """The object's combined hashes by (node number, group, partition), or what is wrong with the object."""

    sums: Sums | None
    rows: int = 0
    bytes: int = 0
    problem: dict[str, Any] | None = None


def hash_base(task: BaseHashTask) -> BaseHashReport:
    """Hash the rows of the object that still hold."""
    try:
        table = read_table(open_store(task.store_url, task.store_options), task.base.source, BASE_SCHEMA)
        _check_rows(task, table)
        changed: Mapping[int, KeySet] = task.changed.value if task.changed is not None else {}
        parts = [_hash(task, batch, changed) for batch in table.to_batches()]
    except SnapshotError as error:
        return BaseHashReport(None, problem=report_of(error))
    keys = np.concatenate([np.empty((0, 3), np.int64), *(part.keys for part in parts)])
    values = np.concatenate([np.empty((0, 4), np.int64), *(part.values for part in parts)])
    return BaseHashReport(Sums(keys, values), len(table), task.base.source.size)


def _check_rows(task: BaseHashTask, table: pa.Table) -> None:
    expected = dict(task.base.rows)
    groups, counts = np.unique(np.asarray(table["group"].to_numpy()), return_counts=True)
    found = {int(group): int(count) for group, count in zip(groups, counts, strict=True)}
    if found != {group: count for group, count in expected.items() if count}:
        source = task.base.source
        raise ObjectDamagedError(
            key=source.key, kind="rows", node=source.node, detail=f"it has rows {found} instead of {expected}"
        )


def _hash(task: BaseHashTask, batch: pa.RecordBatch, changed: Mapping[int, KeySet]) -> Sums:
    group = np.asarray(batch.column("group").to_numpy(), np.int64)
    partition = np.asarray(batch.column("partition").to_numpy(), np.int64)
    keys, rows = from_arrow(batch.column("key")), from_arrow(batch.column("row"))
    key_hashes = xxhash64(keys)
    _check_partitions(task, (group, partition), key_hashes, rows)
    # The hash of an entry binds its key and its row; Spark's xxhash64(key, row) is the same number.
    hashes = xxhash64(rows, key_hashes)
    node = np.full(len(hashes), task.base.source.number, np.int64)
    places = np.stack([node, group, partition], axis=1)
    if changed or task.base.dropped:
        holds = rows_that_hold(batch, task.base, changed, key_hashes)
        places, hashes = places[holds], hashes[holds]
    return combine_hashes(places, hashes)


def _check_partitions(
    task: BaseHashTask, places: tuple[Any, Any], key_hashes: npt.NDArray[np.uint64], rows: BytesColumn
) -> None:
    """Every row must be in the partition of its key, or the copies would not be compared alike."""
    group, partition = places
    for number in np.unique(group):
        at = group == number
        count = task.partitions[int(number)]
        hashes = xxhash64(rows) if int(number) in task.base.multisets else key_hashes
        if np.any((hashes[at] & np.uint64(count - 1)).astype(np.int64) != partition[at]):
            source = task.base.source
            raise ObjectDamagedError(
                key=source.key, kind="partition", node=source.node, detail="a row is in a wrong partition"
            )
