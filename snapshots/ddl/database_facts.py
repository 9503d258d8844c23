"""Read the facts about a shard's database for the commit: settings, search_path, fingerprint.

COPY calls functions in CHECK constraints, domains and generated columns, and some of these functions name tables and
other functions without a schema. Rows that need such a function could not be loaded with the search_path of our
sessions, which contains only pg_catalog. Therefore the database's setting of search_path (ALTER DATABASE … SET) is
stored with its DDL.

The fingerprint is a hash, computed by a single query, of the key and the xmin of each row in all catalogs that pg_dump
reads. No two versions of a row have the same xmin, so even a reverted change is detected, for every object that exists
at both readings. An object that is created and dropped between two readings leaves no trace, but neither reading
depends on it. In-place updates by the server (VACUUM, ANALYZE, autovacuum, freezing) keep xmin.

Temporary objects are omitted, because busy applications create them all the time. For pg_class, the columns are hashed
instead of xmin: TRUNCATE, REINDEX, CLUSTER and VACUUM FULL give a relation a new file without changing its dump. The
xmin of sequences is hashed, because a sequence with a new file was restarted, so its value is not its value at the cut.
The properties of the database itself (owner, comment, limits, privileges, settings) are hashed by value, too: the DDL
has them, and an increment stores the properties that its newest DDL has. The setting that makes a database read-only is
omitted, because a terminal snapshot changes it.
Cutline's own publications are omitted too: nodes/table_state.py compares them table by table.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from cutline.fleet.config import Node
from cutline.fleet.table_names import table_name
from cutline.nodes.encodings import fetch_texts, readable
from cutline.nodes.groups import MEASURED_RELATIONS_MAX
from cutline.nodes.read_only import FreezeRecordError, is_on, read_record
from cutline.snapshots.records.commit import (
    DatabaseFacts,
    DatabasePrivilege,
    DatabaseProperties,
    DatabaseSetting,
    SecurityLabel,
    UsedCollation,
)

SEARCH_PATH = "search_path"
ELEMENT = re.compile(r'\s*("(?:[^"]|"")*"|[^,]*)\s*(?:,|\Z)')
# In UTF-8, PostgreSQL folds only these letters in identifiers (scansup.c).
FOLDED = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
# PostgreSQL's default search_path.
DEFAULT = '"$user", public'
PATH_QUERY = """
SELECT substr(setting, length('search_path=') + 1)
  FROM pg_db_role_setting s, unnest(s.setconfig) AS of (setting)
 WHERE s.setrole = 0 AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND setting ^@ 'search_path='
"""


def list_elements(value: str, *, folds: bool = True) -> list[str]:
    """Parse the value of a list setting, as in pg_db_role_setting, into names.

    With `folds`, convert A to Z in unquoted names to lowercase, as in identifiers but not in file names.
    """
    texts = (match[1].strip() for match in ELEMENT.finditer(value))
    return [
        text[1:-1].replace('""', '"') if text.startswith('"') else text.translate(FOLDED) if folds else text
        for text in texts
        if text
    ]


def read_search_path(connection: psycopg.Connection[Any]) -> str | None:
    """Return the search_path that is set for the database, or None if it is not set."""
    (path,) = connection.execute(PATH_QUERY).fetchone() or (None,)
    return path


def search_path_of(path: str | None) -> str:
    """Return the search_path for loading rows of a database that sets `path`.

    pg_catalog comes first, so nothing hides its names.
    """
    return f"pg_catalog, {DEFAULT if path is None else path}"


@contextmanager
def having_path(connection: psycopg.Connection[Any], path: str | None) -> Iterator[None]:
    """Set the session's search_path for the block: pg_catalog, followed by the search_path of its database.

    For any query, the planner calls functions used in a table's indexes, and these may call others without a schema.
    The block's own queries use names without a schema only if pg_catalog contains them with exactly the types used.
    """
    connection.execute(
        "SELECT pg_catalog.set_config('search_path', pg_catalog.convert_from(%s, 'UTF8'), false)",
        (search_path_of(path).encode(),),
    )
    try:
        yield
    finally:
        # A failed transaction reverts the setting.
        if connection.info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
            # Don't use RESET: behind a pooler, the session started with a different search_path.
            connection.execute("SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)")


OWN_PUBLICATION = r"cutline_[0-9a-f]{8}(_append_only)?"

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
PARTS = """
SELECT 'pg_class', count(*), sum(hash_record_extended(ROW(c.oid, relname, relnamespace, relowner, relkind,
             relpersistence, relam, reltablespace, reloftype, relnatts, relreplident, relrowsecurity,
             relforcerowsecurity, relispartition, relispopulated, reloptions, relacl, relpartbound::text,
             CASE WHEN relkind = 'S' THEN c.xmin END), 0))
  FROM pg_class c
 WHERE relpersistence <> 't' AND relkind <> 't' AND NOT EXISTS (SELECT FROM schemas h WHERE h.oid = relnamespace)
