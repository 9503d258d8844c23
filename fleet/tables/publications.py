"""Publications: which tables' changes a node's WAL gives us, without making the fleet's own writes fail.

A publication of UPDATEs on a table without replica identity makes PostgreSQL reject those UPDATEs, so such
tables never enter it: append-only ones have a publication of their own, of inserts and truncates alone. Nobody can keep
a table from losing its identity later: then its writes fail until it is taken out, which is said, and done by `init`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from fleet.config import GroupRules
from fleet.hints import NEW_CHAIN
from fleet.tables.groups import TABLE_NAME, Group, Table, qualify, read_tables
from storage.errors import RefusedError

# The stamps change with every change of these rows, and with nothing else.
MEMBERS_QUERY = f"""
SELECT p.pubname, {TABLE_NAME},
       format('%%s.%%s', p.oid, p.xmin), format('%%s.%%s', r.oid, r.xmin),
       concat_ws(' and ', CASE WHEN r.prqual IS NOT NULL THEN 'a row filter' END,
                          CASE WHEN r.prattrs IS NOT NULL THEN 'a column list' END)
  FROM pg_publication p
  JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY (%s)
"""
# Published by way of a partition's root, changes come under the root's name. 18 can publish generated columns.
OPTIONS_QUERY = """
SELECT p.pubname,
       concat_ws(', ', CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
                       CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END),
       concat_ws(' and ', CASE WHEN p.pubviaroot THEN 'partitions as their root' END,
                          CASE WHEN coalesce(to_jsonb(p) ->> 'pubgencols', 'n') <> 'n' THEN 'generated columns' END)
  FROM pg_publication p WHERE p.pubname = ANY (%s)
"""
# Of these oids, those that we may not publish.
OTHERS_QUERY = "SELECT oid::bigint FROM pg_class WHERE oid = ANY (%s) AND NOT pg_has_role(relowner, 'USAGE')"
KEYED_OPERATIONS, APPEND_ONLY_OPERATIONS = "insert, update, delete, truncate", "insert, truncate"
GENERATED_COLUMNS_VERSION = 180000


class TableNotAdmissibleError(RefusedError):
    """A table has no replica identity, so its changes can't be followed."""


class NotOwnerError(RefusedError):
    """Our role may not put a table into a publication."""


class PublicationChangedError(RefusedError):
    """A publication does not give all changes of the snapshot's tables, or has not always done so."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A table's place in a publication. The stamps are of the rows in pg_publication and pg_publication_rel.

    `limits` says what keeps some of the table's changes back, empty if nothing does.
    """

    publication: str
    membership: str
    limits: str


NOWHERE = Membership("", "", "")
# By publication and table.
Members = dict[str, dict[str, Membership]]


def publication_names(fleet_id: str) -> tuple[str, str]:
    """The fleet's two publications on every primary: keyed and full tables, append-only tables."""
    return f"cutline_{fleet_id}", f"cutline_{fleet_id}_append_only"


def check_admissible(tables: Mapping[str, Iterable[Table]]) -> None:
    """Raise TableNotAdmissibleError naming every table that can't be followed and what would admit it."""
    refused = [(node, table) for node, found in tables.items() for table in found if not table.is_admissible]
    if refused:
        names = ", ".join(f"{table.group.name} on {node}" for node, table in refused)
        remedies = "\n".join(sorted({f"  {table.remedy};" for _, table in refused}))
        failing = ", ".join(f"{table.group.name} on {node}" for node, table in refused if table.is_published)
        raise TableNotAdmissibleError(
            f"no replica identity, so updates and deletes can't be followed: {names}"
            + (f"; PostgreSQL rejects those of {failing}, which had one when Cutline published it" if failing else ""),
            hint=f"give them one, or list them in fleet.toml under groups.exclude or groups.append_only:\n{remedies}"
            + ("\nthen take what is published without one out of the publication: snapshot init" if failing else ""),
            details={"tables": [{"node": node, "table": table.group.name} for node, table in refused]},
        )
    _check_readable(tables)


