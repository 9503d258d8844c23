"""Write the base of one node's copy at a chain's last cut.

An object of an earlier base copy is carried, that is, listed again, unless it belongs to the copy of another node as
well: in a merge, every copy has objects of its own. If some of its rows are no longer part of the state, a small object
has their numbers (snapshots/fold/dead_rows.py). If too many are not, the others are written to new objects, in the
schema at the cut; so are the rows that changes have produced. An object whose tables have not changed is not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.columns.python_workers import map_batches
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA, OBJECT_BYTES
from cutline.snapshots.base_copy.row_writer import RowWriter
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows
from cutline.snapshots.fold.dead_rows import NUMBER, store_dead_rows
from cutline.snapshots.fold.fold import Fold, fold, fold_in_driver, long_image_reader
from cutline.snapshots.fold.sources import (
    PROBLEM,
    BaseSource,
    OpenedObject,
    Sources,
    converted_to_cut,
    open_object,
    problem_of,
    read_all_rows,
    sources_of,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, StoredObject
from cutline.snapshots.records.documents import base_prefix
from cutline.snapshots.repair.work import Work
from cutline.spark.sent_values import broadcast
from cutline.storage.errors import ErrorReport, RefusedError, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The rows that changes have produced are written by one Spark task for this many changes.
CHANGES_PER_TASK = 1_000_000
# An object is written again if a larger share of its rows, or of their bytes, is no longer part of the state: large
# rows that are updated again and again would otherwise stay in the objects of all merges.
DEAD_SHARE_MAX = 0.2
WRITTEN_ROWS = "object string"
WRITTEN_SCHEMA = pa.schema([("object", pa.string())])


class ChangesIncompleteError(RefusedError):
    """A change needs an earlier image of its row, and the chain does not have it."""


class NewBase(Struct, frozen=True):
    """The objects of a node's base: those that were `written`, and those of earlier base copies that are `carried`."""

    written: tuple[StoredObject, ...]
    carried: tuple[StoredObject, ...]

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """All objects of the base."""
        return (*self.carried, *self.written)


def write_base(chain: Chain, node: str, operation: str, work: Work) -> NewBase:
    """Store the base of the node at the chain's last cut, under keys of `operation`.

    Raises ObjectDamagedError if an object can't be read, ChangesIncompleteError, and any error of the store.
    """
    sources = sources_of(chain, (node,), work.location.open())
    folded = fold_in_driver(sources, work.location) or fold(work.session(), sources, work.location)
    try:
        if folded.problems:
            raise error_of(folded.problems[0])
        changed = dict(folded.changed.get(0, {}))
        carried, to_read = _choose(sources, changed, base_prefix(chain.name, node, ""))
        folder = base_prefix(chain.name, node, operation)
        written = list(_write_images(chain, node, folded, sources, work, f"{folder}/part-images"))
        for report in _rewrite(work, chain.name, node, folder, changed, to_read):
            written += report.written
            carried += report.carried
    finally:
        folded.release()
    return NewBase(tuple(written), tuple(carried))


def _choose(sources: Sources, changed: Mapping[int, Keys], folder: str) -> tuple[list[StoredObject], list[BaseSource]]:
    """Return the objects that are carried without reading them, and those that have to be read.

    Objects outside of the node's `folder` are never carried. Objects of tables that no longer exist, or were copied
    again, are in neither.
    """
    carried: list[StoredObject] = []
    to_read: list[BaseSource] = []
    for base in sources.bases:
        if not base.groups:
            continue
        is_whole = base.groups.isdisjoint(changed.keys() | base.truncated)
        if is_whole and base.source.key.startswith(folder) and _may_carry(base, 0):
            carried.append(_stored(base))
        else:
            to_read.append(base)
    return carried, to_read


def _may_carry(base: BaseSource, dying: int) -> bool:
    """Whether few enough rows are dead or in tables that no longer exist, if `dying` rows of other tables die."""
    dead = base.source.dead.rows if base.source.dead else 0
    total = dead + sum(base.rows.values())
    if base.mapping is not None:
        dead += sum(count for number, count in base.rows.items() if base.mapping.number_of(number) is None)
    return dead + dying <= DEAD_SHARE_MAX * total


