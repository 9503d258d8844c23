"""Publications: which tables' changes a node's WAL gives us, without making the fleet's own writes fail.

A publication of UPDATEs on a table without replica identity makes PostgreSQL reject those UPDATEs, so such
tables never enter it: append-only ones have a publication of their own, of inserts and truncates alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from fleet.groups import Table, qualified
from storage.errors import RefusedError

PUBLICATION_TABLES_QUERY = """
SELECT p.pubname, n.nspname || '.' || c.relname
  FROM pg_publication p
  JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY (%s)
"""


class TableNotAdmissibleError(RefusedError):
    """A table has no replica identity, so its changes can't be followed."""


class PublicationChangedError(RefusedError):
    """A publication does not hold the tables of the snapshot."""


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
    """Create both publications and add what they lack; return the tables added. Safe to repeat."""
    keyed, append_only = publication_names(fleet_id)
    wanted: dict[str, dict[str, str]] = {keyed: {}, append_only: {}}
    for table in tables:
        name = append_only if table.group.identity == "append_only" else keyed
        wanted[name][table.group.name] = qualified(table.group)
    present = _published(connection, fleet_id)
    existing = {row[0] for row in connection.execute("SELECT pubname FROM pg_publication")}
    added: list[str] = []
    for name, operations in ((keyed, "insert, update, delete, truncate"), (append_only, "insert, truncate")):
        if name not in existing:
            create = sql.SQL("CREATE PUBLICATION {} WITH (publish = {})")
            connection.execute(create.format(sql.Identifier(name), sql.Literal(operations)))
        missing = sorted(wanted[name].keys() - present.get(name, set()))
        if missing:
            statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE ONLY {}").format(
                sql.Identifier(name),
                sql.SQL(", ONLY ").join(sql.SQL(wanted[name][table]) for table in missing),
            )
            connection.execute(statement)
            added += missing
    return added


def check_published(connection: psycopg.Connection[Any], node: str, fleet_id: str, groups: Iterable[str]) -> None:
    """Raise PublicationChangedError if a group's changes are not (or no longer) published on `node`."""
    published = set().union(*_published(connection, fleet_id).values())
    missing = sorted(set(groups) - published)
    if missing:
        raise PublicationChangedError(
            f"node {node}: not in Cutline's publication: {', '.join(missing)}",
            hint="run: snapshot init   (changes made before that are lost to a chain: then take a full snapshot)",
            details={"node": node, "tables": missing},
        )


def _published(connection: psycopg.Connection[Any], fleet_id: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, table in connection.execute(PUBLICATION_TABLES_QUERY, (list(publication_names(fleet_id)),)):
        found.setdefault(name, set()).add(table)
    return found
