"""A server's roles in a snapshot: the statements that create them, and how they differ from the target's roles.

Existing roles keep their properties, but may become members of roles that a restore creates. Created roles get the
properties they had, except attributes and memberships that give power over the server or over other roles' objects. A
store that is not encrypted can be altered, and such an alteration must not give anyone control of the target.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping

from msgspec import Struct

from cutline.nodes.problems import quote
from cutline.restore.ddl.database_ddl import setting_statement
from cutline.restore.ddl.statements import literal
from cutline.snapshots.records.commit import NO_LIMIT, DatabaseSetting
from cutline.snapshots.records.server_globals import (
    ParameterPrivilege,
    RoleMembership,
    ServerGlobals,
    ServerRole,
    ServerTablespace,
)

# The keywords for a role that has or lacks the attribute, keyed by field.
ATTRIBUTES = {
    "superuser": ("SUPERUSER", "NOSUPERUSER"),
    "inherit": ("INHERIT", "NOINHERIT"),
    "createrole": ("CREATEROLE", "NOCREATEROLE"),
    "createdb": ("CREATEDB", "NOCREATEDB"),
    "login": ("LOGIN", "NOLOGIN"),
    "replication": ("REPLICATION", "NOREPLICATION"),
    "bypassrls": ("BYPASSRLS", "NOBYPASSRLS"),
}
# Attributes that let a role do more than its granted privileges.
POWERS = ("superuser", "createrole", "replication", "bypassrls")
# PostgreSQL's own roles whose members can't see other roles' data. Its other roles give access to the server's files
# and programs, or to the rows in every database. pg_monitor can read settings that only superusers see, such as the
# password in primary_conninfo (pg_read_all_settings). It can also read other roles' statements, which may set
# passwords, in pg_stat_activity and pg_stat_statements (pg_read_all_stats).
HARMLESS = frozenset(("pg_stat_scan_tables", "pg_checkpoint", "pg_use_reserved_connections"))
PER_ROLE = ("connection_limit", "valid_until")


class RoleStatement(Struct, frozen=True):
    """A statement, and the text to show for it, without a password verifier."""

    statement: str
    shown: str


def creating_statement(role: ServerRole, *, powers: bool, verifier: bool) -> RoleStatement:
    """Return CREATE ROLE with the role's attributes, but without those in POWERS unless `powers` is set."""
    words = [
        words[0] if getattr(role, name) and (powers or name not in POWERS) else words[1]
        for name, words in ATTRIBUTES.items()
    ]
    if role.connection_limit != NO_LIMIT:
        words.append(f"CONNECTION LIMIT {role.connection_limit}")
    if role.valid_until:
        words.append(f"VALID UNTIL {literal(role.valid_until)}")
    begin = f"CREATE ROLE {quote(role.name)} WITH {' '.join(words)}"
    if role.verifier is None:
        return RoleStatement(f"{begin};", f"{begin};")
    secret = f"{begin} PASSWORD {literal(role.verifier)};"
    return RoleStatement(secret, secret if verifier else f"{begin};")


def withheld_attributes(role: ServerRole) -> list[str]:
    """Return the role's attributes that a restore does not grant."""
    return [ATTRIBUTES[name][0] for name in POWERS if getattr(role, name)]


def attributes_statement(role: ServerRole, attributes: Iterable[str]) -> str:
    """Return the ALTER ROLE statement that gives a role the attributes."""
    return f"ALTER ROLE {quote(role.name)} {' '.join(attributes)};"


def membership_statement(membership: RoleMembership, *, grantor: bool = True) -> str:
    """Return the GRANT of one role to another, with its options."""
    if membership.inherit is None and membership.set is None:
        option = " WITH ADMIN OPTION" if membership.admin else ""
    else:
        options = {"ADMIN": membership.admin, "INHERIT": membership.inherit, "SET": membership.set}
        given = (f"{name} {str(value).upper()}" for name, value in options.items() if value is not None)
        option = f" WITH {', '.join(given)}"
    by = f" GRANTED BY {quote(membership.grantor)}" if grantor and membership.grantor else ""
    return f"GRANT {quote(membership.role)} TO {quote(membership.member)}{option}{by};"


def memberships_of_created(server_globals: ServerGlobals, created: Container[str]) -> list[RoleMembership]:
    """Return the memberships of and in the created roles, each after any membership that its grantor needs."""
    waiting = [
        membership
        for membership in server_globals.memberships
        if membership.member in created or membership.role in created
    ]
    granted: list[RoleMembership] = []
    while waiting:
        able = {(membership.role, membership.member) for membership in granted if membership.admin}
        due = [membership for membership in waiting if (membership.role, membership.grantor) in able]
        others = {(membership.role, membership.member) for membership in waiting if membership.admin}
        due = (
            due
            or [membership for membership in waiting if (membership.role, membership.grantor) not in others]
            or waiting
        )
        granted += due
        waiting = [membership for membership in waiting if membership not in due]
    return granted


def may_be_granted(membership: RoleMembership, server_globals: ServerGlobals, created: Container[str]) -> bool:
    """Whether a restore that `created` these roles grants the membership rather than only showing the statement.

    Membership in roles that already existed on the target is not granted, because their objects and privileges did not
    come from the snapshot.
    """
    powers = {role.name for role in server_globals.roles if withheld_attributes(role)}
    return membership.role in HARMLESS or (membership.role in created and membership.role not in powers)