def _stored(base: BaseSource) -> StoredObject:
    source = base.source
    return StoredObject(source.key, BASE, source.node, source.size, source.digest, dict(base.rows), source.dead)


class _RewriteTask(Struct, frozen=True):
    """Objects to read, and the beginnings of the keys of new objects; `changed` is a broadcast of the changed keys."""

    bases: tuple[BaseSource, ...]
    changed: Any
    snapshot: str
    node: str
    beginning: str
    dead_beginning: str
    location: StoreLocation

    @property
    def size(self) -> int:
        """The bytes of the objects to read."""
        return sum(base.source.size for base in self.bases)


class _RewriteReport(Struct, frozen=True):
    """The new objects and the carried ones, or the error that ended the task."""

    written: tuple[StoredObject, ...] = ()
    carried: tuple[StoredObject, ...] = ()
    problem: ErrorReport | None = None


def _rewrite(
    work: Work, snapshot: str, node: str, folder: str, changed: Mapping[int, Keys], bases: Sequence[BaseSource]
) -> list[_RewriteReport]:
    size = sum(base.source.size for base in bases)
    rows = sum(sum(base.rows.values()) for base in bases)

    def tasks(known: Any) -> list[_RewriteTask]:
        shares = enumerate(_share(bases), start=1)
        return [
            _RewriteTask(
                some,
                known,
                snapshot,
                node,
                f"{folder}/part-{number:06d}",
                f"{folder}/dead-{number:06d}",
                work.location,
            )
            for number, some in shares
        ]

    return work.run(_rewrite_objects, tasks, dict(changed), lambda task: task.size, is_local=work.is_local(size, rows))


def copy_objects(
    objects: Sequence[StoredObject], snapshot: str, node: str, operation: str, work: Work
) -> list[StoredObject]:
    """Store the base objects of another node again as the node's own, under keys of `operation`.

    They have no dead rows: only objects of a merge have, and there, every copy has objects of its own. Raises
    ObjectDamagedError if an object can't be read, and any error of the store.
    """
    beginning = f"{base_prefix(snapshot, node, operation)}/part-copied"

    def tasks(_: Any) -> list[_ObjectCopyTask]:
        return [
            _ObjectCopyTask(
                one, structs.replace(one, key=f"{beginning}-{number:06d}.parquet", node=node), work.location
            )
            for number, one in enumerate(objects)
        ]

    is_local = work.is_local(sum(one.size for one in objects))
    reports = work.run(_copy_object, tasks, None, lambda task: task.source.size, is_local=is_local)
    return [stored for report in reports for stored in report.written]


class _ObjectCopyTask(Struct, frozen=True):
    """An object to read, and the entry under which it is stored again, but for the digest."""

    source: StoredObject
    target: StoredObject
    location: StoreLocation


def _copy_object(task: _ObjectCopyTask) -> _RewriteReport:
    store, source = task.location.open(), task.source
    try:
        body = read_listed(store, source.node, source.key, (source.size, source.digest))
        # In an encrypted store the new object has other bytes, because encryption binds them to the key.
        digest = create_or_find(store, task.target.key, body)
    except SnapshotError as error:
        return _RewriteReport(problem=report_of(error))
    return _RewriteReport((structs.replace(task.target, digest=digest),))


