"""Copying large objects: what a task does, in an executor.

A task reads a range of oids in the exported snapshot of the base copy, with lo_get: it asks for no more than the
privileges of each large object, where pg_largeobject is for superusers. Holes come as zeros, as every reader sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa

from fleet.config import Node
from fleet.nodes.relation_locks import raising_locked
from fleet.tables.large_objects import bounds
from snapshots.base_copy.copy_ranges import CopyReport
from snapshots.base_copy.destination import CopyDestination
from snapshots.base_copy.exported_snapshot import open_exported
from snapshots.base_copy.object_writer import ObjectWriter
from snapshots.records.commit import LARGE_OBJECTS, LARGE_OBJECTS_COUNT
from storage.errors import SnapshotError, report_of
from storage.location import StoreLocation

# `definition` is JSON beside the first part of a large object: owner, grants (None: the owner's own), comment.
LARGE_SCHEMA = pa.schema(
    [
        pa.field("oid", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("definition", pa.string()),
    ]
)
PART_BYTES = 256 << 10
# A worker holds an object some five times while it makes it (measured).
OBJECT_BYTES, OBJECT_RAW_BYTES = 32 << 20, 256 << 20
# So many parts are held at a time, 8 MiB at most; an object is read in such batches, too.
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


@dataclass(frozen=True, slots=True)
class LargeObjectTask:
    """The large objects of one node with oids from `low` up to, not including, `high`; without it, to the end."""

    node: Node
    number: int
    exported: str
    low: int
    high: int | None
    prefix: str
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class LargeObjectSource:
    """A primary with its exported snapshot, and a session that counts its large objects."""

    node: Node
    exported: str
    connection: psycopg.Connection[Any]


def plan_large_objects(sources: Iterable[LargeObjectSource], destination: CopyDestination) -> list[LargeObjectTask]:
    """The tasks that copy the large objects of all sources."""
    return [
        LargeObjectTask(one.node, number, one.exported, low, high, destination.prefix(one.node.id), destination.store)
        for one in sources
        for number, (low, high) in enumerate(bounds(one.connection, TASKS_PER_NODE_MAX) or [(0, None)])
    ]


def copy_large_objects(task: LargeObjectTask) -> CopyReport:
    """Copy the task's large objects; never raises a SnapshotError, but reports it."""
    try:
        with (
            open_exported(task.node, task.exported) as connection,
            raising_locked(task.node, "copying large objects", LARGE_OBJECT_TABLES),
        ):
            objects = ObjectWriter(
                task.store.open(), LARGE_SCHEMA, LARGE_OBJECTS, task.node.id,
                f"{task.prefix}/part-large-{task.number:06d}", OBJECT_BYTES, OBJECT_RAW_BYTES,
            )  # fmt: skip
            for parts in _read(connection, task):
                _add(objects, parts)
            objects.close()
            return CopyReport(tuple(objects.objects))
    except SnapshotError as error:
        return CopyReport(problem=report_of(error))


def _read(connection: psycopg.Connection[Any], task: LargeObjectTask) -> Iterator[list[LargeObjectPart]]:
    """The task's large objects, some parts at a time: several first ones, and those after each that is full."""
    high = "NULL" if task.high is None else str(task.high)
    connection.execute(FIRST_PARTS.format(part_bytes=PART_BYTES, low=task.low, high=high).encode())
    while first := connection.execute(f"FETCH {PARTS_TOGETHER} FROM first_parts", binary=True).fetchall():
        yield [LargeObjectPart(oid, 0, data, definition) for oid, data, definition in first]
        for oid in [oid for oid, data, _ in first if len(data) == PART_BYTES]:
            yield from _rest(connection, oid)


def _rest(connection: psycopg.Connection[Any], oid: int) -> Iterator[list[LargeObjectPart]]:
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
    begun = sum(part.definition is not None for part in parts)
    objects.count(LARGE_OBJECTS_COUNT, begun, sum(len(part.data) for part in parts))
    if objects.is_full:
        objects.close()