def role_settings(server_globals: ServerGlobals, role: str) -> list[DatabaseSetting]:
    """Return the role's settings for all databases."""
    return [setting for setting in server_globals.settings if setting.role == role]


def role_setting_statement(setting: DatabaseSetting) -> str:
    """Return the ALTER ROLE … SET statement."""
    return setting_statement(f"ROLE {quote(setting.role)}", setting.name, setting.value)


def parameter_statement(privilege: ParameterPrivilege) -> str:
    """Return the GRANT … ON PARAMETER statement, which a superuser must run."""
    name = ".".join(map(quote, privilege.parameter.split(".")))
    option = " WITH GRANT OPTION" if privilege.grantable else ""
    return f"GRANT {privilege.privilege} ON PARAMETER {name} TO {_grantee(privilege)}{option};"


def _grantee(privilege: ParameterPrivilege) -> str:
    return quote(privilege.grantee) if privilege.grantee else "PUBLIC"


def server_statements(server_globals: ServerGlobals, *, verifiers: bool) -> Iterator[str]:
    """Yield all globals as statements for display, in an order that psql can run.

    `verifiers`: include password verifiers.
    """
    for role in server_globals.roles:
        yield creating_statement(role, powers=True, verifier=verifiers).shown
        if role.comment is not None:
            yield comment_statement(role)
    for membership in memberships_of_created(server_globals, {role.name for role in server_globals.roles}):
        yield membership_statement(membership)
    for role in server_globals.roles:
        yield from map(role_setting_statement, role_settings(server_globals, role.name))
    yield from dict.fromkeys(map(parameter_statement, server_globals.parameters))
    for tablespace in server_globals.tablespaces:
        yield from _tablespace_statements(tablespace)


def comment_statement(role: ServerRole) -> str:
    """Return the COMMENT ON ROLE statement."""
    return f"COMMENT ON ROLE {quote(role.name)} IS {literal(role.comment or '')};"


def _tablespace_statements(tablespace: ServerTablespace) -> Iterator[str]:
    options = f" WITH ({', '.join(tablespace.options)})" if tablespace.options else ""
    where = f"OWNER {quote(tablespace.owner)} LOCATION {literal(tablespace.location)}"
    yield f"CREATE TABLESPACE {quote(tablespace.name)} {where}{options};"
    if tablespace.comment is not None:
        yield f"COMMENT ON TABLESPACE {quote(tablespace.name)} IS {literal(tablespace.comment)};"


def find_differences(stored: ServerGlobals, present: ServerGlobals) -> list[str]:
    """List the differences between roles that exist on both sides, one per line; `present` are the target's roles."""
    now: Mapping[str, ServerRole] = {role.name: role for role in present.roles}
    both = {role.name for role in stored.roles} & now.keys()
    lines: list[str] = []
    for role in stored.roles:
        if role.name not in both:
            continue
        other = now[role.name]
        for name, words in ATTRIBUTES.items():
            if (then := getattr(role, name)) != getattr(other, name):
                lines.append(f"role {role.name}: {words[not then]} in the snapshot, {words[then]} on the target")
        for name in PER_ROLE:
            if getattr(role, name) != getattr(other, name):
                what = name.replace("_", " ").upper()
                there = _value(other, name)
                lines.append(f"role {role.name}: {what} {_value(role, name)} in the snapshot, {there} on the target")
        lines += _differing_settings(stored, present, role.name)
    lines += _differing_memberships(stored, present, both)
    lines += _differing_parameters(stored, present, both)
    return lines


def _value(role: ServerRole, name: str) -> str:
    value = getattr(role, name)
    return "none" if value in (NO_LIMIT, "") else str(value)


def _differing_settings(stored: ServerGlobals, present: ServerGlobals, role: str) -> Iterator[str]:
    then, now = (
        {setting.name: setting.value for setting in each.settings if setting.role == role} for each in (stored, present)
    )
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield f"role {role}: {name} is {_set(then.get(name))} in the snapshot, {_set(now.get(name))} on the target"


def _set(value: str | None) -> str:
    return "not set" if value is None else f"'{value}'"


def _differing_memberships(stored: ServerGlobals, present: ServerGlobals, both: Collection[str]) -> Iterator[str]:
    def pairs(memberships: Iterable[RoleMembership]) -> set[tuple[str, str]]:
        return {(membership.role, membership.member) for membership in memberships if membership.member in both}

    then, now = pairs(stored.memberships), pairs(present.memberships)
    for role, member in sorted(then - now):
        yield f"role {member}: a member of {role} in the snapshot, but not on the target"
    for role, member in sorted(now - then):
        yield f"role {member}: a member of {role} on the target, but not in the snapshot"


def _differing_parameters(stored: ServerGlobals, present: ServerGlobals, both: Collection[str]) -> Iterator[str]:
    def privileges(server_globals: ServerGlobals) -> set[str]:
        given = (
            parameter for parameter in server_globals.parameters if not parameter.grantee or parameter.grantee in both
        )
        return {
            f"{_holder(privilege)}: {privilege.privilege} on parameter {privilege.parameter}" for privilege in given
        }

    then, now = privileges(stored), privileges(present)
    yield from (f"{one} in the snapshot, but not on the target" for one in sorted(then - now))
    yield from (f"{one} on the target, but not in the snapshot" for one in sorted(now - then))


def _holder(privilege: ParameterPrivilege) -> str:
    return f"role {privilege.grantee}" if privilege.grantee else "PUBLIC"
