"""Hash base copies: what one task of the base hash job does on an executor.

The task that reads base rows also hashes them, so the rows are never shuffled. Rows whose key changed after the copy
are left out, because the folded changes contain them.

A table that nobody writes while its nodes are copied has equal rows on the same pages of all of them, so its objects
have equal digests (`equal_bases`). A task verifies the digests of all these objects, but expands only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.check.hashing import Sums, combine_all, combine_hashes
from cutline.check.required_values import check_required, find_nulls
from cutline.check.sequence_values import KeyExtremes, add_extremes
from cutline.check.stored_rows import NO_FIELDS, BaseChecks, MarkedFields, RowsInvalidError, salted
from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Flags, Ints, from_arrow, xxhash64
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.anchored_images import (
    Completed,
    CompletedHashes,
    OfTables,
    complete_base_rows,
    find_base_rows,
)
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows
from cutline.snapshots.fold.counted_lines import LineMatches, Matches
from cutline.snapshots.fold.sources import (
    BaseSource,
    BaseSources,
    NodeBases,
    converted_to_cut,
    read_tables,
    verify_object,
)
from cutline.spark.spark_jobs import if_shared
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError


class NodeBase(Struct, frozen=True):
    """A base object of a node; `changed` is a broadcast of the node's changed keys by group.

    `fed` are the groups at the cut whose smallest and largest keys are wanted. `expected` is a broadcast of the
    ExpectedRows, which changes delete. With `counts_lines`, the rows with changed lines are counted, in groups without
    a key. `anchored` is a broadcast of the node's images (OfTables) that base rows complete.
    """

    base: BaseSource
    changed: Any = None
    fed: frozenset[int] = frozenset()
    expected: Any = None
    counts_lines: bool = False
    anchored: Any = None


class BaseHashTask(Struct, frozen=True):
    """Base objects to hash, which have equal content, of different nodes of a shard.

    `forms` is a broadcast of the TableForms of the shard's tables, and `required` one of the columns that are NOT NULL
    (required_values.places_of). Without `is_compared`, no other copy has the rows: they are checked, but not hashed.
    With `is_everywhere`, all copies of the shard have the object. `copies` is their number.
    """

    objects: tuple[NodeBase, ...]
    forms: Any
    store: StoreLocation
    required: Any = None
    is_compared: bool = True
    is_everywhere: bool = False
    copies: int = 1

    @property
    def is_read_once(self) -> bool:
        """Whether several copies of the shard begin with this one object, and no other copy has the rows."""
        keys = {one.base.source.key for one in self.objects}
        return len(keys) == 1 and 1 < self.copies == len(self.objects)

    @property
    def shares(self) -> list[tuple[str, int]]:
        """The node and the size in bytes of every object."""
        return [(one.base.source.node, one.base.source.size) for one in self.objects]


class BaseHashReport(Struct, frozen=True):
    """An object's combined hashes, keyed by (node number, group, partition), or the problem with the object.

    Batches of rows that all copies of the shard have in equal objects, with the same changed rows, are only counted:
    their hashes are 0. `deleted` are the indexes of those of the node's expected rows that it has, and `matches` the
    rows that have changed lines. `completed` are the images that its rows have completed; `number` is the node's.
    `objects`, `rows` and `bytes` are 0 if another report of the task is about the same object. If it `is_read_once`,
    there are no other rows with which these could be compared.
    """

    sums: Sums | None
    rows: int = 0
    bytes: int = 0
    problem: ErrorReport | None = None
    extremes: KeyExtremes = field(default_factory=dict)
    number: int = 0
    deleted: Ints | None = None
    matches: Matches = field(default_factory=dict)
    completed: Completed = field(default_factory=dict)
    objects: int = 1
    is_read_once: bool = False


class _Hashed(Struct):
    """What a task finds in one of its objects."""

    object: NodeBase
    parts: list[Sums] = field(default_factory=list)
    extremes: KeyExtremes = field(default_factory=dict)
    deleted: list[Ints] = field(default_factory=list)
    lines: LineMatches | None = None
    completed: CompletedHashes = field(default_factory=CompletedHashes)

    def __post_init__(self) -> None:
        """Prepare for counting lines, if they are to be counted."""
        if self.object.counts_lines and self.object.changed is not None:
            self.lines = LineMatches(self.object.base, self.object.changed.value)

    def check_rows(self, task: BaseHashTask, rows: _RowsAtCut) -> Flags | None:
        """Check the rows that are part of the node's state; return flags marking them, or None if all of them are.

        Also notes the expected rows, and the smallest and largest keys. Raises RowsInvalidError.
        """
        base, valid = self.object.base, None
        changed: Mapping[int, Keys] = self.object.changed.value if self.object.changed is not None else {}
        if changed or base.truncated:
            valid = find_valid_rows(rows.batch, base, changed, rows.key_hashes)
            if self.lines is not None:
                self.lines.add(rows.batch)
            self._complete(task, rows, ~valid)
            if self.object.expected is not None:
                # Every row that a change deletes has changed.
                hashes = salted(rows.key_hashes[~valid], rows.group[~valid])
                self.deleted.append(self.object.expected.value.find(hashes))
        add_extremes(self.extremes, base.source.number, rows.group, rows.batch.column("key"), self.object.fed, valid)
        if task.required is not None:
            check_required(task.forms.value, rows.group, rows.nulls, task.required.value, valid)
        return valid

    def _complete(self, task: BaseHashTask, rows: _RowsAtCut, changed: Flags) -> None:
        """Complete the images whose anchors are among the changed rows, and hash them if they are compared."""
        if self.object.anchored is None:
            return
        anchored: OfTables = self.object.anchored.value
        if task.is_compared:
            for images in complete_base_rows(rows.batch, self.object.base, anchored, changed):
                self.completed.add(images)
        else:
            for found in find_base_rows(rows.batch, self.object.base, anchored, changed):
                self.completed.add_numbers(found.group, found.numbers, np.zeros(len(found.numbers), np.int64))

    def add(self, sums: Sums) -> None:
        """Add combined hashes of the object's rows, by group and partition."""
        number = np.full((len(sums.keys), 1), self.object.base.source.number, np.int64)
        self.parts.append(Sums(np.concatenate([number, sums.keys], axis=1), sums.values))

    def report(self, rows: int, *, is_again: bool, is_read_once: bool) -> BaseHashReport:
        """Return the report on the object, which has this many rows; `is_again` if another copy has the same object."""
        source = self.object.base.source
        return BaseHashReport(
            combine_all(self.parts, 3),
            0 if is_again else rows,
            0 if is_again else source.size,
            extremes=self.extremes,
            number=source.number,
            deleted=np.concatenate(self.deleted) if self.deleted else None,
            matches=self.lines.matches() if self.lines is not None else {},
            completed=self.completed.all(),
            objects=0 if is_again else 1,
            is_read_once=is_read_once,
        )


