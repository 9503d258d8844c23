"""What the servers' catalogs say of a refusal: whether it was right, and what takes away what stood in the way."""

from __future__ import annotations

import psycopg

from tests.fuzz.state import judging

WITHOUT_IDENTITY_QUERY = """
SELECT format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema)' AND c.relreplident <> 'f'
   AND c.relname !~ '^log'
   AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident)))
"""
# What is inherited goes with what it is inherited from.
COMPUTED_QUERY = """
WITH RECURSIVE above (oid, name) AS (
    SELECT c.oid, a.attname
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
     WHERE c.relkind = 'r' AND c.relreplident = 'f' AND a.attgenerated <> '' AND NOT a.attisdropped
    UNION SELECT i.inhparent, a.name FROM above a JOIN pg_inherits i ON i.inhrelid = a.oid)
SELECT format('ALTER TABLE %s DROP COLUMN %I CASCADE', u.oid::regclass, u.name)
  FROM above u JOIN pg_attribute a ON a.attrelid = u.oid AND a.attname = u.name AND NOT a.attisdropped
 WHERE a.attinhcount = 0
"""


def remedies_of(dsn: str) -> list[str]:
    """What lets the updates of all tables be followed, by the catalogs; nothing if they can be."""
    with psycopg.connect(judging(dsn)) as connection:
        return [row[0] for query in (WITHOUT_IDENTITY_QUERY, COMPUTED_QUERY) for row in connection.execute(query)]


def mend(dsn: str) -> bool:
    """Do it; whether there was anything to do."""
    remedies = remedies_of(dsn)
    with psycopg.connect(judging(dsn), autocommit=True) as connection:
        for remedy in remedies:
            connection.execute(remedy.encode())
    return bool(remedies)
