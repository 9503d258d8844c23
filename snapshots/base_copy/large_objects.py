"""Copy large objects (the work of one task in an executor), and read stored large objects.

A task reads a range of oids in the base copy's exported snapshot. It uses lo_get, which needs only privileges on each
large object; reading pg_largeobject would require a superuser. Holes are read as zeros, as they always are in
PostgreSQL.

Stored objects are validated strictly, because anyone with write access to an unencrypted store can seal any content:
the columns must be the ones in LARGE_SCHEMA, definitions must be valid, and the parts must be in the order in which a
task writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from msgspec import Struct

from cutline.fleet.config import Node
from cutline.nodes.large_objects import oid_ranges
from cutline.nodes.relation_locks import raising_locked
from cutline.snapshots.base_copy.copy_ranges import CopyDestination, CopyReport, ObjectWriter
from cutline.snapshots.base_copy.copy_slots import open_exported
from cutline.snapshots.operations.object_lists import store_lists_above
from cutline.snapshots.records.commit import (
    LARGE_OBJECTS,
    LARGE_OBJECTS_COUNT,
    LargeObjectDefinition,
    StoredObject,
    parse_definition,
)
from cutline.storage.errors import SnapshotError, report_of
from cutline.storage.rate import RateLimit
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import open_parquet, reading_parquet

# `definition` is JSON in the row of a large object's first part: owner, comment and grants (null for the default).
LARGE_SCHEMA = pa.schema(
    [
        pa.field("oid", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("definition", pa.string()),
    ]
)
# Every part of a large object except the last has this size, so a shorter part is the last.
PART_BYTES = 256 << 10
OID_MAX = 2**32 - 1
# A worker holds about five copies of an object while writing it (measured).
OBJECT_BYTES, OBJECT_RAW_BYTES = 32 << 20, 256 << 20
# The number of parts held in memory at a time (at most 8 MiB). Large objects are read in batches of this many parts.
PARTS_TOGETHER = 32
TASKS_PER_NODE_MAX = 8
LARGE_OBJECT_TABLES = ("pg_largeobject", "pg_largeobject_metadata")
FIRST_PARTS = """
DECLARE first_parts NO SCROLL CURSOR FOR
SELECT m.oid::bigint, lo_get(m.oid, 0, {part_bytes}), json_build_object(
         'owner', pg_get_userbyid(m.lomowner), 'comment', obj_description(m.oid, 'pg_largeobject'),
         'grants', CASE WHEN m.lomacl IS NOT NULL THEN (
            SELECT coalesce(json_agg(json_build_array(pg_get_userbyid(a.grantor),
                        CASE a.grantee WHEN 0 THEN '' ELSE pg_get_userbyid(a.grantee) END,
                        a.privilege_type, a.is_grantable)), '[]') FROM aclexplode(m.lomacl) AS a) END)::text
  FROM pg_largeobject_metadata m WHERE m.oid >= {low} AND ({high}::oid IS NULL OR m.oid < {high}) ORDER BY 1
"""
NEXT_PART = "SELECT lo_get(%s::oid, %s::bigint, %s::int)"


class LargeObjectPart(NamedTuple):
    """A row of LARGE_SCHEMA."""

    oid: int
    offset: int
    data: bytes
    definition: str | None


class StoredPart(NamedTuple):
    """A row of LARGE_SCHEMA that was read back and verified."""

    oid: int
    offset: int
    data: bytes
    definition: LargeObjectDefinition | None


class LargeObjectTask(Struct, frozen=True):
    """One node's large objects with oids from `low` up to, but not including, `high`; None means no upper bound.

    They are read at up to `bytes_per_second`; None means no limit.
    """

    node: Node
    number: int
    exported: str
    low: int
    high: int | None
    destination: CopyDestination
    bytes_per_second: float | None = None


class LargeObjectSource(Struct, frozen=True):
    """A primary with its exported snapshot, and a session that finds the ranges of its oids."""

    node: Node
    exported: str
    connection: psycopg.Connection[Any]


def plan_large_objects(
    sources: Iterable[LargeObjectSource], destination: CopyDestination, bytes_per_second: float | None = None
) -> list[LargeObjectTask]:
    """Return the tasks that copy the large objects from all sources, each at up to `bytes_per_second`."""
    return [
        LargeObjectTask(source.node, number, source.exported, low, high, destination, bytes_per_second)
        for source in sources
        for number, (low, high) in enumerate(oid_ranges(source.connection, TASKS_PER_NODE_MAX) or [(0, None)])
    ]


def copy_large_objects(task: LargeObjectTask) -> CopyReport:
    """Copy the task's large objects. Reports a SnapshotError instead of raising it."""
    try:
        with (
            open_exported(task.node, task.exported) as connection,
            raising_locked(task.node, "copying large objects", LARGE_OBJECT_TABLES),
        ):
            to = task.destination
            objects = ObjectWriter(
                to.store.open(),
                LARGE_SCHEMA,
                LARGE_OBJECTS,
                task.node.id,
                f"{to.prefix(task.node.id)}/part-large-{task.number:06d}",
                OBJECT_BYTES,
                OBJECT_RAW_BYTES,
            )
            pace = RateLimit(task.bytes_per_second)
            for parts in _read(connection, task):
                _add(objects, parts)
                pace.spend(sum(len(part.data) for part in parts))
            objects.close()
            stored = objects.objects
            return CopyReport(store_lists_above(objects.store, to.snapshot, to.operation, stored, to.reported_max))
    except SnapshotError as error:
        return CopyReport(problem=report_of(error))


