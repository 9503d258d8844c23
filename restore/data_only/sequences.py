"""The sequences of filled databases: which of the snapshot's are set, and whether they can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from cutline.fleet.nodes.privileges import quote
from cutline.fleet.tables.groups import Group
from cutline.fleet.tables.names import table_name
from cutline.restore.data_only.checker import Checker, named
from cutline.restore.data_only.filled_tables import OWN, oids_of
from cutline.snapshots.records.commit import Sequence as StoredSequence

SEQUENCES_QUERY = """
SELECT s.space, s.name, c.oid IS NOT NULL, coalesce(s.value BETWEEN q.seqmin AND q.seqmax, true),
       c.oid IS NULL OR (has_sequence_privilege(c.oid, 'UPDATE') AND has_schema_privilege(n.oid, 'USAGE'))
  FROM unnest(%s::text[], %s::text[], %s::bigint[]) AS s (space, name, value)
  LEFT JOIN pg_namespace n ON n.nspname = s.space
  LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = s.name AND c.relkind = 'S'
  LEFT JOIN pg_sequence q ON q.seqrelid = c.oid
"""
# The sequences of the tables' columns: those that belong to one, or that its default names.
USED_QUERY = f"""
WITH RECURSIVE {OWN},
used AS (
    SELECT d.objid AS relid FROM pg_depend d JOIN own ON own.relid = d.refobjid
     WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
    UNION
    SELECT d.refobjid FROM pg_attrdef e JOIN own ON own.relid = e.adrelid
      JOIN pg_depend d ON d.objid = e.oid
     WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass)
SELECT n.nspname, c.relname FROM pg_class c JOIN used ON used.relid = c.oid
  JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'S'
"""


def find_used(
    connection: psycopg.Connection[Any], groups: Iterable[Group], sequences: Iterable[StoredSequence]
) -> list[StoredSequence]:
    """Those of `sequences` that columns of these tables use in the session's database."""
    oids = oids_of(connection, groups)
    used = set(connection.execute(USED_QUERY, (oids,)).fetchall())
    return [one for one in sequences if (one.schema, one.name) in used]


def check_sequences(
    checker: Checker, connection: psycopg.Connection[Any], role: str, sequences: Sequence[StoredSequence]
) -> None:
    """Add what keeps our role from giving the sequences their values."""
    columns = zip(*((one.schema, one.name, one.last_value) for one in sequences), strict=True)
    values = tuple(map(list, columns)) or ([], [], [])
    rows = connection.execute(SEQUENCES_QUERY, values).fetchall()
    if missing := [table_name(space, name) for space, name, exists, _, _ in rows if not exists]:
        checker.add(
            f"{checker.label} lacks sequences that the snapshot has: {named(missing)}",
            "create them, or restore some tables alone with --group PATTERN",
        )
    if beyond := [table_name(space, name) for space, name, _, fits, _ in rows if not fits]:
        checker.add(
            f"sequences of {checker.label} can't have the snapshot's values: {named(beyond)}",
            "alter their MINVALUE and MAXVALUE as the snapshot has them",
        )
    if denied := [(space, name) for space, name, _, _, may_set in rows if not may_set]:
        checker.add(
            f"role {role} may not set sequences of {checker.label}: {named([table_name(*one) for one in denied])}",
            "run as their owner",
            [f"GRANT USAGE ON SCHEMA {quote(space)} TO {role}" for space, _ in denied]
            + [f"GRANT UPDATE ON SEQUENCE {quote(space)}.{quote(name)} TO {role}" for space, name in denied],
        )