class _RowsAtCut(NamedTuple):
    """Rows in the schema at the cut, the hashes of their keys, their groups, and their fields that are NULL."""

    batch: pa.RecordBatch
    key_hashes: npt.NDArray[np.uint64]
    group: Ints
    nulls: MarkedFields


def equal_bases(bases: BaseSources, shards: Mapping[int, str]) -> Iterator[tuple[BaseSource, ...]]:
    """Yield all base objects: those of different nodes of a shard that have equal content together.

    `shards` is keyed by node number. Holds one part (BasePart) of each node of a shard at a time, and finds only equal
    objects in parts with the same index: in most snapshots, that is all of them.
    """
    by_shard: dict[str, list[NodeBases]] = {}
    for node in bases.nodes:
        by_shard.setdefault(shards[node.number], []).append(node)
    for nodes in by_shard.values():
        for parts in zip_longest(*(node.parts for node in nodes)):
            yield from _group_equal([part.read() for part in parts if part is not None])


def _group_equal(parts: Sequence[Sequence[BaseSource]]) -> Iterator[tuple[BaseSource, ...]]:
    """Group the objects of different nodes that have equal digests, and whose rows are treated in the same way."""
    groups: dict[tuple[str, int], list[list[BaseSource]]] = {}
    for part in parts:
        for base in part:
            known = groups.setdefault((base.source.digest, base.source.size), [])
            for group in known:
                if group[-1].source.number != base.source.number and _are_alike(group[0], base):
                    group.append(base)
                    break
            else:
                known.append([base])
    return (tuple(group) for known in groups.values() for group in known)


def _are_alike(one: BaseSource, other: BaseSource) -> bool:
    """Whether both have the same dead rows, and rows of both are converted in the same way.

    `since` is about changes only.
    """
    dead = [base.source.dead.digest if base.source.dead else "" for base in (one, other)]
    if dead[0] != dead[1]:
        return False
    if one.mapping is None or other.mapping is None:
        return one.rows == other.rows and one.mapping is other.mapping
    conversions = [(base.mapping.unchanged, base.mapping.conversions) for base in (one, other) if base.mapping]
    return one.rows == other.rows and conversions[0] == conversions[1]


