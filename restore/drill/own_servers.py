"""A drill on the user's own servers: the primaries in a different fleet.toml.

Each shard is restored into a database with a new name; other databases are not touched. A role without privileges
restores and queries that database: the role in the DSN, or a new role if that role is a superuser. Then the roles of
the snapshot are created, and those that exist on a server under other names: the databases' code must not act as roles
of the server, and one role can't take the place of several, such as those with user mappings of the same server. At the
end of the block everything is dropped. The next drill drops the remains of a killed drill; a running
drill is recognized by a session with its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from msgspec import structs
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import Node
from cutline.fleet.progress import Progress
from cutline.nodes.connections import NodeUnreachableError, connect, raising_unreachable, with_database
from cutline.nodes.problems import read_role
from cutline.nodes.server_errors import shorten_message
from cutline.nodes.watch import watch_nodes
from cutline.restore.drill.assertions import Reader
from cutline.restore.drill.servers import DrillPlace, DrillUnfitError, create_login, end_session, new_password
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.plan.roles import find_existing_roles
from cutline.restore.targets.databases import drop_database
from cutline.restore.targets.requirements import find_data_directory
from cutline.restore.targets.tablespaces import revoke_tablespaces
from cutline.restore.targets.target import (
    SYSTEM_QUERY,
    Connections,
    Superusers,
    Target,
    find_marked,
    suffix_of,
    target_of,
)
from cutline.restore.targets.waits import TargetWaits, bounding_waits
from cutline.storage.errors import SnapshotError, UsageError

# Names of a drill's objects on a server, with the operation's suffix and, for a database, the number of the target.
NAME = re.compile(r"(?P<drill>cutline_drill_[0-9a-f]{10})(_[0-9]+(_restoring_[0-9a-f]{10})?)?")
# The connection parameters that belong to a role.
OF_THE_ROLE = ("user", "password", "passfile", "sslcert", "sslkey", "sslpassword", "service")
DATABASES_QUERY = """
SELECT datname FROM pg_database
 WHERE datname ^@ 'cutline_drill_' AND pg_has_role(datdba, 'USAGE')
"""
# Also find databases by their owner, because the snapshot owners' code may have renamed them.
OWNED_QUERY = "SELECT datname FROM pg_database WHERE pg_get_userbyid(datdba) = ANY (%s)"
SESSIONS_QUERY = "SELECT pid FROM pg_stat_activity WHERE usename = %s"
LIVING_QUERY = "SELECT DISTINCT application_name FROM pg_stat_activity WHERE application_name ^@ 'cutline_drill_'"
POWERS_QUERY = """
SELECT array_remove(ARRAY[CASE WHEN r.rolcreaterole AND current_setting('server_version_num')::int < 160000
                               THEN 'CREATEROLE' END,
                          CASE WHEN r.rolreplication THEN 'REPLICATION' END], NULL)
       || ARRAY(SELECT p.rolname::text FROM pg_roles p
                 WHERE p.rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')
                   AND pg_has_role(p.oid, 'MEMBER'))
  FROM pg_roles r WHERE r.rolname = current_user
