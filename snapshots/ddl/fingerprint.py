"""The fingerprint of a database's catalogs: as long as it stays, so does everything that a dump says but rows.

One query over every catalog that pg_dump reads. Of a row counts its key and its xmin, the transaction that wrote it: no
other version of a row has the same, so that a change which is undone again is seen too, for every object that is there
both times. What comes and goes between two readings leaves no trace, and matters to neither. What a server writes in
place (VACUUM, ANALYZE, autovacuum, freezing) keeps xmin.

Temporary objects are left out: a busy application makes them all the time. Of pg_class the contents count, not xmin:
TRUNCATE, REINDEX, CLUSTER and VACUUM FULL give a relation another file, and change nothing that a dump says. A sequence
keeps its xmin: with another file it was begun anew, and its value is not what it was at the cut. Cutline's own
publications are left out too; fleet/tables/table_state.py follows them table by table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

OWN_PUBLICATION = r"cutline_[0-9a-f]{8}(_append_only)?"

HIDDEN = r"""
WITH own AS MATERIALIZED (SELECT oid FROM pg_publication WHERE pubname ~ '^(OWN_PUBLICATION)$'),
-- Not to be dumped: temporary ones, and what holds long values.
schemas AS MATERIALIZED (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(toast|temp)'),
types AS MATERIALIZED (SELECT oid FROM pg_type WHERE typnamespace IN (SELECT oid FROM schemas)),
relations AS MATERIALIZED (
    SELECT oid FROM pg_class
     WHERE relpersistence = 't' OR relkind = 't' OR relnamespace IN (SELECT oid FROM schemas))
""".replace("OWN_PUBLICATION", OWN_PUBLICATION)
# The flags that tell whether a relation has indexes, rules or triggers are not exact, and VACUUM corrects them.
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
    """A catalog whose rows count by key and xmin: `key` has its columns, `but` a condition on the rows left out."""

    name: str
    key: str = "oid"
    but: str = ""


def _of(column: str, hidden: str) -> str:
    return f"EXISTS (SELECT FROM {hidden} h WHERE h.oid = {column})"


CATALOGS = (
    CatalogRows("pg_aggregate", "aggfnoid::oid"),
    CatalogRows("pg_am"),
    CatalogRows("pg_amop"),
    CatalogRows("pg_amproc"),
    CatalogRows("pg_attrdef", but=_of("adrelid", "relations")),
    CatalogRows("pg_attribute", "attrelid, attnum", f"attnum < 0 OR {_of('attrelid', 'relations')}"),
    CatalogRows("pg_cast"),
    CatalogRows("pg_collation", but=_of("collnamespace", "schemas")),
    CatalogRows("pg_constraint", but=_of("connamespace", "schemas")),
    CatalogRows("pg_conversion", but=_of("connamespace", "schemas")),
    CatalogRows("pg_default_acl"),
    CatalogRows(
        "pg_description",
        "classoid, objoid, objsubid",
        f"(classoid = 'pg_class'::regclass AND {_of('objoid', 'relations')})"
        f" OR (classoid = 'pg_publication'::regclass AND {_of('objoid', 'own')})",
    ),
    CatalogRows("pg_enum", but=_of("enumtypid", "types")),
    CatalogRows("pg_event_trigger"),
    CatalogRows("pg_extension"),
    CatalogRows("pg_foreign_data_wrapper"),
    CatalogRows("pg_foreign_server"),
    CatalogRows("pg_foreign_table", "ftrelid"),
    CatalogRows("pg_index", "indexrelid", _of("indrelid", "relations")),
    CatalogRows("pg_inherits", "inhrelid, inhseqno", _of("inhrelid", "relations")),
    CatalogRows("pg_init_privs", "classoid, objoid, objsubid"),
    CatalogRows("pg_language"),
    CatalogRows("pg_namespace", but=_of("pg_namespace.oid", "schemas")),
    CatalogRows("pg_opclass", but=_of("opcnamespace", "schemas")),
    CatalogRows("pg_operator", but=_of("oprnamespace", "schemas")),
    CatalogRows("pg_opfamily", but=_of("opfnamespace", "schemas")),
    CatalogRows("pg_partitioned_table", "partrelid", _of("partrelid", "relations")),
    CatalogRows("pg_policy", but=_of("polrelid", "relations")),
    CatalogRows("pg_proc", but=_of("pronamespace", "schemas")),
    CatalogRows("pg_publication", but=_of("pg_publication.oid", "own")),
    CatalogRows("pg_publication_namespace"),
    CatalogRows("pg_publication_rel", but=_of("prpubid", "own")),
    CatalogRows("pg_range", "rngtypid", _of("rngtypid", "types")),
    CatalogRows("pg_rewrite", but=_of("ev_class", "relations")),
    CatalogRows("pg_seclabel", "classoid, objoid, objsubid, provider"),
    CatalogRows("pg_sequence", "seqrelid", _of("seqrelid", "relations")),
    CatalogRows("pg_statistic_ext", but=_of("stxrelid", "relations")),
    CatalogRows("pg_tablespace"),
    CatalogRows("pg_transform"),
    CatalogRows("pg_trigger", but=_of("tgrelid", "relations")),
    CatalogRows("pg_ts_config", but=_of("cfgnamespace", "schemas")),
    CatalogRows("pg_ts_config_map", "mapcfg, maptokentype, mapseqno"),
    CatalogRows("pg_ts_dict", but=_of("dictnamespace", "schemas")),
    CatalogRows("pg_ts_parser", but=_of("prsnamespace", "schemas")),
    CatalogRows("pg_ts_template", but=_of("tmplnamespace", "schemas")),
    CatalogRows("pg_type", but=_of("pg_type.oid", "types")),
    CatalogRows("pg_user_mapping"),
)


def _part(catalog: CatalogRows) -> str:
    # Exact sums, not bits laid over each other: what many rows have in common would take itself away.
    rows = f"SELECT '{catalog.name}', count(*), sum(hash_record_extended(ROW({catalog.key}, xmin), 0))"
    return f"{rows} FROM {catalog.name}" + (f" WHERE NOT ({catalog.but})" if catalog.but else "")


QUERY = f"""{HIDDEN}
SELECT md5(string_agg(format('%s %s %s', catalog, rows, hashes), ',' ORDER BY catalog))
  FROM ({PARTS}UNION ALL
{" UNION ALL ".join(_part(catalog) for catalog in CATALOGS)}) AS part (catalog, rows, hashes)
"""


def read_fingerprint(connection: psycopg.Connection[Any]) -> str:
    """The fingerprint of the connection's database, 32 hexadecimal digits; all catalogs at one moment."""
    (found,) = connection.execute(QUERY.encode()).fetchone() or ("",)
    return str(found)
