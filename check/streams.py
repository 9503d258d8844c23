"""Hashing segments: what a task of the stream hash job does, in an executor.

A primary's and its standby's WAL decode to the same changes and events. Their hashes are compared from the
later of the copies' base positions on, so a change that a later one hides is not overlooked. They are hashed as they
read at the cut: copies may have stored the same change under different definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from check.hashing import Sums, combine_all, combine_hashes
from snapshots.overlay import column_of
from snapshots.present import Present, in_present_terms
from snapshots.sources import CHANGE_OPS, Source, read_tables
from storage.errors import SnapshotError, report_of
from storage.open import open_store
from wal.archive import Segment
from wal.bytes_column import BytesColumn, from_list, xxhash64
from wal.damage import ObjectDamagedError
from wal.segment_schema import MARKER, PARTIAL, ROLLBACK_PREPARED, SEGMENT_SCHEMA, TRUNCATE


@dataclass(frozen=True, slots=True)
class StreamTask:
    """A segment to hash: its changes and events from `since` up to, not including, `position`.

    But for those of the transactions at `excluded`: of one that is rolled back by the time it is decoded
    PostgreSQL may leave out any part. `present` counts changes of a group from where all copies have them.
    """

    source: Source
    segment: Segment
    since: int
    position: int
    excluded: frozenset[int]
    present: Present | None
    store_url: str
    store_options: Mapping[str, Any] = field(repr=False)  # may hold secrets


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Combined hashes by (node number, group); group 0 are the events. `markers`: content and position."""

    sums: Sums | None
    changes: int = 0
    markers: tuple[tuple[bytes, int], ...] = ()
    problem: dict[str, Any] | None = None


def hash_stream(task: StreamTask) -> StreamReport:
    """Read the segment whole and hash it."""
    parts: list[Sums] = []
    markers: list[tuple[bytes, int]] = []  # two per cut
    counts = np.zeros(4, np.int64)
    try:
        for table in read_tables(open_store(task.store_url, task.store_options), task.source, SEGMENT_SCHEMA):
            op = np.asarray(table["op"].to_numpy())
            counts += _counts(op)
            found = table.filter(pa.array(op == MARKER))
            markers += zip(found["row"].to_pylist(), found["lsn"].to_pylist(), strict=True)
            parts += [_hashed(task, one) for one in in_present_terms(table, task.present)]
        _check_counts(task, tuple(counts.tolist()))
    except SnapshotError as error:
        return StreamReport(None, problem=report_of(error))
    return StreamReport(combine_all(parts, 2), task.segment.changes, tuple(markers))


def _hashed(task: StreamTask, table: pa.Table) -> Sums:
    op = np.asarray(table["op"].to_numpy())
    lsn = np.asarray(table["lsn"].to_numpy())
    lasts = (lsn >= task.since) & (lsn < task.position) & (op != ROLLBACK_PREPARED)
    if task.excluded:
        lasts &= ~np.isin(lsn, np.fromiter(task.excluded, np.int64))
    chosen = table.filter(pa.array(lasts))
    group = np.asarray(chosen["group"].to_numpy(), np.int64)
    keys = np.stack([np.full(len(chosen), task.source.number, np.int64), group], axis=1)
    return combine_hashes(keys, _hashes(chosen))


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


def _counts(op: npt.NDArray[np.int8]) -> tuple[int, int, int, int]:
    """How many changes, events, changes with values left out, and TRUNCATEs there are."""
    changes = int(np.isin(op, CHANGE_OPS).sum())
    return changes, len(op) - changes, int((op == PARTIAL).sum()), int((op == TRUNCATE).sum())


def _check_counts(task: StreamTask, found: tuple[int, ...]) -> None:
    """The segment must hold what its commit says, also of those kinds of changes that decide how it is read."""
    source, said = task.source, task.segment
    expected = (said.changes, said.events, said.partials, said.truncates)
    if found != expected:
        names = "changes, events, with values left out, truncates"
        raise ObjectDamagedError(
            key=source.key,
            kind="rows",
            node=source.node,
            detail=f"it has {found} rows ({names}) instead of {expected}",
        )
