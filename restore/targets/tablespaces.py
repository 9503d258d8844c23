"""Tablespaces of a drill: created on its temporary servers, and usable by its restoring role.

A restore creates no tablespaces, because only the operator knows which disks the server has. A drill's temporary server
has nothing but its own folder, so its tablespaces are folders inside the data directory and are deleted with it.
"""

from __future__ import annotations

from collections.abc import Collection

import psycopg
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import connect, raising_unreachable, with_database
from cutline.nodes.encodings import RAW, raw_bytes

# A database without an encoding accepts the bytes of names from databases in any encoding.
NAMING_DATABASE = "cutline_drill_tablespaces"
CREATE_NAMING = sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'").format(
    sql.Identifier(NAMING_DATABASE)
)
# With an empty location, the tablespace is a folder in pg_tblspc (PostgreSQL manual, "Developer Options").
IN_PLACE = "SET allow_in_place_tablespaces = on"
# The names stay inside the server, which would refuse them from a client if their encoding is not the database's.
GRANT = """DO $do$ DECLARE one name; BEGIN
  FOR one IN SELECT spcname FROM pg_catalog.pg_tablespace
              WHERE pg_catalog.encode(pg_catalog.namesend(spcname), 'hex') = ANY ({names}) LOOP
    EXECUTE pg_catalog.format('GRANT CREATE ON TABLESPACE %I TO %I', one, {role});
  END LOOP; END $do$"""
REVOKE = """DO $do$ DECLARE one name; BEGIN
  FOR one IN SELECT spcname FROM pg_catalog.pg_tablespace, pg_catalog.aclexplode(spcacl) AS a
               JOIN pg_catalog.pg_roles r ON r.oid = a.grantee WHERE r.rolname = {role} LOOP
    EXECUTE pg_catalog.format('REVOKE CREATE ON TABLESPACE %I FROM %I', one, {role});
  END LOOP; END $do$"""


def create_tablespaces(superuser: Node, names: Collection[str]) -> None:
    """Create the tablespaces (raw text) inside the data directory of a temporary server."""
    with raising_unreachable(superuser), connect(superuser) as connection:
        connection.execute(CREATE_NAMING)
        with connect(with_database(superuser, NAMING_DATABASE), client_encoding=RAW) as raw:
            raw.execute(IN_PLACE)
            for name in sorted(names):
                raw.execute(raw_bytes(f"CREATE TABLESPACE {quote_identifier(name)} LOCATION ''"))
        connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(NAMING_DATABASE)))


def grant_tablespaces(superuser: Node, names: Collection[str], role: str) -> None:
    """Let the role create objects in those of the tablespaces (raw text) that the server has."""
    wanted = [raw_bytes(name).hex() for name in names]
    # Otherwise the server would convert the bytes of names.
    with raising_unreachable(superuser), connect(superuser, client_encoding=RAW) as connection:
        connection.execute(sql.SQL(GRANT).format(names=sql.Literal(wanted), role=sql.Literal(role)))


def revoke_tablespaces(session: psycopg.Connection[object], role: str) -> None:
    """Take back what `grant_tablespaces` has granted: a role that has privileges can't be dropped."""
    session.execute(sql.SQL(REVOKE).format(role=sql.Literal(role)))
