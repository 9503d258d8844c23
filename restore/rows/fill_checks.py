"""Find all obstacles to filling the tables in a database, before anything is changed.

There is at most one obstacle of each kind; it names all affected tables, and the statements that remove it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg
from msgspec import Struct

from cutline.fleet.config import GroupRules, Node
from cutline.fleet.table_names import quote_identifier, table_name
from cutline.nodes.groups import Group, Table, qualify, read_tables
from cutline.nodes.problems import quote, read_role
from cutline.restore.rows.filled_tables import OWN, Checker, find_acting, find_filled, find_oids, named, oids_of
from cutline.restore.rows.filling import DELETED, REPLICA
from cutline.restore.rows.jobs import find_roots
from cutline.restore.rows.references import (
    find_code_of_others,
    find_referring,
    find_temporal,
    find_unreadable,
    find_untrusted,
)
from cutline.restore.targets.obstacles import Obstacles
from cutline.snapshots.records.commit import Sequence as StoredSequence

# By index for each sequence, however few rows the statistics of a new database expect.
SEQUENCES_QUERY = """
SELECT s.space, s.name, c.oid IS NOT NULL, coalesce(s.value BETWEEN q.seqmin AND q.seqmax, true),
       c.oid IS NULL OR (has_sequence_privilege(c.oid, 'UPDATE') AND has_schema_privilege(n.oid, 'USAGE'))
  FROM unnest(%s::text[], %s::text[], %s::bigint[]) AS s (space, name, value)
  LEFT JOIN pg_namespace n ON n.nspname = s.space::name
  LEFT JOIN LATERAL (
    SELECT oid FROM pg_class WHERE relname = s.name::name AND relnamespace = n.oid AND relkind = 'S' OFFSET 0
  ) AS c ON true
  LEFT JOIN pg_sequence q ON q.seqrelid = c.oid
"""
# The sequences of the tables' columns: sequences that are owned by a column or used in its default.
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
    """Return those of `sequences` that are used by columns in these tables in the session's database."""
    oids = oids_of(connection, groups)
    used = set(connection.execute(USED_QUERY, (oids,)).fetchall())
    return [sequence for sequence in sequences if (sequence.schema, sequence.name) in used]


def check_sequences(
    checker: Checker, connection: psycopg.Connection[Any], role: str, sequences: Sequence[StoredSequence]
) -> None:
    """Add the obstacles to setting the sequences' values."""
    columns = zip(*((sequence.schema, sequence.name, sequence.last_value) for sequence in sequences), strict=True)
    values = tuple(map(list, columns)) or ([], [], [])
    rows = connection.execute(SEQUENCES_QUERY, values).fetchall()
    if missing := [table_name(space, name) for space, name, exists, _, _ in rows if not exists]:
        checker.add(
            f"{checker.label} lacks sequences that the snapshot has: {named(missing)}",
            "create them, or restore only some tables with --group PATTERN",
        )
    if beyond := [table_name(space, name) for space, name, _, fits, _ in rows if not fits]:
        checker.add(
            f"sequences of {checker.label} can't be set to the snapshot's values: {named(beyond)}",
            "change their MINVALUE and MAXVALUE to those of the snapshot",
        )
    if denied := [(space, name) for space, name, _, _, may_set in rows if not may_set]:
        checker.add(
            f"role {role} may not set sequences of {checker.label}: {named([table_name(*one) for one in denied])}",
            "run as their owner",
            [f"GRANT USAGE ON SCHEMA {quote(space)} TO {role}" for space, _ in denied]
            + [f"GRANT UPDATE ON SEQUENCE {quote(space)}.{quote(name)} TO {role}" for space, name in denied],
        )


