"""Hash base copies: what one task of the base hash job does on an executor.

The task that reads base rows also hashes them, so the rows are never shuffled. Rows whose key changed after the copy
are left out, because the folded changes contain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutline.check.hashing import Sums, combine_all, combine_hashes
from cutline.check.required_values import check_required, find_nulls
from cutline.check.sequence_values import KeyExtremes, add_extremes
from cutline.check.stored_rows import NO_FIELDS, BaseChecks, MarkedFields, RowsInvalidError, salted
from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Ints, from_arrow, xxhash64
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows
from cutline.snapshots.fold.sources import BaseSource, converted_to_cut, read_tables
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError


@dataclass(frozen=True, slots=True)
class BaseHashTask:
    """A base object to hash; `changed` is a broadcast of the node's changed keys by group.

    `forms` is a broadcast of the TableForms of the node's tables. `fed` are the groups at the cut whose smallest and
    largest keys are wanted, and `required` a broadcast of the columns that are NOT NULL (required_values.places_of).
    `expected` is a broadcast of the ExpectedRows, which changes delete. Without `is_compared`, no other copy has the
    rows: they are checked, but not hashed.
    """

    base: BaseSource
    forms: Any
    changed: Any
    store: StoreLocation
    fed: frozenset[int] = frozenset()
    required: Any = None
    expected: Any = None
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class BaseHashReport:
    """The object's combined hashes, keyed by (node number, group, partition), or the problem with the object.

    `deleted` are the indexes of those of the node's expected rows that it has; `number` is the node's.
    """

    sums: Sums | None
    rows: int = 0
    bytes: int = 0
    problem: ErrorReport | None = None
    extremes: KeyExtremes = field(default_factory=dict)
    number: int = 0
    deleted: Ints | None = None


def hash_base(task: BaseHashTask) -> BaseHashReport:
    """Hash the object's rows, except those whose key changed after the copy."""
    changed: Mapping[int, Keys] = task.changed.value if task.changed is not None else {}
    parts: list[Sums] = []
    rows: dict[int, int] = {}
    checks, extremes, deleted = BaseChecks(task.forms.value), KeyExtremes(), list[Ints]()
    try:
        for table in _read(task):
            _count_rows(table, rows)
            for batch in table.to_batches():
                parts += _hash_batch(task, batch, changed, checks, extremes, deleted)
        _check_rows(task, rows)
        checks.end(lambda: (batch for table in _read(task) for batch in table.to_batches()))
    except RowsInvalidError as error:
        source = task.base.source
        damage = ObjectDamagedError(key=source.key, kind=error.kind, node=source.node, detail=str(error))
        return BaseHashReport(None, problem=report_of(damage))
    except SnapshotError as error:
        return BaseHashReport(None, problem=report_of(error))
    return BaseHashReport(
        combine_all(parts, 3),
        sum(rows.values()),
        task.base.source.size,
        extremes=extremes,
        number=task.base.source.number,
        deleted=np.concatenate(deleted) if deleted else None,
    )


def _read(task: BaseHashTask) -> Iterator[pa.Table]:
    return read_tables(task.store.open(), task.base.source, BASE_SCHEMA)


def _count_rows(table: pa.Table, rows: dict[int, int]) -> None:
    groups = to_numpy(table["group"])
    # The rows of a table are next to each other.
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if len(groups) else groups
    counts = np.diff(np.append(starts, len(groups)))
    for group, count in zip(groups[starts].tolist(), counts.tolist(), strict=True):
        rows[group] = rows.get(group, 0) + count


def _check_rows(task: BaseHashTask, rows: Mapping[int, int]) -> None:
    if rows != {group: count for group, count in task.base.rows.items() if count}:
        raise _rows_differ(task, f"rows {rows}")


def _rows_differ(task: BaseHashTask, found: str) -> ObjectDamagedError:
    source, expected = task.base.source, dict(task.base.rows)
    detail = f"it contains {found} instead of {expected}"
    return ObjectDamagedError(key=source.key, kind="rows", node=source.node, detail=detail)


def _hash_batch(
    task: BaseHashTask,
    batch: pa.RecordBatch,
    changed: Mapping[int, Keys],
    checks: BaseChecks,
    extremes: KeyExtremes,
    deleted: list[Ints],
) -> Iterator[Sums]:
    """Check the rows of a stored batch against the definitions of their tables, and yield their combined hashes."""
    key_hashes = xxhash64(from_arrow(batch.column("key")))
    nulls = checks.add(batch, key_hashes)
    if task.base.mapping is None:
        yield _hash(task, batch, changed, key_hashes, nulls, extremes, deleted)
        return
    for table in converted_to_cut(pa.Table.from_batches([batch]), task.base):
        for to_batch in table.to_batches():
            to_hashes = xxhash64(from_arrow(to_batch.column("key")))
            nulls = find_nulls(from_arrow(to_batch.column("row"))) if task.required is not None else NO_FIELDS
            yield _hash(task, to_batch, changed, to_hashes, nulls, extremes, deleted)


def _hash(
    task: BaseHashTask,
    batch: pa.RecordBatch,
    changed: Mapping[int, Keys],
    key_hashes: npt.NDArray[np.uint64],
    nulls: MarkedFields,
    extremes: KeyExtremes,
    deleted: list[Ints],
) -> Sums:
    group = np.asarray(batch.column("group").to_numpy(), np.int64)
    partition = np.asarray(batch.column("partition").to_numpy(), np.int64)
    holds: npt.NDArray[np.bool_] | None = None
    if changed or task.base.truncated:
        holds = find_valid_rows(batch, task.base, changed, key_hashes)
        if task.expected is not None:
            # Every row that a change deletes has changed.
            deleted.append(task.expected.value.find(salted(key_hashes[~holds], group[~holds])))
    add_extremes(extremes, task.base.source.number, group, batch.column("key"), task.fed, holds)
    if task.required is not None:
        check_required(task.forms.value, group, nulls, task.required.value, holds)
    if not task.is_compared:
        return combine_all([], 3)
    # An entry's hash covers its key and its row, and equals Spark's xxhash64(key, row).
    hashes = xxhash64(from_arrow(batch.column("row")), key_hashes)
    node = np.full(len(hashes), task.base.source.number, np.int64)
    places = np.stack([node, group, partition], axis=1)
    return combine_hashes(places, hashes) if holds is None else combine_hashes(places[holds], hashes[holds])
