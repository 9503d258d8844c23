"""The fingerprint of a database's catalogs: while it is unchanged, a dump of everything but rows is unchanged.

One query reads every catalog that pg_dump reads. It hashes the key and the xmin of each row. No two versions of a row
have the same xmin, so a change that is reverted is detected too, for every object that exists at both readings. An
object that is created and dropped between two readings leaves no trace, and matters to neither. In-place updates of the
server (VACUUM, ANALYZE, autovacuum, freezing) keep xmin.

Temporary objects are left out: a busy application creates them all the time. Of pg_class the columns count, not xmin:
TRUNCATE, REINDEX, CLUSTER and VACUUM FULL give a relation another file, and change nothing in a dump. The xmin of a
sequence counts: with another file it was restarted, and its value is not that of the cut. Cutline's own publications
are left out too; fleet/tables/table_state.py compares them table by table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

OWN_PUBLICATION = r"cutline_[0-9a-f]{8}(_append_only)?"

HIDDEN = r"""
WITH own AS MATERIALIZED (SELECT oid FROM pg_publication WHERE pubname ~ '^(OWN_PUBLICATION)$'),
-- Schemas that are not dumped: those of temporary objects and of TOAST tables.
schemas AS MATERIALIZED (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(toast|temp)'),
types AS MATERIALIZED (SELECT oid FROM pg_type WHERE typnamespace IN (SELECT oid FROM schemas)),
relations AS MATERIALIZED (
    SELECT oid FROM pg_class
     WHERE relpersistence = 't' OR relkind = 't' OR relnamespace IN (SELECT oid FROM schemas))
""".replace("OWN_PUBLICATION", OWN_PUBLICATION)
# relhasindex, relhasrules and relhastriggers are left out: they are not exact, and VACUUM corrects them.
PARTS = """
SELECT 'pg_class', count(*), sum(hash_record_extended(ROW(c.oid, relname, relnamespace, relowner, relkind,
             relpersistence, relam, reltablespace, reloftype, relnatts, relreplident, relrowsecurity,
             relforcerowsecurity, relispartition, relispopulated, reloptions, relacl, relpartbound::text,
             CASE WHEN relkind = 'S' THEN c.xmin END), 0))
  FROM pg_class c WHERE NOT EXISTS (SELECT FROM relations h WHERE h.oid = c.oid)
UNION ALL
SELECT 'pg_class of toast', count(*), sum(hash_record_extended(ROW(c.oid, t.reloptions), 0))
  FROM pg_class t JOIN pg_class c ON c.reltoastrelid = t.oid
 WHERE t.reloptions IS NOT NULL AND c.relpersistence <> 't'
UNION ALL
SELECT 'pg_depend', count(*), sum(hash_record_extended(ROW(classid, objid, objsubid, refclassid, refobjid, xmin), 0))
  FROM pg_depend WHERE deptype IN ('e', 'x')
UNION ALL
SELECT 'roles', count(*), sum(hash_record_extended(ROW(r.oid, r.rolname), 0))
  FROM pg_roles r
 WHERE r.oid = 10 OR r.oid IN (
       SELECT refobjid FROM pg_shdepend
        WHERE refclassid = 'pg_authid'::regclass
          AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


@dataclass(frozen=True, slots=True)
class CatalogRows:
    """A catalog whose rows count by key and xmin: `key` lists columns, `excluded` is a condition on rows left out."""

    name: str
    key: str = "oid"
    excluded: str = ""


def _is_in(column: str, hidden: str) -> str:
    return f"EXISTS (SELECT FROM {hidden} h WHERE h.oid = {column})"


CATALOGS = (
    CatalogRows("pg_aggregate", "aggfnoid::oid"),
    CatalogRows("pg_am"),
    CatalogRows("pg_amop"),
    CatalogRows("pg_amproc"),
    CatalogRows("pg_attrdef", excluded=_is_in("adrelid", "relations")),
    CatalogRows("pg_attribute", "attrelid, attnum", f"attnum < 0 OR {_is_in('attrelid', 'relations')}"),
    CatalogRows("pg_cast"),
    CatalogRows("pg_collation", excluded=_is_in("collnamespace", "schemas")),
    CatalogRows("pg_constraint", excluded=_is_in("connamespace", "schemas")),
    CatalogRows("pg_conversion", excluded=_is_in("connamespace", "schemas")),
    CatalogRows("pg_default_acl"),
    CatalogRows(
        "pg_description",
        "classoid, objoid, objsubid",
        f"(classoid = 'pg_class'::regclass AND {_is_in('objoid', 'relations')})"
        f" OR (classoid = 'pg_publication'::regclass AND {_is_in('objoid', 'own')})",
    ),
    CatalogRows("pg_enum", excluded=_is_in("enumtypid", "types")),
    CatalogRows("pg_event_trigger"),
    CatalogRows("pg_extension"),
    CatalogRows("pg_foreign_data_wrapper"),
    CatalogRows("pg_foreign_server"),
    CatalogRows("pg_foreign_table", "ftrelid"),
    CatalogRows("pg_index", "indexrelid", _is_in("indrelid", "relations")),
    CatalogRows("pg_inherits", "inhrelid, inhseqno", _is_in("inhrelid", "relations")),
    CatalogRows("pg_init_privs", "classoid, objoid, objsubid"),
    CatalogRows("pg_language"),
    CatalogRows("pg_namespace", excluded=_is_in("pg_namespace.oid", "schemas")),
    CatalogRows("pg_opclass", excluded=_is_in("opcnamespace", "schemas")),
    CatalogRows("pg_operator", excluded=_is_in("oprnamespace", "schemas")),
    CatalogRows("pg_opfamily", excluded=_is_in("opfnamespace", "schemas")),
    CatalogRows("pg_partitioned_table", "partrelid", _is_in("partrelid", "relations")),
    CatalogRows("pg_policy", excluded=_is_in("polrelid", "relations")),
    CatalogRows("pg_proc", excluded=_is_in("pronamespace", "schemas")),
    CatalogRows("pg_publication", excluded=_is_in("pg_publication.oid", "own")),
    CatalogRows("pg_publication_namespace"),
    CatalogRows("pg_publication_rel", excluded=_is_in("prpubid", "own")),
    CatalogRows("pg_range", "rngtypid", _is_in("rngtypid", "types")),
    CatalogRows("pg_rewrite", excluded=_is_in("ev_class", "relations")),
    CatalogRows("pg_seclabel", "classoid, objoid, objsubid, provider"),
    CatalogRows("pg_sequence", "seqrelid", _is_in("seqrelid", "relations")),
    CatalogRows("pg_statistic_ext", excluded=_is_in("stxrelid", "relations")),
    CatalogRows("pg_tablespace"),
    CatalogRows("pg_transform"),
    CatalogRows("pg_trigger", excluded=_is_in("tgrelid", "relations")),
    CatalogRows("pg_ts_config", excluded=_is_in("cfgnamespace", "schemas")),
    CatalogRows("pg_ts_config_map", "mapcfg, maptokentype, mapseqno"),
    CatalogRows("pg_ts_dict", excluded=_is_in("dictnamespace", "schemas")),
    CatalogRows("pg_ts_parser", excluded=_is_in("prsnamespace", "schemas")),
    CatalogRows("pg_ts_template", excluded=_is_in("tmplnamespace", "schemas")),
    CatalogRows("pg_type", excluded=_is_in("pg_type.oid", "types")),
)
# By default nobody may read this catalog, as it has passwords. pg_dump reads the view, which shows a role only the
# options that it may use: for a role that may not read the catalog the view's values count, all that it can dump.
USER_MAPPINGS = CatalogRows("pg_user_mapping")
VISIBLE_USER_MAPPINGS = """
SELECT 'pg_user_mapping', count(*), sum(hash_record_extended(ROW(umid, srvid, umuser, umoptions), 0))
  FROM pg_user_mappings
"""
READS_USER_MAPPINGS = "SELECT has_table_privilege('pg_user_mapping', 'SELECT')"

# What everybody may read by default.
PUBLIC_CATALOGS = (
    *(one.name for one in CATALOGS),
    "pg_class", "pg_database", "pg_depend", "pg_roles", "pg_shdepend", "pg_user_mappings",
)  # fmt: skip


def _part(catalog: CatalogRows) -> str:
    # Sums, which are exact. With XOR, a hash difference that many rows have in common would cancel out.
    rows = f"SELECT '{catalog.name}', count(*), sum(hash_record_extended(ROW({catalog.key}, xmin), 0))"
    return f"{rows} FROM {catalog.name}" + (f" WHERE NOT ({catalog.excluded})" if catalog.excluded else "")


def _query(user_mappings: str) -> bytes:
    parts = " UNION ALL ".join([PARTS, *map(_part, CATALOGS), user_mappings])
    return f"""{HIDDEN}
SELECT md5(string_agg(format('%s %s %s', catalog, rows, hashes), ',' ORDER BY catalog))
  FROM ({parts}) AS part (catalog, rows, hashes)
""".encode()


QUERY, QUERY_OF_VISIBLE = _query(_part(USER_MAPPINGS)), _query(VISIBLE_USER_MAPPINGS)


def read_fingerprint(connection: psycopg.Connection[Any]) -> str:
    """The fingerprint of the connection's database, 32 hexadecimal digits; one statement reads all catalogs."""
    reads_all = connection.execute(READS_USER_MAPPINGS).fetchone() == (True,)
    (fingerprint,) = connection.execute(QUERY if reads_all else QUERY_OF_VISIBLE).fetchone() or ("",)
    return str(fingerprint)