"""


@contextmanager
def own_servers(plan: RestorePlan, extensions: frozenset[str], progress: Progress) -> Iterator[DrillPlace]:
    """Yield the plan with its targets replaced by new databases on the same servers; drop these databases at the end.

    Raises DrillUnfitError if a role has more privileges than a drill needs; also UsageError and NodeUnreachableError.
    """
    name = f"cutline_drill_{suffix_of(plan.intent.id)}"
    targets = tuple(
        target_of(one.shard, with_database(one.node, f"{name}_{number}"), (), plan.intent.id)
        for number, one in enumerate(plan.targets, start=1)
    )
    with ExitStack() as stack:
        sessions = {
            target.shard: stack.enter_context(connect(target.maintenance, application_name=name)) for target in targets
        }
        # A proxy may close an idle session, so the watch keeps other sessions with this name and renews them.
        watch = stack.enter_context(watch_nodes((target.maintenance for target in targets), name))
        waits = stack.enter_context(bounding_waits(watch, targets, sessions, progress))
        for target in targets:
            with raising_unreachable(target.node):
                drop_dead(target, sessions[target.shard], progress, waits)
        has_superusers = _check_roles(targets, sessions)
        if has_superusers and plan.request.scope.role_map:
            raise UsageError(
                "--role-map is allowed only if the drill's role is not a superuser: with a superuser, the drill"
                " creates roles that take the place of existing ones",
                hint="omit it, or name a different role in the dsn; see docs/drill.md, On servers of your own",
            )
        try:
            placed = structs.replace(
                plan,
                targets=targets,
                target_fleet=replace(plan.target_fleet, nodes=tuple(t.node for t in targets)),
            )
            if has_superusers:
                placed = _with_login(placed, sessions, name, extensions)
            yield DrillPlace(placed, lambda target: Reader(target.node, lambda process: _end(target, process)))
        except KeyboardInterrupt:
            waits.hurry()
            raise
        finally:
            _drop_all(targets, name, progress, waits)


def _end(target: Target, process: int) -> bool:
    end_session(target.maintenance, process)
    return False


def _check_roles(targets: Iterable[Target], sessions: Connections) -> bool:
    """Whether the roles are superusers.

    Raises DrillUnfitError if only some are superusers, or if a role that is not one has more privileges than it needs.
    """
    supers = list[str]()
    targets = list(targets)
    for target in targets:
        with raising_unreachable(target.node):
            role = read_role(target.node, sessions[target.shard])
            (powers,) = sessions[target.shard].execute(POWERS_QUERY).fetchone() or ([],)
        if role.is_super:
            supers.append(target.node.id)
        elif powers:
            raise DrillUnfitError(
                f"node {target.node.id}: the snapshot owners' code could use the privileges of role {role.name}:"
                f" {', '.join(powers)}",
                hint="name a role without them (docs/roles.md, Restore), or a superuser, with which the drill creates"
                " a role",
                details={"node": target.node.id, "powers": powers},
            )
    if supers and len(supers) < len(targets):
        raise DrillUnfitError(
            f"the roles of {', '.join(supers)} are superusers, but those of the other nodes are not",
            hint="name superusers for all nodes in the file, or for none of them",
        )
    return bool(supers)


def _with_login(plan: RestorePlan, superusers: Connections, name: str, extensions: frozenset[str]) -> RestorePlan:
    """Have the superusers create the role `name`; return a plan that uses it, and new roles in place of existing ones.

    With --no-owner, the role itself takes their place, as it does for owners.
    """
    password, made, taken = new_password(), set[str](), set[str]()
    nodes, folders = dict[str, Node](), dict[str, Path | None]()
    for target in plan.targets:
        connection = superusers[target.shard]
        with raising_unreachable(target.node):
            (system,) = connection.execute(SYSTEM_QUERY).fetchone() or ("",)
            if system not in made:
                # BYPASSRLS lets the role, which also runs the assertions, see all rows in tables that FORCE row
                # security.
                create_login(target.maintenance, name, password, "CREATEDB BYPASSRLS", mark=name)
                made.add(system)
            nodes[target.shard], folders[target.shard] = target.maintenance, find_data_directory(connection)
            encoding = plan.chain.baseline[target.source].encoding
            existing = find_existing_roles(target, connection, plan.roles(target), encoding)
        # Don't replace predefined roles: they own nothing and only receive privileges.
        taken |= {role for role in existing if not role.startswith("pg_")}
    targets = tuple(
        target_of(target.shard, replace(target.node, dsn=_as(target.node.dsn, name, password)), (), plan.intent.id)
        for target in plan.targets
    )
    for target in targets:
        _check_login(target)
    scope = plan.request.scope
    others = {role: name if scope.no_owner else f"{name}_{number}" for number, role in enumerate(sorted(taken), 1)}
    scope = structs.replace(scope, role_map=tuple(others.items()))
    return structs.replace(
        plan,
        request=structs.replace(plan.request, scope=scope, create_roles=True),
        target_fleet=replace(plan.target_fleet, nodes=tuple(target.node for target in targets)),
        targets=targets,
        superusers=Superusers(nodes, name, extensions, folders, mark=name),
    )


def _as(dsn: str, role: str, password: str) -> str:
    # Remove the original role's credentials, which don't authenticate this role.
    given = {key: value for key, value in conninfo_to_dict(dsn).items() if key not in OF_THE_ROLE}
    return make_conninfo("", **given | {"user": role, "password": password})


def _check_login(target: Target) -> None:
    try:
        connect(target.maintenance).close()
    except NodeUnreachableError as error:
        raise DrillUnfitError(
            f"node {target.node.id}: the role that was created for the drill can't log in: {error.message}",
            hint=[
                "allow password authentication (scram-sha-256) in pg_hba.conf",
                "or name a role in the dsn that is not a superuser: the drill restores as that role",
            ],
            details=error.details,
        ) from error


def drop_dead(target: Target, session: psycopg.Connection[Any], progress: Progress, waits: TargetWaits) -> None:
    """Drop the remains of killed drills on the server, recognized by names that no session has.

    Objects in use are reported and left behind; they don't interfere with other drills. Raises an error if the session
    is lost.
    """
    made, found = _made_roles(target, session), session.execute(DATABASES_QUERY).fetchall()
    # Read the sessions last: a drill opens one before it creates anything, and keeps it until everything is dropped.
    living = {name for (name,) in session.execute(LIVING_QUERY)}
    roles = [(role, mark) for role, mark in made if mark not in living]
    databases = dict.fromkeys(
        database for (database,) in found if (match := NAME.fullmatch(database)) and match["drill"] not in living
    )
    for what, why in (*_drop_databases(target, session, databases, roles, waits), *_drop_roles(session, roles, waits)):
        progress.note(
            f"node {target.node.id}: {what} was left behind by a killed drill and could not be dropped: {why}"
        )


def _made_roles(target: Target, session: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """Return the roles that drills created, with their marks; a drill whose role is not a superuser creates none.

    The restoring role comes last, because it identifies its drill's other roles.
    """
    return find_marked(session) if read_role(target.node, session).is_super else []


def _drop_databases(
    target: Target,
    session: psycopg.Connection[Any],
    databases: Iterable[str],
    roles: Iterable[tuple[str, str]],
    waits: TargetWaits,
) -> Iterator[tuple[str, str]]:
    """Drop the databases and all others owned by the restoring roles; yield those that remain, with the reasons.

    First disables login for these roles. Raises an error if the session is lost.
    """
    logins = [role for role, mark in roles if role == mark]
    for role in logins:
        # The snapshot owners' code, which ran as this role, may have given it a password that the owners know.
        bar = sql.SQL("ALTER ROLE {} NOLOGIN").format(sql.Identifier(role))
        # Ignore errors: either another drill is dropping the role, or DROP will report the reason.
        _why_left(session, partial(session.execute, bar), waits)
        for (process,) in session.execute(SESSIONS_QUERY, (role,)).fetchall():
            # Ignore errors here too: DROP will report the reason.
            _why_left(session, partial(end_session, target.maintenance, process), waits)
    owned = [database for (database,) in session.execute(OWNED_QUERY, (logins,))]
    for database in dict.fromkeys([*databases, *owned]):
        if why := _why_left(session, partial(drop_database, target, session, database), waits):
            yield f"database {database}", why


def _drop_roles(
    session: psycopg.Connection[Any], roles: Iterable[tuple[str, str]], waits: TargetWaits
) -> Iterator[tuple[str, str]]:
    """Drop the roles; yield those that remain, with the reasons.

    Raises an error if the session is lost.
    """
    left = set[str]()
    for role, mark in roles:
        statement = sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(role))
        if mark in left and role == mark:
            yield f"role {role}", "it identifies the drill's other roles"
            continue
        # Ignore errors: DROP will report the reason.
        _why_left(session, partial(revoke_tablespaces, session, role), waits)
        if why := _why_left(session, partial(session.execute, statement), waits):
            left.add(mark)
            yield f"role {role}", why


def _why_left(session: psycopg.Connection[Any], drop: Callable[[], object], waits: TargetWaits) -> str:
    """Call `drop`; return the reason if it fails, else "". Raises an error if the session is lost."""
    try:
        with waits.naming_blocked():
            drop()
    except (SnapshotError, psycopg.Error) as error:
        if session.broken:
            raise
        return shorten_message(error) if isinstance(error, psycopg.Error) else str(error)
    return ""


def _drop_all(targets: Iterable[Target], name: str, progress: Progress, waits: TargetWaits) -> None:
    """Drop everything that the drill created, in new sessions, because the earlier ones may be lost."""

    def drop_databases(target: Target, session: psycopg.Connection[Any]) -> Iterator[tuple[str, str]]:
        yield from _drop_databases(target, session, (target.loading, target.database), made(target, session), waits)

    def drop_roles(target: Target, session: psycopg.Connection[Any]) -> Iterator[tuple[str, str]]:
        yield from _drop_roles(session, made(target, session), waits)

    def made(target: Target, session: psycopg.Connection[Any]) -> list[tuple[str, str]]:
        return [(role, mark) for role, mark in _made_roles(target, session) if mark == name]

    targets = list(targets)
    # Drop all databases first: with several targets on one server, a role owns objects in all of their databases.
    for drop in (drop_databases, drop_roles):
        for target in targets:
            try:
                with connect(target.maintenance) as session:
                    waits.bound(target, session)
                    for what, why in drop(target, session):
                        progress.note(f"node {target.node.id}: {what} will remain until the next drill there: {why}")
            except (SnapshotError, psycopg.Error) as error:
                progress.note(f"node {target.node.id}: {name} will remain until the next drill there: {error}")