def _check_readable(tables: Mapping[str, Iterable[Table]]) -> None:
    found = [(f"{table.group.name} on {node}", table) for node, listed in tables.items() for table in listed]
    if unreadable := [name for name, table in found if not table.readable]:
        raise TableNotAdmissibleError(
            f"the role may not read {', '.join(unreadable)}",
            hint="GRANT pg_read_all_data TO the role, or exclude the tables in fleet.toml under groups.exclude",
        )
    unloadable = [
        f"column {column} ({type_}) of {name}" for name, table in found for column, type_ in table.contained.unloadable
    ]
    if unloadable:
        raise TableNotAdmissibleError(
            f"PostgreSQL does not read back what it prints of {', '.join(unloadable)}",
            hint="give the columns another type, or exclude the tables in fleet.toml under groups.exclude",
        )
    if hidden := [name for name, table in found if table.hides_rows]:
        raise TableNotAdmissibleError(
            f"row-level security keeps the role from rows of {', '.join(hidden)}",
            hint="ALTER ROLE … BYPASSRLS, or exclude the tables in fleet.toml under groups.exclude",
        )


def ensure_publications(connection: psycopg.Connection[Any], fleet_id: str, tables: Iterable[Table]) -> list[str]:
    """Create both publications, add what they lack, and put right what was altered; return the tables added.

    A table whose updates PostgreSQL rejects is taken out. Safe to repeat: what is right is not touched, so that no
    chain ends by it. Raises NotOwnerError, and has changed nothing.
    """
    wanted: dict[str, dict[str, Table]] = {name: {} for name in publication_names(fleet_id)}
    for table in tables:
        wanted[publication_of(table.group, fleet_id)][table.group.name] = table
    try:
        with connection.transaction():
            members, options = _members(connection, fleet_id), _options(connection, fleet_id)
            lacking = {name: wanted[name].keys() - members.get(name, {}).keys() for name in wanted}
            _check_owned(connection, [wanted[name][table] for name in wanted for table in lacking[name]])
            _remove_tables(connection, fleet_id, members)
            added: list[str] = []
            for name, operations in operations_of(fleet_id).items():
                _ensure_options(connection, name, operations, options)
                present = {table: found for table, found in members.get(name, {}).items() if table in wanted[name]}
                limited = sorted(table for table, found in present.items() if found.limits)
                _alter(connection, name, "DROP TABLE", [wanted[name][table] for table in limited])
                missing = sorted({*limited, *lacking[name]})
                _alter(connection, name, "ADD TABLE", [wanted[name][table] for table in missing])
                added += missing
    except psycopg.errors.InsufficientPrivilege as error:
        raise _not_owner_error(connection, str(error.diag.message_primary)) from error
    return added


def _check_owned(connection: psycopg.Connection[Any], tables: Iterable[Table]) -> None:
    names = {table.oid: table.group.name for table in tables}
    if others := [names[oid] for (oid,) in connection.execute(OTHERS_QUERY, (list(names),))]:
        raise _not_owner_error(connection, f"must be owner of {', '.join(sorted(others))}")


def _not_owner_error(connection: psycopg.Connection[Any], reason: str) -> NotOwnerError:
    return NotOwnerError(
        f"role {connection.info.user} may not publish tables of database {connection.info.dbname}: {reason}",
        hint=f'GRANT the owner TO "{connection.info.user}", or run snapshot init as a superuser',
    )


def _remove_tables(connection: psycopg.Connection[Any], fleet_id: str, members: Members) -> None:
    """Take out of the publication of updates what PostgreSQL rejects the updates of."""
    name, _ = publication_names(fleet_id)
    published = members.get(name, {})
    # By no rules at all: what fleet.toml leaves out is published as long as nobody takes it out.
    tables = [table for table in read_tables(connection, GroupRules()) if table.group.name in published]
    _alter(connection, name, "DROP TABLE", [table for table in tables if not table.is_admissible])


def drop_publications(connection: psycopg.Connection[Any], fleet_id: str) -> list[str]:
    """Drop the fleet's publications; return those that were there. Raises what PostgreSQL does if it may not."""
    found = sorted(_options(connection, fleet_id))
    for name in found:
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
    return found


