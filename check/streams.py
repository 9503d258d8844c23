"""Hashing segments: what a task of the stream hash job does, in an executor.

A primary's and its standby's WAL decode to the same changes and events. Their hashes are compared from the
later of the copies' base positions on, so a change that a later one hides is not overlooked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from check.hashing import Sums, combine_hashes
from snapshots.damage import ObjectDamagedError
from snapshots.overlay import column_of
from snapshots.sources import Source, read_table
from storage.errors import SnapshotError, report_of
from storage.open import open_store
from wal.archive import Segment
from wal.bytes_column import BytesColumn, from_list, xxhash64
from wal.segment_schema import MARKER, ROLLBACK_PREPARED, SEGMENT_SCHEMA


@dataclass(frozen=True, slots=True)
class StreamTask:
    """A segment to hash: its changes and events from `since` up to, not including, `position`.

    But for those of the transactions at `excluded`: of one that is rolled back by the time it is decoded
    PostgreSQL may leave out any part.
    """

    source: Source
    segment: Segment
    since: int
    position: int
    excluded: frozenset[int]
    store_url: str
    store_options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Combined hashes by (node number, group); group 0 are the events. `markers`: content and position."""

    sums: Sums | None
    changes: int = 0
    markers: tuple[tuple[bytes, int], ...] = ()
    problem: dict[str, Any] | None = None


def hash_stream(task: StreamTask) -> StreamReport:
    """Read the segment whole and hash it."""
    try:
        table = read_table(open_store(task.store_url, task.store_options), task.source, SEGMENT_SCHEMA)
        _check_counts(task, table)
    except SnapshotError as error:
        return StreamReport(None, problem=report_of(error))
    op = np.asarray(table["op"].to_numpy())
    lsn = np.asarray(table["lsn"].to_numpy())
    markers = table.filter(pa.array(op == MARKER)).select(["row", "lsn"])  # two per cut
    lasts = (lsn >= task.since) & (lsn < task.position) & (op != ROLLBACK_PREPARED)
    if task.excluded:
        lasts &= ~np.isin(lsn, np.fromiter(task.excluded, np.int64))
    chosen = table.filter(pa.array(lasts))
    group = np.asarray(chosen["group"].to_numpy(), np.int64)
    keys = np.stack([np.full(len(chosen), task.source.number, np.int64), group], axis=1)
    found = zip(markers["row"].to_pylist(), markers["lsn"].to_pylist(), strict=True)
    return StreamReport(combine_hashes(keys, _hashes(chosen)), task.segment.changes, tuple(found))


def _hashes(table: pa.Table) -> Any:
    """The hash of every change and event: all that it says, but for the transaction's number on its node."""
    count = len(table)
    numbers = [np.asarray(table[name].to_numpy(), np.int64) for name in ("lsn", "seq", "op", "group", "partition")]
    fixed = np.ascontiguousarray(np.stack(numbers, axis=1)).view(np.uint8).reshape(-1)
    width = len(numbers) * 8
    hashes = xxhash64(BytesColumn(fixed, np.arange(count + 1, dtype=np.int64) * width))
    names = table["global_id"].cast(pa.binary()).fill_null(b"")
    for column in (names, table["key"], table["row"]):
        values = column_of(column) if count else from_list([])
        hashes = xxhash64(values, hashes)
    return hashes


def _check_counts(task: StreamTask, table: pa.Table) -> None:
    expected = task.segment.changes + task.segment.events
    if len(table) != expected:
        source = task.source
        raise ObjectDamagedError(
            key=source.key,
            kind="rows",
            node=source.node,
            detail=f"it has {len(table)} rows instead of {expected}",
        )