UNION ALL
SELECT 'pg_class of toast', count(*), sum(hash_record_extended(ROW(c.oid, t.reloptions), 0))
  FROM pg_class t JOIN pg_class c ON c.reltoastrelid = t.oid
 WHERE t.reloptions IS NOT NULL AND c.relpersistence <> 't'
UNION ALL
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
    """A catalog in the fingerprint: `key` lists its key columns, `condition` chooses its rows; "" are all rows."""

    name: str
    key: str = "oid"
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
    CatalogRows("pg_attrdef", condition=_not_in("adrelid", "relations")),
    CatalogRows("pg_attribute", "attrelid, attnum", f"attnum >= 0 AND {_not_in('attrelid', 'relations')}"),
    CatalogRows("pg_cast"),
    CatalogRows("pg_collation", condition=_not_in("collnamespace", "schemas")),
    CatalogRows("pg_constraint", condition=_not_in("connamespace", "schemas")),
    CatalogRows("pg_conversion", condition=_not_in("connamespace", "schemas")),
    CatalogRows("pg_default_acl"),
    CatalogRows(
        "pg_description",
        "classoid, objoid, objsubid",
        f"{_not_in('objoid', 'relations', _AND_RELATION)} AND {_not_in('objoid', 'own', _AND_PUBLICATION)}",
    ),
    CatalogRows("pg_enum", condition=_not_in("enumtypid", "types")),
    CatalogRows("pg_event_trigger"),
    CatalogRows("pg_extension"),
    CatalogRows("pg_foreign_data_wrapper"),
    CatalogRows("pg_foreign_server"),
    CatalogRows("pg_foreign_table", "ftrelid"),
    CatalogRows("pg_index", "indexrelid", _not_in("indrelid", "relations")),
    CatalogRows("pg_inherits", "inhrelid, inhseqno", _not_in("inhrelid", "relations")),
    CatalogRows("pg_init_privs", "classoid, objoid, objsubid"),
    CatalogRows("pg_language"),
    CatalogRows("pg_namespace", condition=_not_in("pg_namespace.oid", "schemas")),
    CatalogRows("pg_opclass", condition=_not_in("opcnamespace", "schemas")),
    CatalogRows("pg_operator", condition=_not_in("oprnamespace", "schemas")),
    CatalogRows("pg_opfamily", condition=_not_in("opfnamespace", "schemas")),
    CatalogRows("pg_partitioned_table", "partrelid", _not_in("partrelid", "relations")),
    CatalogRows("pg_policy", condition=_not_in("polrelid", "relations")),
    CatalogRows("pg_proc", condition=_not_in("pronamespace", "schemas")),
    CatalogRows("pg_publication", condition=_not_in("pg_publication.oid", "own")),
    CatalogRows("pg_publication_namespace"),
    CatalogRows("pg_publication_rel", condition=_not_in("prpubid", "own")),
    CatalogRows("pg_range", "rngtypid", _not_in("rngtypid", "types")),
    CatalogRows("pg_rewrite", condition=_not_in("ev_class", "relations")),
    CatalogRows("pg_seclabel", "classoid, objoid, objsubid, provider"),
    CatalogRows("pg_sequence", "seqrelid", _not_in("seqrelid", "relations")),
    CatalogRows("pg_statistic_ext", condition=_not_in("stxrelid", "relations")),
    CatalogRows("pg_tablespace"),
    CatalogRows("pg_transform"),
    CatalogRows("pg_trigger", condition=_not_in("tgrelid", "relations")),
    CatalogRows("pg_ts_config", condition=_not_in("cfgnamespace", "schemas")),
    CatalogRows("pg_ts_config_map", "mapcfg, maptokentype, mapseqno"),
    CatalogRows("pg_ts_dict", condition=_not_in("dictnamespace", "schemas")),
    CatalogRows("pg_ts_parser", condition=_not_in("prsnamespace", "schemas")),
    CatalogRows("pg_ts_template", condition=_not_in("tmplnamespace", "schemas")),
    CatalogRows("pg_type", condition=_not_in("pg_type.oid", "types")),
)
# By default, only superusers may read this catalog, because it contains passwords. pg_dump reads the view, which shows
# a role only the options that it may use. If our role may not read the catalog, hash the view, which is all that it can
# dump.
USER_MAPPINGS = CatalogRows("pg_user_mapping")
VISIBLE_USER_MAPPINGS = """
SELECT 'pg_user_mapping', count(*), sum(hash_record_extended(ROW(umid, srvid, umuser, umoptions), 0))
  FROM pg_user_mappings
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


def _part(catalog: CatalogRows) -> str:
    # Sums are exact. With XOR, a difference that many hashes have in common would cancel out.
    rows = f"SELECT '{catalog.name}', count(*), sum(hash_record_extended(ROW({catalog.key}, xmin), 0))"
    return f"{rows} FROM {catalog.name}" + (f" WHERE {catalog.condition}" if catalog.condition else "")


def _query(user_mappings: str) -> bytes:
    parts = " UNION ALL ".join([PARTS, *map(_part, CATALOGS), user_mappings])
    return f"""{HIDDEN}
