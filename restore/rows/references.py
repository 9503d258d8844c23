"""Verify the foreign keys of filled tables, which are not checked while rows are loaded.

Keys that the server itself does not guarantee (NOT VALID, NOT ENFORCED) are skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

from cutline.nodes.connections import connect, raising_unreachable, refuse_views
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import ending
from cutline.restore.rows.filled_tables import OWN, oids_of
from cutline.restore.rows.load import LoadTarget
from cutline.snapshots.ddl.database_facts import having_path, read_search_path
from cutline.storage.errors import RefusedError

# The foreign keys of the tables and of the partitioned tables above them, and the keys that reference these tables. A
# partitioned table's key is verified as a whole. A referenced value must be equal according to the constraint's
# operator (conpfeqop).
KEYS = f"""
WITH RECURSIVE {OWN},
keys AS (
    SELECT k.*, coalesce((to_jsonb(k) ->> 'conperiod')::boolean, false) AS is_temporal
      FROM pg_constraint k
     WHERE k.contype = 'f' AND k.conparentid = 0 AND k.convalidated
       AND coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
       AND (k.conrelid IN (SELECT relid FROM own) OR k.confrelid IN (SELECT relid FROM own)))
"""
OTHERS_QUERY = f"""{KEYS}
SELECT DISTINCT format('%%I.%%I', n.nspname, c.relname)
  FROM keys k JOIN pg_class c ON c.oid IN (k.conrelid, k.confrelid) JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE NOT (has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE')) ORDER BY 1
"""
TEMPORAL_QUERY = f"""{KEYS}
SELECT k.conname || ' of ' || format('%%I.%%I', n.nspname, c.relname)
  FROM keys k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE k.is_temporal ORDER BY 1
"""
CONNECTED_QUERY = f"""{KEYS},
connected AS (
    SELECT relid FROM own UNION SELECT conrelid FROM keys UNION SELECT confrelid FROM keys
    UNION SELECT i.inhrelid FROM connected JOIN pg_inherits i ON i.inhparent = connected.relid)
SELECT relid::bigint FROM connected
"""
# Roles whose code may run as our role: superusers, our own role, and owners of filled tables.
TRUSTED = """
trusted AS (
    SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user
    UNION SELECT c.relowner FROM own JOIN pg_class c ON c.oid = own.relid)
"""
# The other tables that must be truncated together with these; `is_below`: the table is a partition of one of them.
REFERRING_QUERY = f"""
WITH RECURSIVE {OWN}, {TRUSTED},
referring AS (
    SELECT conrelid AS relid FROM pg_constraint WHERE contype = 'f' AND confrelid = ANY (%s)
    UNION SELECT k.conrelid FROM referring r JOIN pg_constraint k ON k.contype = 'f' AND k.confrelid = r.relid)
SELECT format('%%I.%%I', n.nspname, c.relname), c.relkind = 'p',
       EXISTS (SELECT FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent AND p.relkind = 'p'
                WHERE i.inhrelid = c.oid AND p.oid IN (SELECT relid FROM referring)) AS is_below,
       c.relowner IN (SELECT oid FROM trusted) AND has_table_privilege(c.oid, 'SELECT')
       AND has_schema_privilege(n.oid, 'USAGE') AND NOT row_security_active(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid IN (SELECT relid FROM referring) AND c.oid <> ALL (%s) ORDER BY 1
"""
UNTRUSTED_QUERY = f"""{KEYS}, {TRUSTED}
SELECT k.conname || ' of ' || format('%%I.%%I', n.nspname, c.relname) || ', which belongs to '
       || pg_get_userbyid(c.relowner)
  FROM keys k JOIN pg_class c ON c.oid IN (k.conrelid, k.confrelid) JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relowner NOT IN (SELECT oid FROM trusted) ORDER BY 1
"""
# The code that runs when a row is loaded and its keys are verified: the tables' types, the code in defaults,
# constraints, indexes and partition keys, and everything that these depend on. The server does not track calls in a
# function's body. Casts within expressions are recorded as functions. Key values are cast to their operators' types and
# to text. Anyone may create other casts to built-in types, but nothing here runs those.
CODE_QUERY = f"""
WITH RECURSIVE {OWN}, {TRUSTED},
key_types (oid) AS (
    SELECT part.oid FROM pg_constraint k CROSS JOIN LATERAL (
           SELECT a.atttypid FROM (VALUES (k.conrelid, k.conkey), (k.confrelid, k.confkey)) AS end_of (relid, columns)
             JOIN pg_attribute a ON a.attrelid = end_of.relid AND a.attnum = ANY (end_of.columns)
           UNION SELECT unnest(ARRAY[o.oprleft, o.oprright]) FROM pg_operator o WHERE o.oid = ANY (k.conpfeqop)
           UNION SELECT 'text'::regtype) AS part (oid)
     WHERE k.contype = 'f' AND (k.conrelid IN (SELECT relid FROM own) OR k.confrelid IN (SELECT relid FROM own))
    UNION SELECT part.oid FROM key_types JOIN pg_type t ON t.oid = key_types.oid
          CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) AS part (oid) WHERE part.oid <> 0),
of_tables (classid, objid) AS (
    SELECT 'pg_class'::regclass::oid, relid FROM own
    UNION ALL SELECT 'pg_class'::regclass, i.indexrelid FROM pg_index i WHERE i.indrelid IN (SELECT relid FROM own)
    UNION ALL SELECT 'pg_attrdef'::regclass, d.oid FROM pg_attrdef d WHERE d.adrelid IN (SELECT relid FROM own)
    UNION ALL SELECT 'pg_constraint'::regclass, k.oid FROM pg_constraint k
               WHERE k.conrelid IN (SELECT relid FROM own) OR k.confrelid IN (SELECT relid FROM own)
    UNION ALL SELECT 'pg_type'::regclass, oid FROM key_types
    UNION ALL SELECT 'pg_proc'::regclass, c.castfunc FROM pg_cast c
               WHERE c.castsource IN (SELECT oid FROM key_types) AND c.casttarget IN (SELECT oid FROM key_types)),
code (classid, objid) AS (
    SELECT classid, objid FROM of_tables
    UNION SELECT part.classid, part.objid FROM code CROSS JOIN LATERAL (
          SELECT d.refclassid, d.refobjid FROM pg_depend d
           WHERE d.classid = code.classid AND d.objid = code.objid AND d.refclassid IN (
                 'pg_type'::regclass, 'pg_proc'::regclass, 'pg_operator'::regclass, 'pg_opclass'::regclass)
          UNION ALL SELECT 'pg_constraint'::regclass, k.oid FROM pg_constraint k
                     WHERE code.classid = 'pg_type'::regclass AND k.contypid = code.objid
          UNION ALL SELECT 'pg_type'::regclass, a.atttypid FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid
                     WHERE code.classid = 'pg_type'::regclass AND t.oid = code.objid
                       AND a.attnum > 0 AND NOT a.attisdropped
          UNION ALL SELECT 'pg_proc'::regclass, f.amproc
                      FROM pg_opclass o JOIN pg_amproc f ON f.amprocfamily = o.opcfamily
                     WHERE code.classid = 'pg_opclass'::regclass AND o.oid = code.objid
          UNION ALL SELECT 'pg_operator'::regclass, f.amopopr
                      FROM pg_opclass o JOIN pg_amop f ON f.amopfamily = o.opcfamily
                     WHERE code.classid = 'pg_opclass'::regclass AND o.oid = code.objid) AS part (classid, objid))
SELECT 'type ' || format_type(t.oid, NULL) || ' of ' || pg_get_userbyid(t.typowner)
  FROM code JOIN pg_type t ON code.classid = 'pg_type'::regclass AND t.oid = code.objid
 WHERE t.typowner NOT IN (SELECT oid FROM trusted)
UNION SELECT 'function ' || p.oid::regprocedure || ' of ' || pg_get_userbyid(p.proowner)
  FROM code JOIN pg_proc p ON code.classid = 'pg_proc'::regclass AND p.oid = code.objid
 WHERE p.proowner NOT IN (SELECT oid FROM trusted) ORDER BY 1
"""
# The tables with trusted owners that these tables reference and that get no rows themselves.
REFERENCED_QUERY = f"""{KEYS}, {TRUSTED}
SELECT DISTINCT k.conname || ' of ' || format('%%I.%%I', fn.nspname, fc.relname),
       format('%%I.%%I', n.nspname, c.relname), CASE WHEN c.relkind = 'r' THEN 'ONLY ' ELSE '' END
  FROM keys k
  JOIN pg_class fc ON fc.oid = k.conrelid JOIN pg_namespace fn ON fn.oid = fc.relnamespace
  JOIN pg_class c ON c.oid = k.confrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND k.confrelid NOT IN (SELECT relid FROM own)
   AND c.relowner IN (SELECT oid FROM trusted)
   AND has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE') AND NOT row_security_active(c.oid)
 ORDER BY 1
"""
# For each foreign key, a query that returns the values of one row whose referenced row is missing. As in ri_triggers.c,
# both values are cast to the types of the constraint's operator, because anyone may create an operator with the same
# name for the columns' own types.
ORPHAN_QUERIES = f"""{KEYS}, {TRUSTED}
SELECT k.conname, fn.nspname || '.' || fc.relname, pn.nspname || '.' || pc.relname, c.columns,
       k.confrelid IN (SELECT relid FROM own),
       fc.relowner IN (SELECT oid FROM trusted) AND pc.relowner IN (SELECT oid FROM trusted),
       format('SELECT pg_catalog.concat_ws('', '', %%s) FROM %%s%%I.%%I f WHERE (%%s) AND NOT EXISTS'
              ' (SELECT FROM %%s%%I.%%I p WHERE %%s) LIMIT 1',
              c.shown, CASE WHEN fc.relkind = 'r' THEN 'ONLY ' ELSE '' END, fn.nspname, fc.relname, c.given,
              CASE WHEN pc.relkind = 'r' THEN 'ONLY ' ELSE '' END, pn.nspname, pc.relname, c.equal)
  FROM keys k
  JOIN pg_class fc ON fc.oid = k.conrelid JOIN pg_namespace fn ON fn.oid = fc.relnamespace
  JOIN pg_class pc ON pc.oid = k.confrelid JOIN pg_namespace pn ON pn.oid = pc.relnamespace
 CROSS JOIN LATERAL (
    SELECT string_agg(fa.attname, ', ' ORDER BY i) AS columns,
           string_agg(format('coalesce(f.%%I::text, ''NULL'')', fa.attname), ', ' ORDER BY i) AS shown,
           string_agg(format('f.%%I IS NOT NULL', fa.attname),
                      CASE WHEN k.confmatchtype = 'f' THEN ' OR ' ELSE ' AND ' END ORDER BY i) AS given,
           string_agg(format('p.%%I%%s OPERATOR(%%I.%%s) f.%%I%%s%%s', pa.attname,
                             CASE WHEN pa.atttypid <> o.oprleft
                                  THEN format('::%%I.%%I', ln.nspname, lt.typname) ELSE '' END,
                             opn.nspname, o.oprname, fa.attname,
                             CASE WHEN fa.atttypid <> o.oprright
                                  THEN format('::%%I.%%I', rn.nspname, rt.typname) ELSE '' END,
                             CASE WHEN pa.attcollation <> fa.attcollation AND cn.oid IS NOT NULL
                                  THEN format(' COLLATE %%I.%%I', cn.nspname, co.collname) ELSE '' END),
                      ' AND ' ORDER BY i) AS equal
      FROM generate_subscripts(k.conkey, 1) AS i
      JOIN pg_attribute fa ON fa.attrelid = k.conrelid AND fa.attnum = k.conkey[i]
      JOIN pg_attribute pa ON pa.attrelid = k.confrelid AND pa.attnum = k.confkey[i]
      JOIN pg_operator o ON o.oid = k.conpfeqop[i] JOIN pg_namespace opn ON opn.oid = o.oprnamespace
      JOIN pg_type lt ON lt.oid = o.oprleft JOIN pg_namespace ln ON ln.oid = lt.typnamespace
      JOIN pg_type rt ON rt.oid = o.oprright JOIN pg_namespace rn ON rn.oid = rt.typnamespace
      LEFT JOIN pg_collation co ON co.oid = pa.attcollation LEFT JOIN pg_namespace cn ON cn.oid = co.collnamespace) c
 WHERE NOT k.is_temporal ORDER BY 2, 1
"""


LOCK_SECONDS_MAX = 60
UNTRUSTED = "its tables belong to different roles, so code of a role that owns no restored table would run as our role"


class ForeignKeyViolatedError(RefusedError):
    """Loaded rows violate a foreign key of their table."""


class KeyUntrustedError(RefusedError):
    """To verify a foreign key, our role would have to run code of a role that owns none of the filled tables."""


class Orphan(NamedTuple):
    """A row whose referenced row is missing: the foreign key, both tables, the key's columns, and their values."""

    name: str
    table: str
    referenced: str
    columns: str
    values: str


class ReferringTables(NamedTuple):
    """Tables that reference others, as listed in TRUNCATE, and those of them that may have rows."""

    to_truncate: list[str]
    filled: list[str]


class _Key(NamedTuple):
    """A foreign key: its name, both tables, its columns, and the query for a violation.

    `is_into`: whether it references a filled table. `is_trusted`: whether both tables' owners are trusted.
    """

    name: str
    table: str
    referenced: str
    columns: str
    is_into: bool
    is_trusted: bool
    query: str


def find_unreadable(connection: psycopg.Connection[Any], oids: list[int]) -> list[str]:
    """Find the tables at either end of the filled tables' foreign keys that our role may not read (quoted names)."""
    return [name for (name,) in connection.execute(OTHERS_QUERY, (oids,))]


def find_untrusted(connection: psycopg.Connection[Any], oids: list[int]) -> list[str]:
    """Find foreign keys to or from tables whose owners own none of the filled tables; name the keys and these roles."""
    return [name for (name,) in connection.execute(UNTRUSTED_QUERY, (oids,))]


def find_code_of_others(connection: psycopg.Connection[Any], oids: list[int]) -> list[str]:
    """Find types and functions that the load would run and whose owners own no filled table; name the roles."""
    return [name for (name,) in connection.execute(CODE_QUERY, (oids,))]


def find_empty_referenced(connection: psycopg.Connection[Any], oids: list[int]) -> list[str]:
    """Find the foreign keys from these tables to other, empty tables: any row with a value in such a key violates it.

    Other tables are neither read nor reported if their owners own none of these tables.
    """
    with connection.transaction():
        # Someone may give the name to a different table, with any owner, at any time.
        refuse_views(connection)
        path, rows = read_search_path(connection), connection.execute(REFERENCED_QUERY, (oids,)).fetchall()
        with having_path(connection, path):
            return [f"{key} to {table}" for key, table, only in rows if _is_empty(connection, f"{only}{table}")]


def find_temporal(connection: psycopg.Connection[Any], oids: list[int]) -> list[str]:
    """Find the foreign keys to or from the filled tables that compare periods, which can't be verified."""
    return [name for (name,) in connection.execute(TEMPORAL_QUERY, (oids,))]


def verify_references(target: LoadTarget, watch: Watch) -> None:
    """Raise ForeignKeyViolatedError if a row in the filled tables, or a row that references them, is an orphan."""
    node = target.node
    with raising_unreachable(node), connect(node) as connection, ending(watch, connection):
        oids = oids_of(connection, target.groups.values())
        # Limit lock waits, because anyone may lock the tables that are not filled.
        connection.execute(f"SET lock_timeout = '{LOCK_SECONDS_MAX}s'")
        if orphan := find_orphan(node.id, connection, oids):
            raise ForeignKeyViolatedError(
                f"node {node.id}: foreign key {orphan.name} of table {orphan.table} is violated: the row with"
                f" ({orphan.columns}) = ({orphan.values}) references a missing row of {orphan.referenced}",
                hint="restore the referenced tables along with this table, at the same increment; or load their rows"
                " first; or drop the constraint",
                details={"node": node.id, "constraint": orphan.name, "table": orphan.table, "key": orphan.values},
            )


def find_orphan(
    node: str, connection: psycopg.Connection[Any], oids: list[int], *, only_into: bool = False
) -> Orphan | None:
    """Find a row that references a missing row of these tables.

    Unless `only_into`, also find a row of these tables whose referenced row is missing.

    Raises KeyUntrustedError before reading any table, because a key's types and operators may belong to the tables'
    owners.
    """
    found = [_Key(*row) for row in connection.execute(ORPHAN_QUERIES, (oids,)).fetchall()]
    keys = [key for key in found if key.is_into or not only_into]
    if untrusted := [key for key in keys if not key.is_trusted]:
        key = untrusted[0]
        raise KeyUntrustedError(
            f"node {node}: foreign key {key.name} of table {key.table} can't be verified: {UNTRUSTED}",
            hint=f"drop it: ALTER TABLE {key.table} DROP CONSTRAINT {key.name}; then repeat the command",
            details={"constraint": key.name, "table": key.table},
        )
    path = read_search_path(connection)
    with having_path(connection, path):
        for key in keys:
            if row := connection.execute(key.query.encode()).fetchone():
                return Orphan(key.name, key.table, key.referenced, key.columns, row[0])
    return None


def find_connected(connection: psycopg.Connection[Any], oids: list[int]) -> list[int]:
    """Return the oids of these tables, of the tables connected to them by foreign keys, and of all their partitions."""
    return [oid for (oid,) in connection.execute(CONNECTED_QUERY, (oids,))]


def find_referring(connection: psycopg.Connection[Any], oids: list[int]) -> ReferringTables:
    """Find the other tables whose foreign keys reference these, directly or through other tables.

    Tables whose owners own none of these tables, or that our role may not read, are assumed to have rows.
    """
    tables = ReferringTables([], [])
    with connection.transaction():
        # Someone may give the name to a different table, with any owner, at any time.
        refuse_views(connection)
        path, rows = read_search_path(connection), connection.execute(REFERRING_QUERY, (oids, oids, oids)).fetchall()
        with having_path(connection, path):
            for name, is_partitioned, is_below, may_read in rows:
                if not is_below:
                    tables.to_truncate.append(name if is_partitioned else f"ONLY {name}")
                # Skip partitioned tables, whose rows are in their partitions.
                if not is_partitioned and not (may_read and _is_empty(connection, f"ONLY {name}")):
                    tables.filled.append(name)
    return tables


def _is_empty(connection: psycopg.Connection[Any], table: str) -> bool:
    return connection.execute(f"SELECT EXISTS (SELECT FROM {table})".encode()).fetchone() == (False,)
