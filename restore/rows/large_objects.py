"""Load large objects with their oids, contents, owners, grants and comments as of the full snapshot.

Each load task loads, in order, what one copy task stored. Each transaction loads a batch of parts and records it in the
ledger. Batches are small, because a transaction locks every large object whose owner it sets, and the server's lock
table is limited.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec import Struct, field, structs
from psycopg import sql

from cutline.fleet.config import Node, restore_limit
from cutline.fleet.progress import Progress
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.large_objects import count_large_objects
from cutline.restore.rows.load import LoadError, LoadTarget, load_error
from cutline.restore.scope.scope import UNCHANGED, RoleChanges
from cutline.snapshots.base_copy.large_objects import PartOrder, StoredPart, read_definitions, read_parts
from cutline.snapshots.records.commit import (
    FullSnapshot,
    Grant,
    LargeObjectDefinition,
    StoredObject,
    count_by_node,
    group_by_copy_task,
    list_large_objects,
)
from cutline.spark.spark_jobs import Dealing, raise_first, run_tasks, share_rate, shared_problem
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.rate import RateLimit
from cutline.wal.segments.damage import read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Stored text is never used as SQL.
PRIVILEGES = {"SELECT": sql.SQL("SELECT"), "UPDATE": sql.SQL("UPDATE")}


KNOWN_QUERY = """
SELECT role FROM unnest(%s::text[]) AS given (role) WHERE EXISTS (SELECT FROM pg_roles WHERE rolname = role)
"""


class LargeLoadTask(Struct, frozen=True):
    """Stored objects, in the order in which they were written, and the database and ledger for loading them.

    They are loaded at up to `bytes_per_second`; None means no limit.
    """

    objects: tuple[StoredObject, ...]
    node: Node
    ledger: str
    store: StoreLocation
    roles: RoleChanges
    bytes_per_second: float | None = None

    @property
    def size(self) -> int:
        """The size of its objects in bytes."""
        return sum(stored_object.size for stored_object in self.objects)


def load_large_objects(
    session: SparkSession,
    full: FullSnapshot,
    targets: Mapping[str, LoadTarget],
    store: StoreLocation,
    progress: Progress,
    roles: RoleChanges = UNCHANGED,
) -> list[str]:
    """Load the large objects of a full snapshot into the targets of their shards; return lines about missing roles.

    Objects whose shard has no target were loaded earlier. The names in `roles` are text. Only the stored objects name
    all their roles, so a target may lack some. Raises the first error of any task, or LoadError if a target ends up
    with the wrong number of large objects.
    """
    sessions = {load_target.node.id: load_target.task_sessions for load_target in targets.values()}
    limited, share = share_rate(session, sessions, restore_limit(one.node for one in targets.values()))
    tasks = [
        LargeLoadTask(objects, target.node, target.ledger, store, roles, share)
        for objects in group_by_copy_task(list_large_objects(full))
        for target in [targets.get(objects[0].node)]
        if target is not None
    ]
    progress.step("load large objects", total=len(tasks), unit="tasks")
    dealing = Dealing[LargeLoadTask](lambda task: task.size, lambda task: (task.node.id,), limited)
    reports = run_tasks(session, load_large, tasks, progress, dealing, problem_of=shared_problem)
    raise_first([report.problem for report in reports])
    counts = count_by_node(full)
    for shard, target in targets.items():
        with raising_unreachable(target.node), connect(target.node) as connection:
            if (count := count_large_objects(connection)) != counts.get(shard, 0):
                raise LoadError(
                    f"node {target.node.id}: {count} large objects after the restore, {counts.get(shard, 0)} expected",
                    hint="check whether something else writes to the restored database, then repeat the command",
                    details={"node": target.node.id},
                )
    return _describe_lacking(tasks, reports)


def _describe_lacking(tasks: Iterable[LargeLoadTask], reports: Iterable[LargeLoadReport]) -> list[str]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for task, report in zip(tasks, reports, strict=True):
        for role, (oid, count) in report.lacking.items():
            first, others = found.get((task.node.id, role), (oid, 0))
            found[task.node.id, role] = (min(oid, first), count + others)
    return [
        f"node {node}: there is no role {role}, which large objects name ({count}, such as {oid}): those that it owned"
        " belong to the restoring role, and its privileges are left out; --role-map puts another role in its place"
        for (node, role), (oid, count) in sorted(found.items())
    ]


class LargeLoadReport(Struct, frozen=True):
    """What a load task found: the roles that its server lacks, each with the oid of an object and the number of them.

    `problem` is the error that ended the task.
    """

    lacking: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    problem: ErrorReport | None = None


class ActorsTask(Struct, frozen=True):
    """The stored objects whose definitions are to be read."""

    objects: tuple[StoredObject, ...]
    store: StoreLocation


class ActorsReport(Struct, frozen=True):
    """The owners of a shard's large objects and the grantors of privileges, each with the oid of an example object."""

    shard: str
    oids: Mapping[str, int]
    problem: ErrorReport | None = None