SELECT md5(string_agg(format('%s %s %s', catalog, rows, hashes), ',' ORDER BY catalog))
  FROM ({parts}) AS part (catalog, rows, hashes)
""".encode()


QUERY, QUERY_OF_VISIBLE = _query(_part(USER_MAPPINGS)), _query(VISIBLE_USER_MAPPINGS)


def read_fingerprint(connection: psycopg.Connection[Any]) -> str:
    """Return the fingerprint of the connection's database, 32 hexadecimal digits; one statement reads all catalogs."""
    reads_all = connection.execute(READS_USER_MAPPINGS).fetchone() == (True,)
    (fingerprint,) = connection.execute(QUERY if reads_all else QUERY_OF_VISIBLE).fetchone() or ("",)
    return str(fingerprint)


# pg_database_size asks the file system for each of a table's five or more files: with many tables, what VACUUM and
# ANALYZE last counted has to do for the size, which only a restore's estimates use.
SIZE_QUERY = f"""
SELECT CASE WHEN relations > {MEASURED_RELATIONS_MAX} THEN pages * current_setting('block_size')::bigint
            ELSE pg_database_size(current_database()) END
  FROM (SELECT count(*), sum(relpages::bigint)::bigint FROM pg_class) AS counted (relations, pages)
"""
EXTENSIONS_QUERY = f"SELECT {readable('extname')}, {readable('extversion')} FROM pg_extension ORDER BY 1"
# pg_depend records no dependencies on collations that every server has, such as "C". PostgreSQL 15 introduced the
# column for ICU locales, and 17 renamed it. pg_dump leaves out the collations of extensions and of sessions.
COLLATIONS_QUERY = f"""
SELECT {readable("n.nspname")}, {readable("c.collname")}, c.collprovider::text,
       ARRAY(SELECT DISTINCT one FROM unnest(ARRAY[c.collcollate, c.collctype,
             coalesce(to_jsonb(c) ->> 'colllocale', to_jsonb(c) ->> 'colliculocale')]) AS one
              WHERE one IS NOT NULL ORDER BY 1),
       n.nspname <> 'pg_catalog'
  FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
 WHERE n.nspname <> 'information_schema' AND n.nspname !~ '^pg_temp_'
   AND NOT EXISTS (SELECT FROM pg_depend d
                    WHERE d.classid = 'pg_collation'::regclass AND d.objid = c.oid AND d.deptype = 'e')
   AND (n.nspname <> 'pg_catalog'
        OR EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_collation'::regclass AND d.refobjid = c.oid))
 ORDER BY 1, 2
"""
# pg_dump writes the compression of columns, except for columns that belong to extensions.
LZ4_COLUMNS_QUERY = f"""
SELECT {readable("n.nspname")}, {readable("c.relname")}, {readable("a.attname")}
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attcompression = 'l' AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'm') AND c.relpersistence <> 't'
   AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
                      AND d.deptype = 'e')
 ORDER BY 1, 2, a.attnum
"""
DATABASE_QUERY = """
SELECT pg_get_userbyid(d.datdba), shobj_description(d.oid, 'pg_database'),
       CASE t.spcname WHEN 'pg_default' THEN '' ELSE t.spcname END, d.datconnlimit, d.datistemplate,
       d.datacl IS NOT NULL
  FROM pg_database d JOIN pg_tablespace t ON t.oid = d.dattablespace WHERE d.datname = current_database()
"""
PRIVILEGES_QUERY = """
SELECT pg_get_userbyid(a.grantor), CASE a.grantee WHEN 0 THEN '' ELSE pg_get_userbyid(a.grantee) END,
       a.privilege_type, a.is_grantable
  FROM pg_database d CROSS JOIN aclexplode(d.datacl) WITH ORDINALITY AS a (grantor, grantee, privilege_type,
       is_grantable, number)
 WHERE d.datname = current_database() ORDER BY a.number
"""
SETTINGS_QUERY = """
SELECT split_part(s.setting, '=', 1), substr(s.setting, strpos(s.setting, '=') + 1), coalesce(r.rolname, '')
  FROM pg_db_role_setting g JOIN pg_database d ON d.oid = g.setdatabase AND d.datname = current_database()
 CROSS JOIN unnest(g.setconfig) WITH ORDINALITY AS s (setting, number) LEFT JOIN pg_roles r ON r.oid = g.setrole
 ORDER BY g.setrole <> 0, 3, s.number
"""
LABELS_QUERY = """
SELECT l.provider, l.label FROM pg_shseclabel l
  JOIN pg_database d ON l.classoid = 'pg_database'::regclass AND l.objoid = d.oid AND d.datname = current_database()
 ORDER BY 1
"""
READ_ONLY = "default_transaction_read_only"


