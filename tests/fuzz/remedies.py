"""Whether the servers' catalogs justify a refusal, and the statements that remove its cause."""

from __future__ import annotations

import psycopg

from tests.fuzz.state import judge_dsn

WITHOUT_IDENTITY_QUERY = """
SELECT format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema)' AND c.relreplident <> 'f'
   AND c.relname !~ '^log'
   AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident)))
"""
# An inherited column can be dropped only where it comes from.
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
    """The statements that make updates of all tables decodable, by the catalogs; [] if they are."""
    with psycopg.connect(judge_dsn(dsn)) as connection:
        return [row[0] for query in (WITHOUT_IDENTITY_QUERY, COMPUTED_QUERY) for row in connection.execute(query)]


def apply_remedies(dsn: str) -> bool:
    """Run the remedies; return whether there were any."""
    remedies = remedies_of(dsn)
    with psycopg.connect(judge_dsn(dsn), autocommit=True) as connection:
        for remedy in remedies:
            connection.execute(remedy.encode(connection.info.encoding))
    return bool(remedies)