def find_actors(
    session: SparkSession, full: FullSnapshot, shards: Container[str], store: StoreLocation, progress: Progress
) -> dict[str, dict[str, list[str]]]:
    """Find the owners and grantors of the large objects of `shards`, keyed by shard, each with an example object."""
    stored = tuple(large_object for large_object in list_large_objects(full) if large_object.node in shards)
    tasks = [ActorsTask(objects, store) for objects in group_by_copy_task(stored)]
    progress.step("check owners of large objects", total=len(tasks), unit="tasks")
    reports = run_tasks(
        session,
        read_actors,
        tasks,
        progress,
        Dealing(lambda task: sum(stored_object.size for stored_object in task.objects)),
        problem_of=shared_problem,
    )
    raise_first([report.problem for report in reports])
    actors: dict[str, dict[str, list[str]]] = {}
    for report in reports:
        for role, oid in report.oids.items():
            actors.setdefault(report.shard, {}).setdefault(role, []).append(f"LARGE OBJECT {oid}")
    return actors


def read_actors(task: ActorsTask) -> ActorsReport:
    """Read the owners and grantors in the task's objects."""
    shard, oids = task.objects[0].node, dict[str, int]()
    try:
        store = task.store.open()
        for stored in task.objects:
            body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
            for oid, definition in read_definitions(stored, body):
                grantors = (grant.grantor for grant in definition.grants or ())
                oids |= dict.fromkeys((definition.owner, *grantors), oid)
        return ActorsReport(shard, oids)
    except SnapshotError as error:
        return ActorsReport(shard, {}, report_of(error))


def load_large(task: LargeLoadTask) -> LargeLoadReport:
    """Load the task's objects; report an error instead of raising it."""
    order, pace, lacking = PartOrder(), RateLimit(task.bytes_per_second), dict[str, tuple[int, int]]()
    try:
        store = task.store.open()
        with connect(task.node) as connection:
            connection.execute("SET synchronous_commit = off")
            for stored in task.objects:
                body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
                for number, parts in enumerate(read_parts(stored, body, order)):
                    pace.spend(sum(len(part.data) for part in parts))
                    for oid, role in _load_parts(connection, task, f"{stored.key} {number}", parts):
                        first, count = lacking.get(role, (oid, 0))
                        lacking[role] = (first, count + 1)
        return LargeLoadReport(lacking)
    except SnapshotError as error:
        return LargeLoadReport(problem=report_of(error))
    except psycopg.Error as error:
        return LargeLoadReport(problem=report_of(load_error(task.node, error)))


def _load_parts(
    connection: psycopg.Connection[Any], task: LargeLoadTask, name: str, parts: list[StoredPart]
) -> list[tuple[int, str]]:
    """Load the parts unless the ledger has them; return the roles that the server lacks, with the objects' oids."""
    entry = f"INSERT INTO {task.ledger} VALUES (%s, 0, 0) ON CONFLICT DO NOTHING"
    defined = [(part, part.definition) for part in parts if part.definition]
    with connection.transaction(), connection.cursor() as cursor:
        if cursor.execute(entry.encode(), (name,)).rowcount == 0:
            return []
        created = [(part.oid, part.data) for part, _ in defined]
        added = [(part.oid, part.offset, part.data) for part in parts if not part.definition]
        cursor.executemany("SELECT lo_from_bytea(%s::oid, %b)", created)
        cursor.executemany("SELECT lo_put(%s::oid, %s::bigint, %b)", added)
        lacking = _find_lacking(cursor, task.roles, [definition for _, definition in defined])
        for part, definition in defined:
            for statement in definition_statements(part.oid, definition, connection.info.user, task.roles, lacking):
                cursor.execute(statement)
    # With --no-owner, privileges of missing roles are left out without notice.
    named = [] if task.roles.no_owner else defined
    return [(part.oid, role) for part, definition in named for role in sorted(roles_named(definition) & lacking)]