def read_facts(node: Node, connection: psycopg.Connection[Any]) -> DatabaseFacts:
    """Read the facts about the session's database."""
    (size,) = connection.execute(SIZE_QUERY).fetchone() or (0,)
    extensions = {str(name): str(version) for name, version in connection.execute(EXTENSIONS_QUERY)}
    collations = (
        UsedCollation(schema, name, provider, tuple(locales), is_own)
        for schema, name, provider, locales, is_own in connection.execute(COLLATIONS_QUERY)
    )
    rows = connection.execute(LZ4_COLUMNS_QUERY)
    lz4_columns = tuple(f"{table_name(schema, table)}.{column}" for schema, table, column in rows)
    properties = read_properties(node, connection)
    return DatabaseFacts(size, extensions, tuple(collations), lz4_columns, properties, connection.info.dbname)


def read_properties(node: Node, connection: psycopg.Connection[Any]) -> DatabaseProperties:
    """Read the properties of the session's database itself, without a terminal snapshot's read-only settings."""
    ((owner, comment, tablespace, limit, is_template, has_privileges),) = fetch_texts(connection, DATABASE_QUERY)
    privileges = tuple(DatabasePrivilege(*row) for row in fetch_texts(connection, PRIVILEGES_QUERY))
    settings = (DatabaseSetting(*row) for row in fetch_texts(connection, SETTINGS_QUERY))
    return DatabaseProperties(
        owner=owner,
        comment=comment,
        tablespace=tablespace,
        connection_limit=limit,
        is_template=is_template,
        privileges=privileges if has_privileges else None,
        settings=_without_freeze(node, connection, tuple(settings)),
        labels=tuple(SecurityLabel(*row) for row in fetch_texts(connection, LABELS_QUERY)),
    )


def _without_freeze(
    node: Node, connection: psycopg.Connection[Any], settings: tuple[DatabaseSetting, ...]
) -> tuple[DatabaseSetting, ...]:
    """Return the settings as they were before a terminal snapshot made the database read-only, if one did."""
    try:
        frozen = read_record(node, connection)
    except FreezeRecordError:
        # The earlier value is unknown: omit the setting, so that the server's value applies.
        return tuple(setting for setting in settings if setting.name != READ_ONLY or not is_on(setting.value))
    before = {setting.role or "": setting.value for setting in frozen.before} if frozen else {}
    kept: list[DatabaseSetting] = []
    for setting in settings:
        # Keep a different value that has been set since.
        if setting.name != READ_ONLY or setting.role not in before or not is_on(setting.value):
            kept.append(setting)
        elif (value := before[setting.role]) is not None:
            kept.append(DatabaseSetting(setting.name, value, setting.role))
    return tuple(kept)