def _read(connection: psycopg.Connection[Any], task: LargeObjectTask) -> Iterator[list[LargeObjectPart]]:
    """Yield the parts of the task's large objects: batches of first parts, each batch followed by its further parts."""
    high = "NULL" if task.high is None else str(task.high)
    connection.execute(FIRST_PARTS.format(part_bytes=PART_BYTES, low=task.low, high=high).encode())
    while first := connection.execute(f"FETCH {PARTS_TOGETHER} FROM first_parts", binary=True).fetchall():
        yield [LargeObjectPart(oid, 0, data, definition) for oid, data, definition in first]
        for oid in [oid for oid, data, _ in first if len(data) == PART_BYTES]:
            yield from _read_rest(connection, oid)


def _read_rest(connection: psycopg.Connection[Any], oid: int) -> Iterator[list[LargeObjectPart]]:
    offset, parts = PART_BYTES, list[LargeObjectPart]()
    while True:
        (data,) = connection.execute(NEXT_PART, (oid, offset, PART_BYTES), binary=True).fetchone() or (b"",)
        if data:
            parts.append(LargeObjectPart(oid, offset, data, None))
            offset += len(data)
        if parts and (not data or len(parts) == PARTS_TOGETHER):
            yield parts
            parts = []
        if not data:
            return


def _add(objects: ObjectWriter, parts: list[LargeObjectPart]) -> None:
    columns = [pa.array(column, kind.type) for column, kind in zip(zip(*parts, strict=True), LARGE_SCHEMA, strict=True)]
    objects.write(pa.table(columns, schema=LARGE_SCHEMA))
    large_objects = sum(part.definition is not None for part in parts)
    objects.count(LARGE_OBJECTS_COUNT, large_objects, sum(len(part.data) for part in parts))
    if objects.is_full:
        objects.close()


class PartOrder:
    """Verifies that, across all of a copy task's objects, the parts are in the order in which the task writes them.

    First parts have ascending oids and offset 0. Each further part begins where the previous part of its large object
    ends.
    """

    def __init__(self) -> None:
        self._last_oid, self._is_interrupted = 0, False
        # Keep only the ends of large objects that may have a further part, since a task may read millions of large
        # objects.
        self._ends: dict[int, int] = {}

    def interrupt(self) -> None:
        """Accept further parts of unknown large objects, because a damaged object may contain their first parts."""
        self._is_interrupted = True

    def follow(self, part: StoredPart) -> None:
        """Raise ValueError unless `part` can be the next part."""
        oid, offset, size_bytes = part.oid, part.offset, len(part.data)
        if not 0 < oid <= OID_MAX or size_bytes > PART_BYTES:
            raise ValueError(f"a part of large object {oid} is {size_bytes} bytes")
        if part.definition:
            expected: int | None = 0
            if oid <= self._last_oid:
                raise ValueError(f"large object {oid} is listed after large object {self._last_oid}")
            self._last_oid = oid
        else:
            expected = self._ends.pop(oid, max(offset, PART_BYTES) if self._is_interrupted else None)
            if not size_bytes:
                raise ValueError(f"large object {oid} contains an empty part after its first")
        if offset != expected:
            instead = ", after its last part" if expected is None else f" instead of {expected}"
            raise ValueError(f"a part of large object {oid} is at offset {offset}{instead}")
        if size_bytes == PART_BYTES:
            self._ends[oid] = offset + size_bytes


def read_parts(stored: StoredObject, body: bytes, order: PartOrder) -> Iterator[list[StoredPart]]:
    """Yield the rows in an object whose digest was verified, PARTS_TOGETHER at a time; raise ObjectDamagedError.

    `order` must already have followed the parts in the previous objects of the same copy task.
    """
    for rows in _read_rows(stored, body, LARGE_SCHEMA.names):
        parts = [StoredPart(oid, offset, data, _parse(stored, oid, text)) for oid, offset, data, text in rows]
        for part in parts:
            try:
                order.follow(part)
            except ValueError as error:
                raise _damaged(stored, str(error)) from error
        yield parts


def read_definitions(stored: StoredObject, body: bytes) -> Iterator[tuple[int, LargeObjectDefinition]]:
    """Yield the oids and definitions in an object whose digest was verified; raise ObjectDamagedError."""
    for rows in _read_rows(stored, body, ["oid", "definition"]):
        for oid, text in rows:
            if definition := _parse(stored, oid, text):
                yield oid, definition


def _parse(stored: StoredObject, oid: int, text: str | None) -> LargeObjectDefinition | None:
    try:
        return None if text is None else parse_definition(text)
    except ValueError as error:
        raise _damaged(stored, f"large object {oid}: {error}") from error


def _read_rows(stored: StoredObject, body: bytes, columns: list[str]) -> Iterator[list[tuple[Any, ...]]]:
    with reading_parquet(stored.key, stored.node), open_parquet(pa.BufferReader(body)) as file:
        if not file.schema_arrow.equals(LARGE_SCHEMA):
            raise ValueError(f"its columns are not {', '.join(LARGE_SCHEMA.names)}")
        for batch in file.iter_batches(PARTS_TOGETHER, columns=columns, use_threads=False):
            yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _damaged(stored: StoredObject, detail: str) -> ObjectDamagedError:
    return ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail)