def hash_base(task: BaseHashTask) -> list[BaseHashReport]:
    """Check and hash the rows of the objects, except those whose key changed after the copy; report on each object."""
    try:
        return _hash_objects(task)
    except (RowsInvalidError, SnapshotError) as error:
        source = task.objects[0].base.source
        if isinstance(error, RowsInvalidError):
            error = ObjectDamagedError(key=source.key, kind=error.kind, node=source.node, detail=str(error))
        problem = report_of(error)
        if len(task.objects) == 1 or if_shared(problem):
            return [BaseHashReport(None, problem=problem)]
        # Find out which of them are damaged, and how.
        return [
            report for one in task.objects for report in hash_base(replace(task, objects=(one,), is_everywhere=False))
        ]


def _hash_objects(task: BaseHashTask) -> list[BaseHashReport]:
    store, rows = task.store.open(), dict[int, int]()
    # Copies that begin with the same base copy have the same objects.
    sources = [one.base.source for one in task.objects]
    are_again = [number > 0 and source.key == sources[0].key for number, source in enumerate(sources)]
    for source, is_again in zip(sources[1:], are_again[1:], strict=True):
        if not is_again:
            verify_object(store, source)
    checks, objects = BaseChecks(task.forms.value), [_Hashed(one) for one in task.objects]
    for table in _read(task):
        _count_rows(table, rows)
        for batch in table.to_batches():
            _hash_batch(task, batch, checks, objects)
    _check_counts(task, rows)
    checks.end(lambda: (batch for table in _read(task) for batch in table.to_batches()))
    total = sum(rows.values())
    return [
        hashed.report(total, is_again=is_again, is_read_once=task.is_read_once)
        for hashed, is_again in zip(objects, are_again, strict=True)
    ]


def _read(task: BaseHashTask) -> Iterator[pa.Table]:
    return read_tables(task.store.open(), task.objects[0].base.source, BASE_SCHEMA)


def _count_rows(table: pa.Table, rows: dict[int, int]) -> None:
    groups = to_numpy(table["group"])
    # The rows of a table are next to each other.
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if len(groups) else groups
    counts = np.diff(np.append(starts, len(groups)))
    for group, count in zip(groups[starts].tolist(), counts.tolist(), strict=True):
        rows[group] = rows.get(group, 0) + count


def _check_counts(task: BaseHashTask, rows: Mapping[int, int]) -> None:
    base = task.objects[0].base
    if rows != {group: count for group, count in base.rows.items() if count}:
        detail = f"it contains rows {rows} instead of {dict(base.rows)}"
        raise ObjectDamagedError(key=base.source.key, kind="rows", node=base.source.node, detail=detail)


def _hash_batch(task: BaseHashTask, batch: pa.RecordBatch, checks: BaseChecks, objects: Sequence[_Hashed]) -> None:
    """Check the rows of a stored batch against the definitions of their tables, and hash them for all objects."""
    base, key_hashes = task.objects[0].base, xxhash64(from_arrow(batch.column("key")))
    nulls = checks.add(batch, key_hashes)
    if base.mapping is None:
        _hash(task, _RowsAtCut(batch, key_hashes, _groups_of(batch), nulls), objects)
        return
    for table in converted_to_cut(pa.Table.from_batches([batch]), base):
        for to_batch in table.to_batches():
            to_hashes = xxhash64(from_arrow(to_batch.column("key")))
            nulls = find_nulls(from_arrow(to_batch.column("row"))) if task.required is not None else NO_FIELDS
            _hash(task, _RowsAtCut(to_batch, to_hashes, _groups_of(to_batch), nulls), objects)


def _groups_of(batch: pa.RecordBatch) -> Ints:
    return np.asarray(batch.column("group").to_numpy(), np.int64)


def _hash(task: BaseHashTask, rows: _RowsAtCut, objects: Sequence[_Hashed]) -> None:
    valid = [hashed.check_rows(task, rows) for hashed in objects]
    if not task.is_compared:
        return
    partition = np.asarray(rows.batch.column("partition").to_numpy(), np.int64)
    places = np.stack([rows.group, partition], axis=1)
    if task.is_everywhere and all(_are_same(flags, valid[0]) for flags in valid[1:]):
        sums = _combine(places, np.zeros(len(places), np.uint64), valid[0])
        for hashed in objects:
            hashed.add(sums)
        return
    # An entry's hash covers its key and its row, and equals Spark's xxhash64(key, row).
    hashes = xxhash64(from_arrow(rows.batch.column("row")), rows.key_hashes)
    for hashed, flags in zip(objects, valid, strict=True):
        hashed.add(_combine(places, hashes, flags))


def _are_same(one: Flags | None, other: Flags | None) -> bool:
    if one is not None and other is not None:
        return bool((one == other).all())
    return all(flags.all() for flags in (one, other) if flags is not None)


def _combine(places: Ints, hashes: npt.NDArray[np.uint64], flags: Flags | None) -> Sums:
    return combine_hashes(places, hashes) if flags is None else combine_hashes(places[flags], hashes[flags])
