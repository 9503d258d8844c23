"""The properties of the databases that a restore creates: owner, privileges, settings, comment, tablespace.

`--no-database-settings` leaves all of them out, as does `--data-only`, which creates no database.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from cutline.nodes.encodings import raw_text
from cutline.nodes.problems import INHERIT_OPTION_VERSION, Role, quote, read_role
from cutline.restore.ddl.database_ddl import DatabaseDdl, change_roles
from cutline.restore.ddl.server_roles import parameter_statement
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.plan.roles import (
    check_memberships,
    find_existing_roles,
    find_reserved_settings,
    name_bytes,
    read_our_shown_name,
    roles_of,
)
from cutline.restore.scope.scope import RoleChanges
from cutline.restore.targets.databases import without_record
from cutline.restore.targets.target import Target
from cutline.snapshots.ddl.database_facts import SEARCH_PATH
from cutline.snapshots.records.commit import DatabaseProperties, DatabaseSetting
from cutline.snapshots.records.server_globals import ParameterPrivilege

# Since PostgreSQL 16, each membership says whether the member may act as the role.
ABLE_QUERY = "SELECT pg_has_role(oid, %s) FROM pg_roles WHERE rolname = %s"

# Whether a role is a superuser, and whether our role may grant it.
ROLE_QUERY = "SELECT rolsuper, pg_has_role(oid, 'MEMBER WITH ADMIN OPTION') FROM pg_roles WHERE rolname = %s"


class PlannedDatabase(Struct, frozen=True):
    """The properties that a target's database gets, if any; `left_out` are the other properties of the source."""

    ddl: DatabaseDdl | None = None
    left_out: tuple[str, ...] = ()


# The settings that our role may give a database.
SETTABLE_QUERY = """
SELECT name FROM unnest(%s::text[]) AS given (name)
 WHERE has_parameter_privilege(name, 'SET')
    OR EXISTS (SELECT FROM pg_settings s WHERE lower(s.name) = lower(given.name) AND s.context = 'user')
"""


def plan_database(plan: RestorePlan, target: Target, connection: psycopg.Connection[Any]) -> PlannedDatabase:
    """Choose the properties that our role may set on the target's database."""
    scope, properties = plan.request.scope, plan.chain.database_properties(target.source)
    if properties is None or scope.data_only or scope.no_database_settings:
        return PlannedDatabase()
    ours = read_role(target.node, connection)
    encoding = plan.chain.baseline[target.source].encoding
    our_name = ours.name if ours.name.isascii() else read_our_shown_name(target, connection, encoding)
    changes = RoleChanges(dict(scope.role_map), scope.no_owner, our_name)
    if scope.no_owner:
        named = {changes.of(role) for role in roles_of(properties)}
        changes = replace(changes, known=frozenset(find_existing_roles(target, connection, named, encoding)))
    changed, left_out = change_roles(properties, changes)
    changed, records = without_record(changed)
    left_out += records
    if plan.request.is_drill:
        settings = find_free_settings(connection, changed)
        return PlannedDatabase(DatabaseDdl(target.database, DatabaseProperties(owner="", settings=settings), our_name))
    owner = "" if scope.no_owner else changed.owner
    if owner and not ours.is_super:
        able = connection.execute(ABLE_QUERY, (_membership(connection), owner)).fetchone()
        # If the server lacks the owner, either that is an obstacle or the role will be created with ours as a member.
        if able == (False,):
            left_out.append(f"owner {owner} of the database: role {ours.name} can't transfer ownership to that role")
            owner = ""
    ddl = DatabaseDdl(target.database, changed, our_name, owner, loads=ours.is_super)
    return PlannedDatabase(ddl, tuple(f"{line} ({target.shard})" for line in left_out))


def check_grantors(
    plan: RestorePlan, target: Target, connection: psycopg.Connection[Any], ddl: DatabaseDdl | None
) -> None:
    """Raise TargetUnfitError unless our role can act as every grantor of privileges on the database."""
    if ddl is None or not ddl.grantors or read_role(target.node, connection).is_super:
        return
    names = name_bytes(connection, ddl.grantors, plan.chain.baseline[target.source].encoding)
    check_memberships(target, connection, {raw_text(name): ["privileges on the database"] for name in names})


def find_free_settings(
    connection: psycopg.Connection[Any], properties: DatabaseProperties
) -> tuple[DatabaseSetting, ...]:
    """Return the database's own settings that any role may set, which a drill's queries need.

    Settings that make a session load libraries are left out, and so are those that the server does not know (an
    application's own, or those of a library that is not loaded): only a superuser may set these for a database.
    """
    withheld = find_reserved_settings(connection)
    able = _find_settable(connection, [setting.name for setting in properties.settings if "." in setting.name])
    return tuple(
        setting
        for setting in properties.settings
        if not setting.role
        and setting.name.lower() not in withheld
        and ("." not in setting.name or setting.name in able)
    )


def _find_settable(connection: psycopg.Connection[Any], names: Iterable[str]) -> set[str]:
    """Return the settings that our role may give a database, of those with these names."""
    known = [name for name in names if name.isascii()]
    return {name for (name,) in connection.execute(SETTABLE_QUERY, (known,))} if known else set()


def grant_settings(role: Role, connection: psycopg.Connection[Any], settings: Iterable[tuple[str, str]]) -> list[str]:
    """Return the statements that let our role give a database these settings, as pairs of name and role ("" for all).

    A superuser must run them. There are none for the settings of superusers, which only superusers can change.
    """
    chosen, statements = list(settings), dict[str, None]()
    able = _find_settable(connection, [name for name, _ in chosen])
    for name, of in chosen:
        if of not in ("", role.name):
            # Before version 16, CREATEROLE suffices.
            is_super, is_admin = connection.execute(ROLE_QUERY, (of,)).fetchone() or (False, True)
            if is_super:
                continue
            if not role.may_create_roles:
                statements[f"ALTER ROLE {role.quoted} CREATEROLE;"] = None
            if not is_admin and role.version >= INHERIT_OPTION_VERSION:
                statements[f"GRANT {quote(of)} TO {role.quoted} WITH ADMIN OPTION;"] = None
        if name not in able:
            privilege = ParameterPrivilege(parameter=name, privilege="SET", grantee=role.name)
            statements[parameter_statement(privilege)] = None
    return list(statements)


def find_path(properties: DatabaseProperties) -> str | None:
    """Return the search_path that is set for the database, or None."""
    return next(
        (setting.value for setting in properties.settings if setting.name == SEARCH_PATH and not setting.role), None
    )


def _membership(connection: psycopg.Connection[Any]) -> str:
    return "SET" if connection.info.server_version >= INHERIT_OPTION_VERSION else "MEMBER"
