"""Loading large objects: with their oids, contents, owners, grants and comments, as they were at the full snapshot.

A task loads the objects of one task of the copy in their order, a batch of parts with its entry in the ledger in one
transaction: a large object that is given an owner is locked until then, and a server has few places for locks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

from fleet.config import Node
from fleet.nodes.connections import connect
from fleet.progress import Progress
from fleet.tables.large_objects import count_large_objects
from restore.ledger import LEDGER, LoadError
from restore.load import LoadReport, load_error
from restore.load_target import LoadTarget
from snapshots.base_copy.large_objects import PARTS_TOGETHER
from snapshots.operations.spark_jobs import raise_first, run_tasks
from snapshots.records.commit import FullSnapshot, StoredObject
from snapshots.records.large_objects import count_by_node, list_large_objects
from storage.errors import SnapshotError, report_of
from storage.location import StoreLocation
from wal.segments.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class LargeLoadTask:
    """Objects of the store, in the order in which they were written, and the database they are loaded into."""

    objects: tuple[StoredObject, ...]
    node: Node
    store: StoreLocation


def load_large_objects(
    session: SparkSession,
    full: FullSnapshot,
    targets: Mapping[str, LoadTarget],
    store: StoreLocation,
    progress: Progress,
) -> None:
    """Load all large objects of a full snapshot into the targets of their shards.

    Raises LoadError where a target has another number of them afterwards, and the first error that a task met.
    """
    tasks = [LargeLoadTask(found, targets[found[0].node].node, store) for found in _by_task(list_large_objects(full))]
    progress.step("load large objects", total=len(tasks), unit="tasks")
    raise_first([report.problem for report in run_tasks(session, load_large, tasks, progress)])
    counts = count_by_node(full)
    for shard, target in targets.items():
        with connect(target.node) as connection:
            if (count := count_large_objects(connection)) != counts.get(shard, 0):
                raise LoadError(
                    f"node {target.node.id}: it has {count} large objects, and {counts.get(shard, 0)} were loaded",
                    details={"node": target.node.id},
                )


def _by_task(objects: tuple[StoredObject, ...]) -> list[tuple[StoredObject, ...]]:
    """The objects of every task of the copy: their keys begin alike, and then count."""
    found: dict[str, list[StoredObject]] = {}
    for one in sorted(objects, key=lambda stored: stored.key):
        found.setdefault(one.key.rsplit("-", 2)[0], []).append(one)
    return [tuple(together) for together in found.values()]


def load_large(task: LargeLoadTask) -> LoadReport:
    """Load the task's objects."""
    total = 0
    try:
        store = task.store.open()
        with connect(task.node) as connection:
            connection.execute("SET synchronous_commit = off")
            for stored in task.objects:
                body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
                for number, parts in enumerate(parts_of(stored, body)):
                    total += _load_parts(connection, f"{stored.key} {number}", parts)
        return LoadReport(total)
    except SnapshotError as error:
        return LoadReport(problem=report_of(error))
    except psycopg.Error as error:
        return LoadReport(problem=report_of(load_error(task.node, error)))


def parts_of(stored: StoredObject, body: bytes) -> Iterator[list[dict[str, Any]]]:
    """The rows of an object that is proven whole, some at a time; raise ObjectDamagedError."""
    try:
        for batch in pq.ParquetFile(pa.BufferReader(body)).iter_batches(PARTS_TOGETHER, use_threads=False):
            yield batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        detail = f"it can't be read as Parquet: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error


def _load_parts(connection: psycopg.Connection[Any], name: str, parts: list[dict[str, Any]]) -> int:
    """Load a batch, unless the ledger has it; the number of large objects that begin in it."""
    first = [part for part in parts if part["definition"] is not None]
    with connection.transaction(), connection.cursor() as cursor:
        if cursor.execute(f"INSERT INTO {LEDGER} VALUES (%s, 0, 0) ON CONFLICT DO NOTHING", (name,)).rowcount == 0:
            return 0
        created = [(part["oid"], part["data"]) for part in first]
        added = [(part["oid"], part["offset"], part["data"]) for part in parts if part["definition"] is None]
        cursor.executemany("SELECT lo_from_bytea(%s::oid, %b)", created)
        cursor.executemany("SELECT lo_put(%s::oid, %s::bigint, %b)", added)
        user = connection.info.user
        for statement in [
            one for part in first for one in statements(part["oid"], json.loads(part["definition"]), user)
        ]:
            cursor.execute(statement)
    return len(first)


def statements(oid: int, definition: Mapping[str, Any], user: str) -> list[sql.Composed]:
    """What makes a large object that `user` has created as it was: owner, grants and comment."""
    which = sql.SQL("LARGE OBJECT {}").format(sql.Literal(oid))
    owner = sql.Identifier(definition["owner"])
    found: list[sql.Composed] = []
    if definition["comment"] is not None:
        found.append(sql.SQL("COMMENT ON {} IS {}").format(which, sql.Literal(definition["comment"])))
    if definition["owner"] != user:
        found.append(sql.SQL("ALTER {} OWNER TO {}").format(which, owner))
    if definition["grants"] is not None:
        found.append(sql.SQL("REVOKE ALL ON {} FROM {}").format(which, owner))
        found += [_grant(which, definition["owner"], grant) for grant in definition["grants"]]
    return found


def _grant(which: sql.Composed, owner: str, grant: tuple[str, str, str, bool]) -> sql.Composed:
    grantor, grantee, privilege, may_grant = grant
    to = sql.Identifier(grantee) if grantee else sql.SQL("PUBLIC")
    option = sql.SQL(" WITH GRANT OPTION" if may_grant else "")
    statement = sql.SQL("GRANT {} ON {} TO {}{}").format(sql.SQL(privilege), which, to, option)
    if grantor == owner:
        return statement
    # As pg_dump does: only a superuser may, as nobody else can give what another role has given.
    authorization = sql.SQL("SET SESSION AUTHORIZATION {}; {}; RESET SESSION AUTHORIZATION")
    return authorization.format(sql.Identifier(grantor), statement)
