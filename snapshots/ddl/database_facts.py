"""Read from a shard what its commit says of the database besides its rows."""

from __future__ import annotations

from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.encodings import fetch_texts, readable
from cutline.fleet.read_only.frozen import FreezeRecordError, is_on, read_record
from cutline.fleet.tables.names import table_name
from cutline.snapshots.records.database_facts import (
    DatabaseFacts,
    DatabasePrivilege,
    DatabaseProperties,
    DatabaseSetting,
    SecurityLabel,
    UsedCollation,
)

SIZE_QUERY = "SELECT pg_database_size(oid) FROM pg_database WHERE datname = current_database()"
EXTENSIONS_QUERY = f"SELECT {readable('extname')}, {readable('extversion')} FROM pg_extension ORDER BY 1"
# Nothing depends on those that every server has, such as "C". 17 renamed the column of ICU locales, 15 introduced it.
COLLATIONS_QUERY = f"""
SELECT {readable("n.nspname")}, {readable("c.collname")}, c.collprovider::text,
       ARRAY(SELECT DISTINCT one FROM unnest(ARRAY[c.collcollate, c.collctype,
             coalesce(to_jsonb(c) ->> 'colllocale', to_jsonb(c) ->> 'colliculocale')]) AS one
              WHERE one IS NOT NULL ORDER BY 1),
       n.nspname <> 'pg_catalog'
  FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
 WHERE n.nspname <> 'information_schema'
   AND (n.nspname <> 'pg_catalog'
        OR EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_collation'::regclass AND d.refobjid = c.oid))
 ORDER BY 1, 2
"""
# pg_dump writes the compression of columns; those of an extension are its own matter.
LZ4_COLUMNS_QUERY = f"""
SELECT {readable("n.nspname")}, {readable("c.relname")}, {readable("a.attname")}
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attcompression = 'l' AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'm')
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
    """The facts of the session's database."""
    (size,) = connection.execute(SIZE_QUERY).fetchone() or (0,)
    extensions = {str(name): str(version) for name, version in connection.execute(EXTENSIONS_QUERY)}
    collations = (
        UsedCollation(schema, name, provider, tuple(locales), is_own)
        for schema, name, provider, locales, is_own in connection.execute(COLLATIONS_QUERY)
    )
    rows = connection.execute(LZ4_COLUMNS_QUERY)
    lz4_columns = tuple(f"{table_name(schema, table)}.{column}" for schema, table, column in rows)
    return DatabaseFacts(size, extensions, tuple(collations), lz4_columns, read_properties(node, connection))


def read_properties(node: Node, connection: psycopg.Connection[Any]) -> DatabaseProperties:
    """What belongs to the session's database itself; of one that is read-only now, the settings that it had before."""
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
    """The settings as they were before a terminal snapshot made the database read-only."""
    try:
        frozen = read_record(node, connection)
    except FreezeRecordError:
        # What it was before is not known: that of the server.
        return tuple(one for one in settings if one.name != READ_ONLY or not is_on(one.value))
    before = {one.role or "": one.value for one in frozen.before} if frozen else {}
    kept: list[DatabaseSetting] = []
    for one in settings:
        # Another value was set since.
        if one.name != READ_ONLY or one.role not in before or not is_on(one.value):
            kept.append(one)
        elif (value := before[one.role]) is not None:
            kept.append(DatabaseSetting(one.name, value, one.role))
    return tuple(kept)
