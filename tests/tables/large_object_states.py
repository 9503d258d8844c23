"""Every large object of a database as PostgreSQL reports it: its bytes, owner, grants and comment."""

from __future__ import annotations

import psycopg

QUERY = """
SELECT m.oid::bigint, length(lo_get(m.oid)), md5(lo_get(m.oid)), pg_get_userbyid(m.lomowner),
       (SELECT array_agg(a::text ORDER BY a::text) FROM unnest(m.lomacl) AS a), obj_description(m.oid, 'pg_largeobject')
  FROM pg_largeobject_metadata m ORDER BY 1
"""


def read_large_objects(dsn: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(QUERY).fetchall()