SET_PARAMETER_VERSION = 150000
DATABASE_QUERY = """
SELECT pg_encoding_to_char(encoding), has_database_privilege(oid, 'CREATE') FROM pg_database
 WHERE datname = current_database()
"""
KINDS = {
    "r": "not a permanent table",
    "p": "a partitioned table",
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
}
KINDS_QUERY = """
SELECT n.nspname, c.relname, c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = ANY (%s) AND n.nspname !~ '^pg_'
"""
# NOT NULL columns without a default, which may lack a value in the snapshot's rows.
NEEDED_QUERY = """
SELECT a.attrelid::bigint, a.attname FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
 WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity = ''
   AND NOT a.atthasdef AND (a.attnotnull OR t.typnotnull) AND t.typdefault IS NULL
"""
# Columns without a default.
UNFILLED_QUERY = """
SELECT a.attrelid::bigint, a.attname
  FROM unnest(%s::oid[]) WITH ORDINALITY AS given (oid, place)
  JOIN pg_attribute a ON a.attrelid = given.oid JOIN pg_type t ON t.oid = a.atttypid
 WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity = '' AND NOT a.atthasdef
   AND t.typdefault IS NULL ORDER BY given.place, a.attnum
"""
# Constraints that are enforced by triggers after the statement.
DEFERRABLE_QUERY = """
SELECT format('%%I.%%I', n.nspname, c.relname), k.conname
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE k.conrelid = ANY (%s) AND k.contype IN ('p', 'u', 'x') AND k.condeferrable ORDER BY 1, 2
"""
# Constraints that the tables' former rows may violate, where they are defined: COPY checks each new row.
UNVALIDATED_QUERY = """
WITH RECURSIVE above AS (
    SELECT relid FROM unnest(%s::oid[]) AS given (relid)
    UNION SELECT h.inhparent FROM above a JOIN pg_inherits h ON h.inhrelid = a.relid)
SELECT format('%%I.%%I', n.nspname, c.relname), quote_ident(k.conname), pg_get_constraintdef(k.oid)
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE k.conrelid IN (SELECT relid FROM above) AND k.contype IN ('c', 'n') AND NOT k.convalidated AND k.coninhcount = 0
   AND (NOT k.connoinherit OR k.conrelid = ANY (%s)) AND coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
 ORDER BY 1, 2
"""
PRIVILEGES_QUERY = f"""
WITH RECURSIVE filled AS (SELECT relid FROM unnest(%s::oid[]) AS given (relid)),
{DELETED}
SELECT c.oid::bigint, format('%%I.%%I', n.nspname, c.relname), p.name, n.nspname, has_schema_privilege(n.oid, 'USAGE')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('TRUNCATE'), ('DELETE')) AS p (name)
 WHERE c.oid IN (SELECT relid FROM filled)
   AND NOT (has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, p.name))
   AND (p.name <> 'DELETE' OR c.oid IN (SELECT relid FROM deleted))
 ORDER BY 2, 3
"""
# The leaf partitions of the tables through which rows are loaded (restore/rows/jobs.py). Any of them may get rows.
LEAVES_QUERY = """
WITH RECURSIVE below AS (
    SELECT name::regclass::oid AS relid FROM unnest(%s::text[]) AS root (name)
    UNION SELECT i.inhrelid FROM below JOIN pg_inherits i ON i.inhparent = below.relid)
SELECT c.oid::regclass::text FROM below JOIN pg_class c ON c.oid = below.relid
 WHERE c.relkind <> 'p' AND c.oid <> ALL (%s::oid[]) ORDER BY 1
"""
VIEWS_QUERY = "SELECT format('%I.%I', schemaname, matviewname) FROM pg_matviews ORDER BY 1"


class WantedRows(Struct, frozen=True):
    """The data to load into a database: the rows of `groups`, and the values of `sequences`.

    `encoding` is the source's. `has_begun`: an earlier process may have loaded some of the rows.
    """

    groups: Sequence[Group]
    sequences: Sequence[StoredSequence]
    encoding: str
    has_begun: bool = False


def check_tables(
    node: Node, connection: psycopg.Connection[Any], wanted: WantedRows, obstacles: Obstacles
) -> dict[str, int]:
    """Add the obstacles to filling the tables in the session's database; return the table oids, keyed by group name."""
    checker = Checker(node, obstacles)
    role = read_role(node, connection).quoted
    encoding, may_create = connection.execute(DATABASE_QUERY).fetchone() or ("", False)
    if encoding != wanted.encoding:
        checker.add(
            f"{checker.label} has encoding {encoding}, but the snapshot's rows are in {wanted.encoding}",
            f"restore into a database with encoding {wanted.encoding}, or without --data-only",
        )
    if not may_create:
        grant = f"GRANT CREATE ON DATABASE {quote(checker.database)} TO {role}"
        checker.add(f"role {role} may not create the ledger's schema in {checker.label}", "run as its owner", [grant])
    _check_replica(checker, connection, role)
    tables = {table.group.name: table for table in read_tables(connection, GroupRules())}
    present = {group.name: tables[group.name] for group in wanted.groups if group.name in tables}
    _check_found(checker, connection, wanted.groups, present)
    _check_columns(checker, connection, wanted.groups, present)
    _check_constraints(checker, connection, wanted.groups, present)
    uncounted = _check_privileges(checker, connection, role, present)
    if not wanted.has_begun:
        counted = [table for table in present.values() if table.oid not in uncounted and not table.hides_rows]
        if filled := find_filled(connection, [table.group for table in counted]):
            hint, statement = _emptying(connection, [present[name] for name in filled])
            checker.add(f"tables of {checker.label} are not empty: {named(filled)}", hint, [statement])
    check_sequences(checker, connection, role, wanted.sequences)
    return {name: table.oid for name, table in present.items()}


