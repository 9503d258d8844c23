"""Read the facts about a shard's database for the commit: settings, properties, search_path.

What a server computes may depend on a session's settings: the rows of a materialized view; the values of a generated
column, the keys of an index and the result of a CHECK, if they call a function that is not really immutable. Our own
sessions have pinned settings, so those that the source's sessions have are stored.

COPY calls functions in CHECK constraints, domains and generated columns, and some of these functions name tables and
other functions without a schema. Rows that need such a function could not be loaded with the search_path of our
sessions, which contains only pg_catalog. Therefore the database's setting of search_path (ALTER DATABASE … SET) is
stored with its DDL.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from cutline.fleet.config import Node
from cutline.fleet.table_names import table_name
from cutline.nodes.connections import connect_plainly, raising_unreachable
from cutline.nodes.encodings import database_of, fetch_texts, readable
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
 WHERE g.setrole = 0 OR r.oid IS NOT NULL ORDER BY g.setrole <> 0, 3, s.number
"""
LABELS_QUERY = """
SELECT l.provider, l.label FROM pg_shseclabel l
  JOIN pg_database d ON l.classoid = 'pg_database'::regclass AND l.objoid = d.oid AND d.datname = current_database()
 ORDER BY 1
"""
READ_ONLY = "default_transaction_read_only"
# The settings of PostgreSQL's own on which computed values may depend, in lower case.
COMPUTING = frozenset(
    (
        "bytea_output",
        "datestyle",
        "default_text_search_config",
        "extra_float_digits",
        "intervalstyle",
        "lc_monetary",
        "lc_numeric",
        "lc_time",
        "timezone",
        "timezone_abbreviations",
        "xmlbinary",
        "xmloption",
    )
)
# The sources of a session's values that concern only its own client or role.
OWN_SOURCES = frozenset(("client", "database user", "override", "session", "user"))
SESSION_QUERY = "SELECT s.name, s.setting, s.source FROM pg_catalog.pg_settings s"
# What is set for all roles: in all databases, then in this one, which counts.
FOR_ALL_QUERY = """
SELECT split_part(s.setting, '=', 1), substr(s.setting, strpos(s.setting, '=') + 1)
  FROM pg_db_role_setting g CROSS JOIN unnest(g.setconfig) WITH ORDINALITY AS s (setting, number)
 WHERE g.setrole = 0 AND g.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
 ORDER BY g.setdatabase <> 0, s.number
"""


def read_facts(node: Node, connection: psycopg.Connection[Any], same: DatabaseFacts | None = None) -> DatabaseFacts:
    """Read the facts about the session's database.

    `same` are earlier facts, if the fingerprint shows that the objects are still the same as they were then: what takes
    a search of all columns is taken from there.
    """
    (size,) = connection.execute(SIZE_QUERY).fetchone() or (0,)
    extensions = {str(name): str(version) for name, version in connection.execute(EXTENSIONS_QUERY)}
    collations = (
        UsedCollation(schema, name, provider, tuple(locales), is_own)
        for schema, name, provider, locales, is_own in connection.execute(COLLATIONS_QUERY)
    )
    lz4_columns = same.lz4_columns if same else _read_lz4_columns(connection)
    properties = read_properties(node, connection)
    name, settings = database_of(connection), read_session_settings(node, connection)
    return DatabaseFacts(size, extensions, tuple(collations), lz4_columns, properties, name, settings)


def read_session_settings(node: Node, connection: psycopg.Connection[Any]) -> dict[str, str]:
    """Read the settings that the server and the database give every session, on which computed values may depend.

    These are the settings in COMPUTING and those with a prefix, which belong to applications and extensions. What only
    a role or a client sets is left out.
    """
    for_all = {str(name).lower(): str(value) for name, value in fetch_texts(connection, FOR_ALL_QUERY)}
    found = {name: value for name, value in for_all.items() if name in COMPUTING or "." in name}
    with raising_unreachable(node), connect_plainly(node) as session:
        for name, value, source in session.execute(SESSION_QUERY):
            if name.lower() in COMPUTING and source not in OWN_SOURCES:
                found[name.lower()] = value
    return dict(sorted(found.items()))


def _read_lz4_columns(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    rows = connection.execute(LZ4_COLUMNS_QUERY)
    return tuple(f"{table_name(schema, table)}.{column}" for schema, table, column in rows)


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