def operations_of(fleet_id: str) -> dict[str, str]:
    """What each of the fleet's publications publishes."""
    return dict(zip(publication_names(fleet_id), (KEYED_OPERATIONS, APPEND_ONLY_OPERATIONS), strict=True))


def publication_of(group: Group, fleet_id: str) -> str:
    """The publication that the group belongs into."""
    keyed, append_only = publication_names(fleet_id)
    return append_only if group.identity == "append_only" else keyed


def _ensure_options(
    connection: psycopg.Connection[Any], name: str, operations: str, options: Mapping[str, tuple[str, str]]
) -> None:
    if name not in options:
        statement = "CREATE PUBLICATION {} WITH (publish = {})"
    elif options[name] != (operations, ""):
        statement = "ALTER PUBLICATION {} SET (publish = {}, publish_via_partition_root = false"
        statement += ", publish_generated_columns = none" if _has_generated(connection) else ""
        statement += ")"
    else:
        return
    connection.execute(sql.SQL(statement).format(sql.Identifier(name), sql.Literal(operations)))


def _has_generated(connection: psycopg.Connection[Any]) -> bool:
    return connection.info.server_version >= GENERATED_COLUMNS_VERSION


def _alter(connection: psycopg.Connection[Any], name: str, action: str, tables: list[Table]) -> None:
    if tables:
        # ONLY is for ADD: DROP removes just what is named.
        only = "ONLY " if action == "ADD TABLE" else ""
        listed = ", ".join(f"{only}{qualify(table.group)}" for table in tables)
        connection.execute(
            sql.SQL("ALTER PUBLICATION {} {} {}").format(sql.Identifier(name), sql.SQL(action), sql.SQL(listed))
        )


def check_published(
    connection: psycopg.Connection[Any],
    node: str,
    fleet_id: str,
    groups: Iterable[Group],
    *,
    unpublished_too: bool = False,
) -> dict[str, Membership]:
    """The groups' memberships, by name; raise PublicationChangedError if not all of a group's changes are published.

    With `unpublished_too` a group that is in no publication of Cutline's is only left out.
    """
    options, members = _options(connection, fleet_id), _members(connection, fleet_id)
    wanted: dict[str, list[str]] = {}
    for group in groups:
        wanted.setdefault(publication_of(group, fleet_id), []).append(group.name)
    found: dict[str, Membership] = {}
    for name, tables in sorted(wanted.items()):
        present = members.get(name, {})
        missing = sorted(set(tables) - present.keys())
        limited = [f"{table} with {present[table].limits}" for table in sorted(set(tables) - set(missing))
                   if present[table].limits]  # fmt: skip
        problem = ""
        if name not in options:
            problem = f"publication {name} is gone, which held {', '.join(missing)}"
        elif options[name] != (operations_of(fleet_id)[name], ""):
            operations, additions = options[name]
            problem = f"publication {name}, with {', '.join(sorted(tables))}, was altered: it publishes {operations}"
            problem += f", {additions}" if additions else ""
        elif missing and not unpublished_too:
            problem = f"not in Cutline's publication {name}: {', '.join(missing)}"
        elif limited:
            problem = f"publication {name} was altered: it has {', '.join(limited)}"
        if problem:
            raise PublicationChangedError(
                f"node {node}: {problem}",
                hint=NEW_CHAIN,
                details={"node": node, "publication": name, "tables": missing or sorted(tables)},
            )
        found |= {table: present[table] for table in tables if table in present}
    return found


def _members(connection: psycopg.Connection[Any], fleet_id: str) -> Members:
    found: Members = {}
    for name, table, *membership in connection.execute(MEMBERS_QUERY, (list(publication_names(fleet_id)),)):
        found.setdefault(name, {})[table] = Membership(*membership)
    return found


def _options(connection: psycopg.Connection[Any], fleet_id: str) -> dict[str, tuple[str, str]]:
    rows = connection.execute(OPTIONS_QUERY, (list(publication_names(fleet_id)),)).fetchall()
    return {name: (operations, additions) for name, operations, additions in rows}