def _share(bases: Sequence[BaseSource]) -> list[tuple[BaseSource, ...]]:
    """Divide the objects so that each share has about the bytes of one object."""
    size = sum(base.source.size for base in bases)
    count = min(max(size // OBJECT_BYTES, 1), max(len(bases), 1))
    largest_first = sorted(bases, key=lambda base: (-base.source.size, base.source.key))
    return [share for number in range(count) if (share := tuple(largest_first[number::count]))]


def _rewrite_objects(task: _RewriteTask) -> _RewriteReport:
    """Carry the task's objects, or write those of their rows that are part of the state."""
    rows, carried = RowWriter.of(task.location, task.node, task.beginning), list[StoredObject]()
    store, changed = task.location.open(), task.changed.value
    try:
        for number, base in enumerate(task.bases):
            file = open_object(store, base.source)
            is_own = base.source.key.startswith(base_prefix(task.snapshot, task.node, ""))
            if is_own and (found := _living_rows(file, base, changed)) is not None:
                carried.append(_carry(store, f"{task.dead_beginning}-{number:06d}", base, found))
                continue
            for batch in _batches(file, base, _NumberedRows.of(file)):
                valid = find_valid_rows(batch, base, changed)
                if valid.any():
                    living = pa.Table.from_batches([batch]).select(BASE_SCHEMA.names)
                    rows.add(living.filter(to_mask(valid)))
        rows.close()
    except SnapshotError as error:
        return _RewriteReport(problem=report_of(error))
    return _RewriteReport(rows.stored, tuple(carried))


class _NumberedRows(Struct):
    """The rows of an object, by their numbers, as far as they have been read: their stored groups, and their bytes.

    `living` flags those that are still part of the state, and `dying` counts those that are not, but were before.
    """

    groups: Ints
    sizes: Ints
    living: Flags
    dying: int = 0

    @classmethod
    def of(cls, file: OpenedObject) -> _NumberedRows:
        count = file.metadata.num_rows
        return cls(np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.bool_))


def _living_rows(file: OpenedObject, base: BaseSource, changed: Mapping[int, Keys]) -> _NumberedRows | None:
    """Find the rows of the object that are still part of the state; None if too few are."""
    rows = _NumberedRows.of(file)
    for batch in _batches(file, base, rows):
        valid = find_valid_rows(batch, base, changed)
        rows.dying += int(np.count_nonzero(~valid))
        if not _may_carry(base, rows.dying):
            return None
        rows.living[to_numpy(batch.column(NUMBER))[valid]] = True
    total, dead = (int(sizes.sum(dtype=np.int64)) for sizes in (rows.sizes, rows.sizes[~rows.living]))
    return rows if _may_carry(base, rows.dying) and dead <= DEAD_SHARE_MAX * total else None


def _carry(store: ObjectStore, beginning: str, base: BaseSource, rows: _NumberedRows) -> StoredObject:
    """Return the object's entry in the merge; store the numbers of its dead rows if more rows are dead than before.

    Rows of tables that no longer exist are only counted among the dead if other rows are.
    """
    if not rows.dying:
        return _stored(base)
    dead = store_dead_rows(store, beginning, np.flatnonzero(~rows.living))
    return structs.replace(_stored(base), rows=_count(rows.groups[rows.living]), dead=dead)


def _batches(file: OpenedObject, base: BaseSource, rows: _NumberedRows) -> Iterator[pa.RecordBatch]:
    """Read an object from `open_object` in the schema at the cut, each row with its number in the object.

    Notes the groups and sizes of all `rows`, those that were dead before included. Compares the rows with the object's
    entry.
    """
    counted = Counter[int]()
    for group in range(file.num_row_groups):
        table, (first, living) = read_all_rows(file, group, base.source, BASE_SCHEMA), file.living(group)
        place = slice(first, first + len(table))
        rows.groups[place] = to_numpy(table["group"])
        rows.sizes[place] = to_numpy(pc.binary_length(table["row"]))
        if not living.all():
            table = table.filter(to_mask(living))
        numbers = first + np.flatnonzero(living)
        counted.update(_count(rows.groups[numbers]))
        numbered = table.append_column(pa.field(NUMBER, pa.int64(), nullable=False), to_arrow(numbers))
        for converted in converted_to_cut(numbered, base):
            yield from converted.to_batches()
    if counted != {group: count for group, count in base.rows.items() if count}:
        detail = f"it contains rows {dict(counted)} instead of {dict(base.rows)}"
        raise ObjectDamagedError(key=base.source.key, kind="rows", node=base.source.node, detail=detail)


def _count(groups: Ints) -> dict[int, int]:
    numbers, counts = np.unique(groups, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _write_images(
    chain: Chain, node: str, folded: Fold, sources: Sources, work: Work, beginning: str
) -> Iterator[StoredObject]:
    """Write the rows that changes have produced."""
    if folded.local is not None:
        rows = RowWriter.of(work.location, node, beginning)
        for table in _parts(folded.local):
            _check_images(chain, node, table)
            rows.add(table.select(BASE_SCHEMA.names).cast(BASE_SCHEMA))
        rows.close()
        yield from rows.stored
    reader, columns = long_image_reader(sources, work.location), [*BASE_SCHEMA.names]
    frames: list[DataFrame] = []
    if folded.images is not None:
        count = max(sources.changes // CHANGES_PER_TASK, 1)
        ordered = folded.images.select(*columns).repartition(count, "group", "partition").sortWithinPartitions("group")
        frames.append(map_batches(ordered, _writing(work.location, node, beginning), WRITTEN_ROWS))
    if folded.long_images is not None:
        sent = broadcast(folded.long_images.sparkSession, reader)
        write = _writing(work.location, node, f"{beginning}-long")

        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from write(batch.select(columns) for batch in sent.value.read_images(batches))

        frames.append(map_batches(folded.long_images, read, WRITTEN_ROWS))
    for frame in frames:
        with work.showing_stages():
            found = [json.loads(row["object"]) for row in frame.collect()]  # bounded by the objects
        for one in found:
            if "problem" in one:
                raise error_of(one["problem"])
            if "group" in one:
                raise _incomplete_error(chain, node, one["group"], one["rows"])
        for one in found:
            yield StoredObject(**{**one, "rows": {int(number): rows for number, rows in one["rows"].items()}})


PART_ROWS = 1 << 17


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    for first in range(0, len(table), PART_ROWS):
        yield table.slice(first, PART_ROWS)


def _check_images(chain: Chain, node: str, table: pa.Table) -> None:
    problems = table.filter(pc.equal(table["group"], PROBLEM))
    for row in problems.slice(0, 1).to_pylist():
        if (report := problem_of(row["row"])) is not None:
            raise error_of(report)
        raise _incomplete_error(chain, node, row["partition"], len(problems))


def _incomplete_error(chain: Chain, node: str, number: int, rows: int) -> ChangesIncompleteError:
    names = {group.number: group.name for group in chain.groups(node)}
    table = names.get(number, f"number {number}")
    return ChangesIncompleteError(
        f"node {node}: the earlier images that are needed to apply the changes to {rows:,} rows of table {table} are"
        " missing from the snapshot; nothing was merged",
        hint=f"see what is wrong: snapshot check {chain.name}",
        details={"snapshot": chain.name, "node": node, "group": table},
    )


def _writing(location: StoreLocation, node: str, beginning: str) -> Any:
    """Return a function for a task that writes images (BASE_SCHEMA) to objects, and yields what it has stored."""

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = RowWriter.of(location, node, beginning)
        found: list[dict[str, Any]] = []
        try:
            for batch in batches:
                table = pa.Table.from_batches([batch]).cast(BASE_SCHEMA)
                problems = table.filter(pc.equal(table["group"], PROBLEM))
                for row in problems.slice(0, 1).to_pylist():
                    report = problem_of(row["row"])
                    found.append({"problem": report} if report else {"group": row["partition"], "rows": len(problems)})
                if len(table) and not found:
                    rows.add(table)
            if not found:
                rows.close()
        except SnapshotError as error:
            found.append({"problem": report_of(error)})
        if not found:
            found = [{name: getattr(stored, name) for name in StoredObject.__struct_fields__} for stored in rows.stored]
        texts = pa.array([json.dumps(one) for one in found], pa.string())
        yield pa.record_batch([texts], schema=WRITTEN_SCHEMA)

    return write
