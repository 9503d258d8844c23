"""What a restore of the database of docs/roles.md has to bring back that pg_dump's text does not show."""

from __future__ import annotations

import psycopg

from cutline.fleet.config import Fleet

LARGE = "SELECT lo_from_bytea(4711, 'x'); GRANT SELECT ON LARGE OBJECT 4711"
LARGE_OF_OTHERS = (
    "SELECT lo_from_bytea(4712, 'y'); ALTER LARGE OBJECT 4712 OWNER TO large_owner;"
    " GRANT SELECT ON LARGE OBJECT 4712 TO large_grantor WITH GRANT OPTION;"
    " SET ROLE large_grantor; GRANT SELECT ON LARGE OBJECT 4712 TO pg_monitor; RESET ROLE"
)
# What pg_dump's text does not have.
OTHERS = """
SELECT (SELECT array_agg(format('%s %s', pubname, pg_get_userbyid(pubowner)) ORDER BY 1) FROM pg_publication
         WHERE pubname !~ '^cutline_'),
       (SELECT array_agg(format('%s %s %s', oid, pg_get_userbyid(lomowner), lomacl) ORDER BY oid)
          FROM pg_largeobject_metadata),
       (SELECT last_value FROM app.paid_id_seq), (SELECT sum FROM app.total)
"""
# As those of docs/roles.md for `create` are; a snapshot has them.
SYSTEM_GRANT = "GRANT EXECUTE ON FUNCTION pg_catalog.pg_switch_wal() TO pg_monitor"


def databases_of(shop: Fleet) -> list[object]:
    """The databases on the primaries that are the shop's, or restored from it."""
    found: list[object] = []
    for node in shop.primaries:
        with psycopg.connect(node.dsn) as connection:
            found += connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'shop' ORDER BY 1").fetchall()
    return found


def ask(dsn: str, query: str) -> list[tuple[object, ...]]:
    """The rows that the query returns."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()
