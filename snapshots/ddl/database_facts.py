"""Read from a shard what its commit says of the database besides its rows."""

from __future__ import annotations

from typing import Any

import psycopg

from fleet.nodes.encodings import readable
from fleet.tables.names import table_name
from snapshots.records.database_facts import DatabaseFacts, UsedCollation

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


def read_facts(connection: psycopg.Connection[Any]) -> DatabaseFacts:
    """The facts of the session's database."""
    (size,) = connection.execute(SIZE_QUERY).fetchone() or (0,)
    extensions = {str(name): str(version) for name, version in connection.execute(EXTENSIONS_QUERY)}
    collations = (
        UsedCollation(schema, name, provider, tuple(locales), is_own)
        for schema, name, provider, locales, is_own in connection.execute(COLLATIONS_QUERY)
    )
    rows = connection.execute(LZ4_COLUMNS_QUERY)
    lz4_columns = tuple(f"{table_name(schema, table)}.{column}" for schema, table, column in rows)
    return DatabaseFacts(size, extensions, tuple(collations), lz4_columns)
