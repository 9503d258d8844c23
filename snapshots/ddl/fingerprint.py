"""The fingerprint of a database's catalogs: it shows whether DDL ran between two readings.

It consists of two hashes of the key and the xmin of catalog rows, over all catalogs that pg_dump reads. No two versions
of a row have the same xmin, so even a reverted change is detected, for every object that exists at both readings. An
object that is created and dropped between two readings leaves no trace, but neither reading depends on it. In-place
updates by the server (VACUUM, ANALYZE, autovacuum, freezing) keep xmin.

- The *hash of the objects* covers what a dump shows, and decides whether two fingerprints are the same. Temporary
  objects are omitted, because busy applications create them all the time, and so are TOAST tables, because VACUUM FULL
  and CLUSTER create new ones. Cutline's own publications are omitted too: nodes/table_state.py compares them table by
  table.
- The *hash of all rows* covers these too. While it is the same, so is everything else. Its query has no joins, so it
  takes half the time, and the server can divide it among processes.

Rows that were inserted and deleted again leave no trace in the hash of all rows either. So it shows that nothing has
changed since a reading, but not that everything else that was recorded since then still holds.

For pg_class, the columns are hashed instead of xmin: TRUNCATE, REINDEX, CLUSTER and VACUUM FULL give a relation a new
file without changing its dump. The xmin of sequences is hashed, because a sequence with a new file was restarted, so
its value is not its value at the cut. The properties of the database itself (owner, comment, limits, privileges,
settings) are hashed by value, too: the DDL has them, and an increment stores the properties that its newest DDL has.
The setting that makes a database read-only is omitted, because a terminal snapshot changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.nodes.encodings import digest_of
from cutline.nodes.publications import OWN_PUBLICATION

HIDDEN = r"""
WITH own_database AS MATERIALIZED (SELECT oid FROM pg_database WHERE datname = current_database()),
own AS MATERIALIZED (SELECT oid FROM pg_publication WHERE pubname ~ '^(OWN_PUBLICATION)$'),
-- Schemas that are not dumped: those of temporary objects and of TOAST tables.
schemas AS MATERIALIZED (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(toast|temp)'),
types AS MATERIALIZED (SELECT oid FROM pg_type WHERE typnamespace IN (SELECT oid FROM schemas)),
relations AS MATERIALIZED (
    SELECT oid FROM pg_class
     WHERE relpersistence = 't' OR relkind = 't' OR relnamespace IN (SELECT oid FROM schemas))
""".replace("OWN_PUBLICATION", OWN_PUBLICATION)
# relhasindex, relhasrules and relhastriggers are omitted: they are not exact, and VACUUM corrects them.
RELATIONS = """
SELECT 'pg_class', count(*), sum(hash_record_extended(ROW(c.oid, relname, relnamespace, relowner, relkind,
             relpersistence, relam, reltablespace, reloftype, relnatts, relreplident, relrowsecurity,
             relforcerowsecurity, relispartition, relispopulated, reloptions, relacl, relpartbound::text,
             CASE WHEN relkind = 'S' THEN c.xmin END), 0))
  FROM pg_class c WHERE relpersistence <> 't' AND relkind <> 't'{condition}
"""
# TOAST tables have options of their own.
TOAST_OPTIONS = """
SELECT 'pg_class of toast', count(*), sum(hash_record_extended(ROW({relation}, t.reloptions), 0))
  FROM pg_class t{join} WHERE t.relkind = 't' AND t.reloptions IS NOT NULL AND t.relpersistence <> 't'
"""
# What both hashes cover.
COMMON = """
SELECT 'pg_database', count(*), sum(hash_record_extended(ROW(d.oid, datname, datdba, datconnlimit, datistemplate,
             datacl, dattablespace, shobj_description(d.oid, 'pg_database')), 0))
  FROM pg_database d WHERE datname = current_database()
UNION ALL
SELECT 'pg_db_role_setting', count(*), sum(hash_record_extended(ROW(setrole, setting), 0))
  FROM pg_db_role_setting, unnest(setconfig) AS of (setting)
 WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND NOT setting ^@ 'default_transaction_read_only='
UNION ALL
SELECT 'pg_depend', count(*), sum(hash_record_extended(ROW(classid, objid, objsubid, refclassid, refobjid, xmin), 0))
  FROM pg_depend WHERE deptype IN ('e', 'x')
UNION ALL
SELECT 'roles', count(*), sum(hash_record_extended(ROW(r.oid, r.rolname), 0))
  FROM pg_roles r
 WHERE r.oid = 10 OR r.oid IN (
       SELECT refobjid FROM pg_shdepend, own_database AS d
        WHERE refclassid = 'pg_authid'::regclass
          AND (dbid = d.oid OR (dbid = 0 AND classid = 'pg_database'::regclass AND objid = d.oid))
       UNION ALL SELECT setrole FROM pg_db_role_setting JOIN own_database AS d ON setdatabase = d.oid)
"""


@dataclass(frozen=True, slots=True)
class CatalogRows:
    """A catalog in the fingerprint: `key` lists its key columns, `condition` chooses its rows; "" are all rows.

    `hidden` is the condition that additionally applies in the hash of the objects.
    """

    name: str
    key: str = "oid"
    hidden: str = ""
    condition: str = ""


def _not_in(column: str, hidden: str, more: str = "") -> str:
    """Return the condition that an object is not `hidden`.

    It must be one of the conditions that WHERE joins by AND: within OR or NOT, the server would search all hidden
    objects for each row, once their hash table exceeds work_mem.
    """
    return f"NOT EXISTS (SELECT FROM {hidden} h WHERE h.oid = {column}{more})"


_AND_RELATION, _AND_PUBLICATION = (
    f" AND classoid = '{catalog}'::regclass" for catalog in ("pg_class", "pg_publication")
)
CATALOGS = (
    CatalogRows("pg_aggregate", "aggfnoid::oid"),
    CatalogRows("pg_am"),
    CatalogRows("pg_amop"),
    CatalogRows("pg_amproc"),
    CatalogRows("pg_attrdef", hidden=_not_in("adrelid", "relations")),
    CatalogRows("pg_attribute", "attrelid, attnum", _not_in("attrelid", "relations"), "attnum >= 0"),
    CatalogRows("pg_cast"),
    CatalogRows("pg_collation", hidden=_not_in("collnamespace", "schemas")),
    CatalogRows("pg_constraint", hidden=_not_in("connamespace", "schemas")),
    CatalogRows("pg_conversion", hidden=_not_in("connamespace", "schemas")),
    CatalogRows("pg_default_acl"),
    CatalogRows(
        "pg_description",
        "classoid, objoid, objsubid",
        f"{_not_in('objoid', 'relations', _AND_RELATION)} AND {_not_in('objoid', 'own', _AND_PUBLICATION)}",
    ),
    CatalogRows("pg_enum", hidden=_not_in("enumtypid", "types")),
    CatalogRows("pg_event_trigger"),
    CatalogRows("pg_extension"),
    CatalogRows("pg_foreign_data_wrapper"),
    CatalogRows("pg_foreign_server"),
    CatalogRows("pg_foreign_table", "ftrelid"),
    CatalogRows("pg_index", "indexrelid", _not_in("indrelid", "relations")),
    CatalogRows("pg_inherits", "inhrelid, inhseqno", _not_in("inhrelid", "relations")),
    CatalogRows("pg_init_privs", "classoid, objoid, objsubid"),
    CatalogRows("pg_language"),
    CatalogRows("pg_namespace", hidden=_not_in("pg_namespace.oid", "schemas")),
    CatalogRows("pg_opclass", hidden=_not_in("opcnamespace", "schemas")),
    CatalogRows("pg_operator", hidden=_not_in("oprnamespace", "schemas")),
    CatalogRows("pg_opfamily", hidden=_not_in("opfnamespace", "schemas")),
    CatalogRows("pg_partitioned_table", "partrelid", _not_in("partrelid", "relations")),
    CatalogRows("pg_policy", hidden=_not_in("polrelid", "relations")),
    CatalogRows("pg_proc", hidden=_not_in("pronamespace", "schemas")),
    CatalogRows("pg_publication", hidden=_not_in("pg_publication.oid", "own")),
    CatalogRows("pg_publication_namespace"),
    CatalogRows("pg_publication_rel", hidden=_not_in("prpubid", "own")),
    CatalogRows("pg_range", "rngtypid", _not_in("rngtypid", "types")),
    CatalogRows("pg_rewrite", hidden=_not_in("ev_class", "relations")),
    CatalogRows("pg_seclabel", "classoid, objoid, objsubid, provider"),
    CatalogRows("pg_sequence", "seqrelid", _not_in("seqrelid", "relations")),
    CatalogRows("pg_statistic_ext", hidden=_not_in("stxrelid", "relations")),
    CatalogRows("pg_tablespace"),
    CatalogRows("pg_transform"),
    CatalogRows("pg_trigger", hidden=_not_in("tgrelid", "relations")),
    CatalogRows("pg_ts_config", hidden=_not_in("cfgnamespace", "schemas")),
    CatalogRows("pg_ts_config_map", "mapcfg, maptokentype, mapseqno"),
    CatalogRows("pg_ts_dict", hidden=_not_in("dictnamespace", "schemas")),
    CatalogRows("pg_ts_parser", hidden=_not_in("prsnamespace", "schemas")),
    CatalogRows("pg_ts_template", hidden=_not_in("tmplnamespace", "schemas")),
    CatalogRows("pg_type", hidden=_not_in("pg_type.oid", "types")),
)
# By default, only superusers may read this catalog, because it contains passwords. pg_dump reads the view, which shows
# a role only the options that it may use. If our role may not read the catalog, hash the view, which is all that it can
# dump.
USER_MAPPINGS = CatalogRows("pg_user_mapping")
VISIBLE_USER_MAPPINGS = """
SELECT 'pg_user_mapping', count(*), sum(hash_record_extended(ROW(umid, srvid, umuser, umoptions), 0))
  FROM pg_user_mappings
"""
HASH_DIGITS = 32
MOMENT_QUERY = """
SELECT concat_ws(' ', pg_current_snapshot(), pid, backend_start) FROM pg_stat_get_activity(pg_backend_pid())
"""
READS_USER_MAPPINGS = "SELECT has_table_privilege('pg_user_mapping', 'SELECT')"

# The catalogs that everybody may read by default.
PUBLIC_CATALOGS = (
    *(catalog.name for catalog in CATALOGS),
    "pg_class",
    "pg_database",
    "pg_depend",
    "pg_roles",
    "pg_shdepend",
    "pg_user_mappings",
)


def _part(catalog: CatalogRows, *, hides: bool) -> str:
    # Sums are exact. With XOR, a difference that many hashes have in common would cancel out.
    rows = f"SELECT '{catalog.name}', count(*), sum(hash_record_extended(ROW({catalog.key}, xmin), 0))"
    where = " AND ".join(filter(None, [catalog.condition, catalog.hidden if hides else ""]))
    return f"{rows} FROM {catalog.name}" + (f" WHERE {where}" if where else "")


def _query(relations: str, toast_options: str, mappings: str, *, hides: bool) -> bytes:
    parts = [relations, toast_options, COMMON, *(_part(catalog, hides=hides) for catalog in CATALOGS), mappings]
    hashed = digest_of("string_agg(format('%s %s %s', catalog, rows, hashes), ',' ORDER BY catalog)")
    return f"""{HIDDEN}
SELECT left({hashed}, {HASH_DIGITS})
  FROM ({" UNION ALL ".join(parts)}) AS part (catalog, rows, hashes)
""".encode()


# The parts of each hash on relations and on the options of TOAST tables.
_OBJECTS = (
    RELATIONS.format(condition=" AND NOT EXISTS (SELECT FROM schemas h WHERE h.oid = relnamespace)"),
    TOAST_OPTIONS.format(relation="c.oid", join=" JOIN pg_class c ON c.reltoastrelid = t.oid"),
)
_ROWS = (RELATIONS.format(condition=""), TOAST_OPTIONS.format(relation="t.oid", join=""))
# The queries of the two hashes, by whether the role may read all user mappings.
_MAPPINGS = {True: _part(USER_MAPPINGS, hides=True), False: VISIBLE_USER_MAPPINGS}
OBJECTS_QUERIES, ROWS_QUERIES = (
    {reads_all: _query(*parts, mappings, hides=hides) for reads_all, mappings in _MAPPINGS.items()}
    for parts, hides in ((_OBJECTS, True), (_ROWS, False))
)


def read_fingerprint(connection: psycopg.Connection[Any]) -> str:
    """Return the fingerprint of the connection's database: 32 hexadecimal digits for the objects, and 32 for all rows.

    To keep it, read it in a transaction with a single snapshot.
    """
    return _read_hash(connection, OBJECTS_QUERIES) + _read_hash(connection, ROWS_QUERIES)


def read_rows(connection: psycopg.Connection[Any]) -> str:
    """Return the hash of all rows, the second half of the fingerprint."""
    return _read_hash(connection, ROWS_QUERIES)


def read_again(connection: psycopg.Connection[Any], was: str, rows: str = "") -> str:
    """Do the same as `read_fingerprint`, but read only the hash of all `rows`, if needed, if it is still what it `was`.

    Both hashes must be of the same moment.
    """
    rows = rows or read_rows(connection)
    return was if rows == was[HASH_DIGITS:] else _read_hash(connection, OBJECTS_QUERIES) + rows


def read_moment(connection: psycopg.Connection[Any]) -> str:
    """Return which transactions the connection's statements see: while that is the same, so are all rows of catalogs.

    It names the server's process as well. After a crash, the ids of transactions that were lost may be used again, but
    no process has survived it.
    """
    (moment,) = connection.execute(MOMENT_QUERY).fetchone() or ("",)
    return str(moment)


def are_same_objects(one: str, other: str) -> bool:
    """Whether two fingerprints are those of the same objects, which pg_dump dumps in the same way."""
    return one[:HASH_DIGITS] == other[:HASH_DIGITS]


def _read_hash(connection: psycopg.Connection[Any], queries: Mapping[bool, bytes]) -> str:
    reads_all = connection.execute(READS_USER_MAPPINGS).fetchone() == (True,)
    (found,) = connection.execute(queries[reads_all]).fetchone() or ("",)
    return str(found)
