"""Every large object of a database as PostgreSQL reports it: its bytes, owner, grants and comment."""

from __future__ import annotations

import psycopg

# Definitions in a store whose commit was sealed again. Most ended a restore as a bug; the last one ran as SQL.
HOSTILE_DEFINITIONS = {
    "no JSON": "not json",
    "empty": "",
    "no object": "null",
    "an owner that is a number": '{"owner": 1, "grants": null}',
    "deep": "[" * 20_000,
    "deep in a field": '{"owner": "postgres", "comment": null, "grants": ' + "[" * 20_000,
    "a grant of one": '{"owner":"postgres","grants":[["x"]]}',
    "a grant of five": '{"owner":"postgres","comment":null,"grants":[["postgres","","SELECT",false,1]]}',
    "no comment": '{"owner":"postgres","grants":[["postgres","","SELECT",false]]}',
    "no grantor": '{"owner":"postgres","comment":null,"grants":[["","","SELECT",false]]}',
    "another field": '{"owner":"postgres","comment":null,"grants":null,"x":1}',
    "half a character": '{"owner":"\\ud800","comment":null,"grants":null}',
    "a NUL": '{"owner":"postgres","comment":"a\\u0000","grants":null}',
    "another privilege": '{"owner":"postgres","comment":null,"grants":[["postgres","","ALL",false]]}',
    "SQL": '{"owner":"postgres","comment":null,"grants":[["postgres","",'
    '"SELECT ON LARGE OBJECT 1001 TO PUBLIC; CREATE TABLE public.pwned (); GRANT SELECT",false]]}',
}

QUERY = """
SELECT m.oid::bigint, length(lo_get(m.oid)), md5(lo_get(m.oid)), pg_get_userbyid(m.lomowner),
       (SELECT array_agg(a::text ORDER BY a::text) FROM unnest(m.lomacl) AS a), obj_description(m.oid, 'pg_largeobject')
  FROM pg_largeobject_metadata m ORDER BY 1
"""


def read_large_objects(dsn: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(QUERY).fetchall()
