"""The tables that a restore with `--data-only` fills, their triggers and rules, and the obstacles to filling them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.config import Node
from cutline.nodes.connections import database_name
from cutline.nodes.groups import Group, qualify
from cutline.restore.targets.obstacles import Obstacles
from cutline.snapshots.ddl.database_facts import having_path, read_search_path
from cutline.storage.errors import RefusedError

NAMED_MAX = 10


class TablesUnfitError(RefusedError):
    """A snapshot's rows can't be loaded into a database's tables, or our role may not load them."""


class Checker:
    """Collects the obstacles for one database, named `label` in messages."""

    def __init__(self, node: Node, obstacles: Obstacles) -> None:
        self.node, self.database, self._obstacles = node, database_name(node.dsn), obstacles
        self.label = f"database {self.database}"

    def add(self, what: str, hint: str, statements: Iterable[str] = ()) -> None:
        """Add an obstacle, with a hint and the `statements` that remove it."""
        lines = [f"  {statement};" for statement in dict.fromkeys(statements)]
        if lines:
            hint = f"{hint} in {self.label} on {self.node.id}:"
        error = TablesUnfitError(
            f"node {self.node.id}: {what}", hint=[hint, *lines], details={"database": self.database}
        )
        self._obstacles.add(error, self.node.id)


def named(names: Sequence[str]) -> str:
    """List the first names and count the others."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"


# The tables with these oids, and the partitioned tables that contain them.
OWN = """own AS (
    SELECT relid FROM unnest(%s::oid[]) AS filled (relid)
    UNION SELECT i.inhparent FROM own JOIN pg_inherits i ON i.inhrelid = own.relid
      JOIN pg_class c ON c.oid = i.inhparent AND c.relkind = 'p')"""
CHECKED_AT_ONCE = 100
OIDS_QUERY = "SELECT to_regclass(name)::oid::bigint FROM unnest(%s::text[]) AS given (name)"
# Triggers and rules that fire even when session_replication_role is replica.
ACTING_QUERY = """
SELECT c.oid::bigint, format('%%I.%%I', n.nspname, c.relname), a.kind, a.name, a.enabled, a.on_delete, a.on_truncate
  FROM (SELECT tgrelid, 'TRIGGER', tgname, tgenabled::text, tgtype & 8 <> 0, tgtype & 32 <> 0 FROM pg_trigger
        UNION ALL SELECT ev_class, 'RULE', rulename, ev_enabled::text, ev_type = '4', false FROM pg_rewrite)
       AS a (relid, kind, name, enabled, on_delete, on_truncate)
  JOIN pg_class c ON c.oid = a.relid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.relid = ANY (%s) AND a.enabled IN ('A', 'R') ORDER BY 2, 3, 4
"""


class Acting(NamedTuple):
    """A trigger or rule that fires, and whether it fires on DELETE and on TRUNCATE.

    `oid` and `table` (quoted) identify its table; `enabled` is A or R.
    """

    oid: int
    table: str
    kind: str
    name: str
    enabled: str
    on_delete: bool
    on_truncate: bool

    @property
    def label(self) -> str:
        """The trigger or rule and its table, for messages."""
        return f"{self.kind.lower()} {self.name} of {self.table}"


def oids_of(connection: psycopg.Connection[Any], groups: Iterable[Group]) -> list[int]:
    """Return the oids of those tables that exist in the session's database."""
    return find_oids(connection, [qualify(group) for group in groups])


def find_oids(connection: psycopg.Connection[Any], names: Iterable[str]) -> list[int]:
    """Return the oids of the tables with these quoted names that exist in the session's database."""
    return [oid for (oid,) in connection.execute(OIDS_QUERY, (list(names),)) if oid is not None]


def find_acting(connection: psycopg.Connection[Any], oids: list[int]) -> list[Acting]:
    """Find the triggers and rules of these tables that fire even when session_replication_role is replica."""
    return [Acting(*row) for row in connection.execute(ACTING_QUERY, (oids,)).fetchall()]


def find_filled(connection: psycopg.Connection[Any], groups: Sequence[Group]) -> list[str]:
    """Find the tables that have rows, not counting rows in child tables."""
    filled: list[str] = []
    path = read_search_path(connection)
    for start in range(0, len(groups), CHECKED_AT_ONCE):
        some = groups[start : start + CHECKED_AT_ONCE]
        columns = ", ".join(f"EXISTS (SELECT FROM ONLY {qualify(group)})" for group in some)
        with having_path(connection, path):
            row = connection.execute(f"SELECT {columns}".encode()).fetchone() or ()
        filled += [group.name for group, has_rows in zip(some, row, strict=True) if has_rows]
    return filled
