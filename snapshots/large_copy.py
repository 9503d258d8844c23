"""Copying large objects: what a task does, in an executor.

A task reads a range of oids in the exported snapshot of the base copy, with lo_get: it asks for no more than the
privileges of each large object, where pg_largeobject is for superusers. Holes come as zeros, as every reader sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa

from fleet.config import Node
from fleet.large_objects import bounds
from fleet.relation_locks import naming_holders
from snapshots.base_copy import CopyReport
from snapshots.base_plan import base_prefix
from snapshots.exported import exported_session
from snapshots.manifest import LARGE_OBJECTS, LARGE_OBJECTS_COUNT
from snapshots.object_writer import ObjectWriter
from storage.errors import SnapshotError, report_of
from storage.open import open_store

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
# A row of LARGE_SCHEMA.
Part = tuple[int, int, bytes, str | None]
NEXT_PART = "SELECT lo_get(%s::oid, %s::bigint, %s::int)"


@dataclass(frozen=True, slots=True)
class LargeTask:
    """The large objects of one node with oids from `low` up to, not including, `high`; without it, to the end."""

    node: Node
    number: int
    exported: str
    low: int
    high: int | None
    prefix: str
    store_url: str
    store_options: Mapping[str, Any] = field(repr=False)  # may hold secrets


def plan_large(
    nodes: Mapping[str, tuple[Node, str, psycopg.Connection[Any]]],
    snapshot: str,
    operation: str,
    store: tuple[str, Mapping[str, Any]],
) -> list[LargeTask]:
    """The tasks for primaries with their exported snapshots and a session each."""
    url, options = store
    return [
        LargeTask(node, number, exported, low, high, base_prefix(snapshot, node.id, operation), url, options)
        for node, exported, connection in nodes.values()
        for number, (low, high) in enumerate(bounds(connection, TASKS_PER_NODE_MAX) or [(0, None)])
    ]


def copy_large(task: LargeTask) -> CopyReport:
    """Copy the task's large objects; never raises a SnapshotError, but reports it."""
    try:
        with (
            exported_session(task.node, task.exported) as connection,
            naming_holders(task.node, "copying large objects", LARGE_OBJECT_TABLES),
        ):
            objects = ObjectWriter(
                open_store(task.store_url, task.store_options), LARGE_SCHEMA, LARGE_OBJECTS, task.node.id,
                f"{task.prefix}/part-large-{task.number:06d}", OBJECT_BYTES, OBJECT_RAW_BYTES,
            )  # fmt: skip
            for parts in _read(connection, task):
                _add(objects, parts)
            objects.close()
            return CopyReport(tuple(objects.objects))
    except SnapshotError as error:
        return CopyReport(problem=report_of(error))


def _read(connection: psycopg.Connection[Any], task: LargeTask) -> Iterator[list[Part]]:
    """The task's large objects, some parts at a time: several first ones, and those after each that is full."""
    high = "NULL" if task.high is None else str(task.high)
    connection.execute(FIRST_PARTS.format(part_bytes=PART_BYTES, low=task.low, high=high).encode())
    while first := connection.execute(f"FETCH {PARTS_TOGETHER} FROM first_parts", binary=True).fetchall():
        yield [(oid, 0, data, definition) for oid, data, definition in first]
        for oid in [oid for oid, data, _ in first if len(data) == PART_BYTES]:
            yield from _rest(connection, oid)


def _rest(connection: psycopg.Connection[Any], oid: int) -> Iterator[list[Part]]:
    offset, parts = PART_BYTES, list[Part]()
    while True:
        (data,) = connection.execute(NEXT_PART, (oid, offset, PART_BYTES), binary=True).fetchone() or (b"",)
        if data:
            parts.append((oid, offset, data, None))
            offset += len(data)
        if parts and (not data or len(parts) == PARTS_TOGETHER):
            yield parts
            parts = []
        if not data:
            return


def _add(objects: ObjectWriter, parts: list[Part]) -> None:
    columns = [pa.array(column, kind.type) for column, kind in zip(zip(*parts, strict=True), LARGE_SCHEMA, strict=True)]
    objects.write(pa.table(columns, schema=LARGE_SCHEMA))
    begun = sum(definition is not None for *_, definition in parts)
    objects.count(LARGE_OBJECTS_COUNT, begun, sum(len(data) for _, _, data, _ in parts))
    if objects.is_full:
        objects.close()