def _emptying(connection: psycopg.Connection[Any], tables: Sequence[Table]) -> tuple[str, str]:
    """Return a hint and the statement that empties the tables, together with tables that may reference their rows."""
    names = [f"ONLY {qualify(table.group)}" for table in tables]
    referring = find_referring(connection, [table.oid for table in tables])
    if referring.filled:
        return (
            f"rows of {named(referring.filled)} may reference their rows; if none of these rows are needed, empty all"
            " these tables",
            f"TRUNCATE {', '.join([*names, *referring.to_truncate])}",
        )
    hint = "if their rows are not needed, empty them"
    if not referring.to_truncate:
        return hint, f"TRUNCATE {', '.join(names)}"
    # TRUNCATE fails even if the referencing tables are empty, so use DELETE, in a single statement because the tables
    # may reference each other.
    *others, last = names
    ctes = ", ".join(f"t{number} AS (DELETE FROM {name})" for number, name in enumerate(others))
    return hint, f"WITH {ctes} DELETE FROM {last}" if ctes else f"DELETE FROM {last}"


def find_views(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the materialized views in the session's database."""
    return [name for (name,) in connection.execute(VIEWS_QUERY)]


def _check_replica(checker: Checker, connection: psycopg.Connection[Any], role: str) -> None:
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(REPLICA)
    except psycopg.errors.InsufficientPrivilege:
        can_grant = connection.info.server_version >= SET_PARAMETER_VERSION
        grant = [f"GRANT SET ON PARAMETER session_replication_role TO {role}"] if can_grant else []
        checker.add(
            f"role {role} may not set session_replication_role, which disables triggers and foreign keys",
            "run as a superuser" if grant else "restore as a superuser",
            grant,
        )


def _check_found(
    checker: Checker, connection: psycopg.Connection[Any], groups: Iterable[Group], present: Mapping[str, Table]
) -> None:
    lacking = [group.name for group in groups if group.name not in present]
    if not lacking:
        return
    kinds = {
        table_name(schema, name): KINDS[kind] for schema, name, kind in connection.execute(KINDS_QUERY, (list(KINDS),))
    }
    if others := [f"{name} is {kinds[name]}" for name in lacking if name in kinds]:
        checker.add(
            f"tables of the snapshot are not ordinary tables in {checker.label}: {named(others)}",
            "restore only the other tables with --group PATTERN, or all tables without --data-only",
        )
    if missing := [name for name in lacking if name not in kinds]:
        checker.add(
            f"{checker.label} lacks tables that the snapshot has: {named(missing)}",
            "create them, or restore only the other tables with --group PATTERN",
        )


def _check_columns(
    checker: Checker, connection: psycopg.Connection[Any], groups: Iterable[Group], present: Mapping[str, Table]
) -> None:
    names = {table.oid: name for name, table in present.items()}
    wrong: list[str] = []
    known: dict[str, set[str]] = {}
    for group in (group for group in groups if group.name in present):
        types = {column.name: column.type for column in present[group.name].group.columns}
        known[group.name] = {column.name for column in group.columns}
        for column in group.columns:
            if column.name not in types:
                wrong.append(f"{group.name}.{column.name} is missing or generated")
            elif types[column.name] != column.type:
                wrong.append(f"{group.name}.{column.name} is {types[column.name]} instead of {column.type}")
    if wrong:
        checker.add(
            f"columns of tables in {checker.label} differ from the snapshot's: {named(wrong)}",
            "alter them to match the snapshot, or restore only the other tables with --group PATTERN",
        )
    needed = connection.execute(NEEDED_QUERY, (list(names),)).fetchall()
    further = [(names[oid], column) for oid, column in needed if column not in known[names[oid]]]
    if further:
        checker.add(
            f"tables of {checker.label} have NOT NULL columns for which the snapshot has no values:"
            f" {named([f'{name}.{column}' for name, column in further])}",
            "give them defaults, or allow NULL",
            [
                f"ALTER TABLE {qualify(present[name].group)} ALTER COLUMN {quote_identifier(column)} DROP NOT NULL"
                for name, column in further
            ],
        )


def _check_constraints(
    checker: Checker, connection: psycopg.Connection[Any], groups: Iterable[Group], present: Mapping[str, Table]
) -> None:
    oids = [table.oid for table in present.values()]
    roots = set(find_roots(connection, (group for group in groups if group.name in present)).values())
    if acting := find_acting(connection, [*oids, *find_oids(connection, roots)]):
        turn = {"A": "ENABLE", "R": "DISABLE"}
        checker.add(
            f"triggers or rules of {checker.label} would fire for the loaded rows, because they are enabled as ALWAYS"
            " or REPLICA:"
            f" {named([trigger.label for trigger in acting])}",
            "disable them until the restore is done",
            [
                f"ALTER TABLE {trigger.table} {turn[trigger.enabled]} {trigger.kind} {quote(trigger.name)}"
                for trigger in acting
            ],
        )
    if deferrable := connection.execute(DEFERRABLE_QUERY, (oids,)).fetchall():
        checker.add(
            f"deferrable constraints of {checker.label} are not enforced while rows are loaded:"
            f" {named([f'{name} of {table}' for table, name in deferrable])}",
            "drop them, then add them again after the restore",
            [f"ALTER TABLE {table} DROP CONSTRAINT {quote(name)}" for table, name in deferrable],
        )
    if others := [name for (name,) in connection.execute(LEAVES_QUERY, (list(roots), oids))]:
        checker.add(
            f"rows may end up in partitions that are not restored, because PostgreSQL chooses partitions by an enum's"
            f" hash: {named(others)}",
            "restore all partitions together",
        )
    if untrusted := find_untrusted(connection, oids):
        checker.add(
            f"foreign keys of {checker.label} can't be verified without running code of roles that own no restored"
            f" table: {named(untrusted)}",
            "drop them and add them again after the restore, or restore those tables too",
        )
    if code := find_code_of_others(connection, oids):
        checker.add(
            f"loading rows into tables of {checker.label} would run code of roles that own no restored table:"
            f" {named(code)}",
            "transfer it to an owner of the tables: ALTER TYPE, DOMAIN or FUNCTION … OWNER TO …",
        )
    if temporal := find_temporal(connection, oids):
        checker.add(
            f"foreign keys of {checker.label} compare periods, which a restore can't verify: {named(temporal)}",
            "drop them, then add them again after the restore",
        )


def find_unvalidated(connection: psycopg.Connection[Any], oids: list[int]) -> list[str]:
    """Return, for each NOT VALID constraint of the tables, the statements that drop it and add it again."""
    return [
        f"ALTER TABLE {table} DROP CONSTRAINT {name}; afterwards: ALTER TABLE {table} ADD CONSTRAINT {name}"
        f" {definition};"
        for table, name, definition in connection.execute(UNVALIDATED_QUERY, (oids, oids))
    ]


def find_unfilled(connection: psycopg.Connection[Any], groups: Iterable[Group], oids: Mapping[str, int]) -> list[str]:
    """Return the columns of the tables that will be NULL: the groups lack them, and they have no default.

    `oids` are those of the tables, keyed by group name.
    """
    known = {oids[group.name]: group for group in groups if group.name in oids}
    rows = connection.execute(UNFILLED_QUERY, (list(known),)).fetchall()
    names = {oid: {column.name for column in group.columns} for oid, group in known.items()}
    return [f"{known[oid].name}.{column}" for oid, column in rows if column not in names[oid]]


def _check_privileges(
    checker: Checker, connection: psycopg.Connection[Any], role: str, present: Mapping[str, Table]
) -> set[int]:
    """Add an obstacle for missing privileges; return the oids of the tables whose rows our role may not count."""
    oids = [one.oid for one in present.values()]
    if hidden := [name for name, one in present.items() if one.hides_rows]:
        checker.add(
            f"row-level security in {checker.label} applies to role {role}: {named(hidden)}",
            "run as a superuser",
            [f"ALTER ROLE {role} BYPASSRLS"],
        )
    denied = connection.execute(PRIVILEGES_QUERY, (oids,)).fetchall()
    if denied:
        lacking: dict[str, list[str]] = {}
        for _, table, privilege, _, _ in denied:
            lacking.setdefault(table, []).append(privilege)
        schemas = [schema for *_, schema, may_use in denied if not may_use]
        shown = [f"{table} ({', '.join(names)})" for table, names in lacking.items()]
        checker.add(
            f"role {role} lacks privileges on tables of {checker.label}: {named(shown)}",
            "run as their owner",
            [f"GRANT USAGE ON SCHEMA {quote(schema)} TO {role}" for schema in schemas]
            + [f"GRANT {', '.join(names)} ON {table} TO {role}" for table, names in lacking.items()],
        )
    if unreadable := [
        one for one in find_unreadable(connection, oids) if one not in {table for _, table, *_ in denied}
    ]:
        checker.add(
            f"role {role} may not read tables of {checker.label} at the other ends of foreign keys:"
            f" {named(unreadable)}",
            "run as their owner",
            [f"GRANT SELECT ON {table} TO {role}" for table in unreadable],
        )
    return {oid for oid, _, name, _, may_use in denied if name == "SELECT" or not may_use}
