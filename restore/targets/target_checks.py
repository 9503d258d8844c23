"""What keeps a target's server from taking a database: its version, the role's privileges, what it has already, XML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import psycopg

from cutline.fleet.hints import SAME_TARGET
from cutline.fleet.nodes.baseline import NodeIdentity
from cutline.fleet.nodes.privileges import quote, read_role
from cutline.fleet.nodes.problems import comment
from cutline.fleet.some_names import list_some
from cutline.fleet.tables.groups import Group
from cutline.fleet.tables.table_state import TableState
from cutline.restore.obstacles.obstacles import Obstacles
from cutline.restore.targets.target import (
    SESSIONS,
    SYSTEM_QUERY,
    Target,
    TargetExistsError,
    TargetUnfitError,
    databases,
)

NAMED_MAX = 5
FACTS_QUERY = """
SELECT pg_is_in_recovery(), current_setting('server_version_num')::int,
       (SELECT rolsuper OR rolcreatedb FROM pg_roles WHERE rolname = current_user)
"""

OWNER_QUERY = """
SELECT r.rolname, r.rolsuper, pg_has_role(r.oid, 'USAGE')
  FROM pg_database d JOIN pg_roles r ON r.oid = d.datdba WHERE d.datname = %s
"""
# The users of those that our role may not end.
OTHERS_QUERY = f"""
SELECT r.rolname, r.rolsuper {SESSIONS.replace("WHERE", "JOIN pg_roles r ON r.oid = a.usesysid WHERE")}
   AND (r.rolsuper OR NOT (pg_has_role('pg_signal_backend', 'USAGE') OR pg_has_role(r.oid, 'USAGE')))
 ORDER BY 1
"""


def check_target(
    target: Target,
    connection: psycopg.Connection[Any],
    source: NodeIdentity,
    obstacles: Obstacles,
    into_tables: str = "",
    *,
    replace: bool,
    is_resumed: bool,
) -> None:
    """Add what keeps the target from taking the database, of a restore that begins or `is_resumed`.

    `into_tables`: the command that loads the same rows into tables of a database that exists; "" if there is none.
    """
    recovering, version, may_create = connection.execute(FACTS_QUERY).fetchone() or (True, 0, False)
    node = target.node.id
    if recovering:
        error = TargetUnfitError(f"node {node} is a standby", hint="name its primary in the target's fleet.toml")
        obstacles.add(error, node)
    if version // 10000 < source.server_version // 10000:
        what = f"PostgreSQL {version // 10000} is older than the snapshot's {source.server_version // 10000}"
        hint = "restore to servers of the snapshot's version or newer"
        obstacles.add(TargetUnfitError(f"node {node}: {what}", hint=hint), node)
    if not may_create:
        what = f"role {connection.info.user} may not create databases"
        hint = f'ALTER ROLE "{connection.info.user}" CREATEDB;'
        obstacles.add(TargetUnfitError(f"node {node}: {what}", hint=hint), node)
    exists = target.database in databases(connection)
    if exists and replace:
        with obstacles.collecting(node):
            _check_replaceable(target, connection)
    if exists and not replace:
        what = f"node {node}: database {target.database} exists already"
        lines = ["restore to other servers with --to FILE, or put the existing databases aside with --replace"]
        if is_resumed:
            lines = ["it was made while the restore ran, and --replace was not given: rename or drop it, then go on"]
        elif into_tables:
            # --replace would put all of the database aside for some of its tables.
            lines = [
                f"to load the rows into its own tables, which have to be empty: {into_tables}",
                SAME_TARGET,
                "or make a database that has only these rows: on other servers, with --to FILE",
            ]
        obstacles.add(TargetExistsError(what, hint=lines, details={"database": target.database}), node)


def _check_replaceable(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise TargetUnfitError unless our role may put the existing database aside, and end the sessions in it."""
    role = read_role(target.node, connection)
    if role.is_super:
        return
    row = connection.execute(OWNER_QUERY, (target.database,)).fetchone()
    owner, is_super, is_owned = row or ("", False, True)
    statements: list[str] = []
    if not is_owned:
        change = f"ALTER DATABASE {quote(target.database)} OWNER TO {role.quoted};"
        statements += [change] if is_super else role.grant_membership(owner)
    others = connection.execute(OTHERS_QUERY, (target.database,)).fetchall()
    if not all(is_super for _, is_super in others):
        statements += role.grant_membership("pg_signal_backend")
    if supers := sorted({name for name, is_super in others if is_super}):
        statements.append(comment(f"end the sessions of {', '.join(supers)}, or restore as a superuser"))
    if statements:
        reasons = [] if is_owned else ["does not own it"]
        reasons += [f"may not end its sessions of {', '.join(sorted({name for name, _ in others}))}"] if others else []
        raise TargetUnfitError(
            f"node {target.node.id}: database {target.database} can't be put aside, because role {role.name}"
            f" {' and '.join(reasons)}",
            hint=statements,
            details={"node": target.node.id, "database": target.database},
        )


def find_xml_columns(groups: Iterable[Group], states: Mapping[str, TableState]) -> list[str]:
    """The groups' columns that contain XML, as `schema.table.column`; `states` are the tables' states by name."""
    names: list[str] = []
    for group in groups:
        numbers = states[group.name].xml_columns if group.name in states else frozenset[int]()
        columns = [one for one in group.columns if one.type in ("xml", "xml[]") or one.number in numbers]
        names += [f"{group.name}.{column.name}" for column in columns]
    return names


def check_xml(target: Target, connection: psycopg.Connection[Any], source: NodeIdentity, columns: list[str]) -> None:
    """Raise TargetUnfitError if there are XML `columns` and the target's server is built without XML support.

    The server that the snapshot was taken from passes: if it is built without XML, these columns hold no values.
    """
    (system,) = connection.execute(SYSTEM_QUERY).fetchone() or ("",)
    try:
        if columns and system != source.system_identifier:
            connection.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported as error:
        raise TargetUnfitError(
            f"node {target.node.id}: its PostgreSQL is built without XML support, but the snapshot has XML in"
            f" {list_some(columns, NAMED_MAX)}",
            hint="restore to a server that is built with libxml, or restore only other tables: --group PATTERN",
            details={"node": target.node.id, "columns": columns},
        ) from error
