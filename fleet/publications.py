"""Publications: which tables' changes a node's WAL gives us, without making the fleet's own writes fail.

A publication of UPDATEs on a table without replica identity makes PostgreSQL reject those UPDATEs, so such
tables never enter it: append-only ones have a publication of their own, of inserts and truncates alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from fleet.groups import Group, Table, qualified
from fleet.hints import NEW_CHAIN
from storage.errors import RefusedError

# The stamps change with every change of these rows, and with nothing else.
MEMBERS_QUERY = """
SELECT p.pubname, n.nspname || '.' || c.relname,
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
KEYED_OPERATIONS, APPEND_ONLY_OPERATIONS = "insert, update, delete, truncate", "insert, truncate"
GENERATED_COLUMNS_VERSION = 180000


class TableNotAdmissibleError(RefusedError):
    """A table has no replica identity, so its changes can't be followed."""


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


def publication_names(fleet_id: str) -> tuple[str, str]:
    """The fleet's two publications on every primary: keyed and full tables, append-only tables."""
    return f"cutline_{fleet_id}", f"cutline_{fleet_id}_append_only"


def check_admissible(tables: dict[str, list[Table]]) -> None:
    """Raise TableNotAdmissibleError naming every table that can't be followed and what would admit it."""
    refused = [(node, table) for node, found in tables.items() for table in found if not table.is_admissible]
    if refused:
        names = ", ".join(f"{table.group.name} on {node}" for node, table in refused)
        remedies = "\n".join(sorted({f"  {table.remedy};" for _, table in refused}))
        raise TableNotAdmissibleError(
            f"no replica identity, so updates and deletes can't be followed: {names}",
            hint=f"give them one, or list them in fleet.toml under groups.exclude or groups.append_only:\n{remedies}",
            details={"tables": [{"node": node, "table": table.group.name} for node, table in refused]},
        )
    unreadable = [f"{table.group.name} on {node}" for node, f in tables.items() for table in f if not table.readable]
    if unreadable:
        raise TableNotAdmissibleError(
            f"the role may not read {', '.join(unreadable)}",
            hint="GRANT pg_read_all_data TO the role, or exclude the tables in fleet.toml under groups.exclude",
        )


def ensure_publications(connection: psycopg.Connection[Any], fleet_id: str, tables: Iterable[Table]) -> list[str]:
    """Create both publications, add what they lack, and put right what was altered; return the tables added.

    Safe to repeat: what is right is not touched, so that no chain ends by it.
    """
    wanted: dict[str, dict[str, str]] = {name: {} for name in publication_names(fleet_id)}
    for table in tables:
        wanted[publication_of(table.group, fleet_id)][table.group.name] = qualified(table.group)
    with connection.transaction():
        members, options = _members(connection, fleet_id), _options(connection, fleet_id)
        added: list[str] = []
        for name, operations in operations_of(fleet_id).items():
            _ensure_options(connection, name, operations, options)
            present = {table: found for table, found in members.get(name, {}).items() if table in wanted[name]}
            limited = sorted(table for table, found in present.items() if found.limits)
            _alter(connection, name, "DROP TABLE", [wanted[name][table] for table in limited])
            missing = sorted({*limited, *(wanted[name].keys() - present.keys())})
            _alter(connection, name, "ADD TABLE", [wanted[name][table] for table in missing])
            added += missing
    return added


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


def _alter(connection: psycopg.Connection[Any], name: str, action: str, tables: list[str]) -> None:
    if tables:
        # ONLY is for ADD: DROP removes just what is named.
        only = "ONLY " if action == "ADD TABLE" else ""
        listed = ", ".join(f"{only}{table}" for table in tables)
        connection.execute(
            sql.SQL("ALTER PUBLICATION {} {} {}").format(sql.Identifier(name), sql.SQL(action), sql.SQL(listed))
        )


def check_published(
    connection: psycopg.Connection[Any], node: str, fleet_id: str, groups: Iterable[Group]
) -> dict[str, Membership]:
    """The groups' memberships, by name; raise PublicationChangedError if not all of a group's changes are published."""
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
        elif missing:
            problem = f"not in Cutline's publication {name}: {', '.join(missing)}"
        elif limited:
            problem = f"publication {name} was altered: it has {', '.join(limited)}"
        if problem:
            raise PublicationChangedError(
                f"node {node}: {problem}",
                hint=NEW_CHAIN,
                details={"node": node, "publication": name, "tables": missing or sorted(tables)},
            )
        found |= {table: present[table] for table in tables}
    return found


def _members(connection: psycopg.Connection[Any], fleet_id: str) -> dict[str, dict[str, Membership]]:
    found: dict[str, dict[str, Membership]] = {}
    for name, table, *membership in connection.execute(MEMBERS_QUERY, (list(publication_names(fleet_id)),)):
        found.setdefault(name, {})[table] = Membership(*membership)
    return found


def _options(connection: psycopg.Connection[Any], fleet_id: str) -> dict[str, tuple[str, str]]:
    rows = connection.execute(OPTIONS_QUERY, (list(publication_names(fleet_id)),)).fetchall()
    return {name: (operations, additions) for name, operations, additions in rows}