def roles_named(definition: LargeObjectDefinition) -> set[str]:
    """Return the owner, grantors and grantees of a large object."""
    grants = definition.grants or ()
    return {definition.owner} | {role for grant in grants for role in (grant.grantor, grant.grantee)} - {""}


def _find_lacking(
    cursor: psycopg.Cursor[Any], roles: RoleChanges, definitions: Iterable[LargeObjectDefinition]
) -> set[str]:
    """Return the named roles that have no role in their place on the server."""
    names = {role for definition in definitions for role in roles_named(definition)}
    rows = cursor.execute(KNOWN_QUERY, ([roles.of(role) for role in names],)).fetchall() if names else []
    known = {role for (role,) in rows}
    return {role for role in names if roles.of(role) not in known}


def definition_statements(
    oid: int,
    definition: LargeObjectDefinition,
    user: str,
    roles: RoleChanges = UNCHANGED,
    lacking: Set[str] = frozenset(),
) -> list[sql.Composed]:
    """Return the statements that restore the comment, owner and grants of a large object created by `user`.

    The server has no roles in the place of the `lacking` ones: `user` owns their objects and grants their grants.
    """
    which = sql.SQL("LARGE OBJECT {}").format(sql.Literal(oid))
    is_ours = roles.no_owner or definition.owner in lacking
    owner = user if is_ours else roles.of(definition.owner)
    statements: list[sql.Composed] = []
    if definition.comment is not None:
        statements.append(sql.SQL("COMMENT ON {} IS {}").format(which, sql.Literal(definition.comment)))
    if owner != user:
        statements.append(sql.SQL("ALTER {} OWNER TO {}").format(which, sql.Identifier(owner)))
    if definition.grants is not None:
        if not is_ours:
            statements.append(sql.SQL("REVOKE ALL ON {} FROM {}").format(which, sql.Identifier(owner)))
        kept = (
            grant
            for grant in definition.grants
            if grant.grantee not in lacking and not (is_ours and grant.grantee == definition.owner)
        )
        grants = (_change_grant(grant, owner, roles, lacking) for grant in kept)
        statements += [_grant_statement(which, owner, grant) for grant in grants if grant]
    return statements


def _change_grant(grant: Grant, owner: str, roles: RoleChanges, lacking: Set[str]) -> Grant | None:
    """Replace the roles in a grant; return None if it becomes meaningless."""
    grantee = roles.of(grant.grantee) if grant.grantee else ""
    grantor = owner if roles.no_owner or grant.grantor in lacking else roles.of(grant.grantor)
    if grantee == grantor and grant.grantee != grant.grantor and grantor != owner:
        return None
    return structs.replace(grant, grantee=grantee, grantor=grantor)


def _grant_statement(which: sql.Composed, owner: str, grant: Grant) -> sql.Composed:
    to = sql.Identifier(grant.grantee) if grant.grantee else sql.SQL("PUBLIC")
    option = sql.SQL(" WITH GRANT OPTION" if grant.may_grant else "")
    statement = sql.SQL("GRANT {} ON {} TO {}{}").format(PRIVILEGES[grant.privilege], which, to, option)
    if grant.grantor == owner:
        return statement
    # Use SET ROLE, which needs only membership; pg_dump's SET SESSION AUTHORIZATION needs a superuser.
    authorization = sql.SQL("SET ROLE {}; {}; RESET ROLE")
    return authorization.format(sql.Identifier(grant.grantor), statement)
