"""A snapshot of a database that many roles own and may use, and a server that lacks all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.connections import with_database
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.integration.refusing import execute
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, PLAIN, SOURCE, TARGET = "daily", "plain", "shop", "back"
OWNER, READER, GRANTOR = 'o"wner; DROP TABLE app.customer; --', "grün = rot", "it's \\ a grantor"
ROLES = (OWNER, READER, GRANTOR)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


SECONDS_MAX = 60
# LATIN1, in which a server stores one of the names as other bytes than in UTF-8.
CREATION = f"CREATE DATABASE {SOURCE} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"
TABLES = """
CREATE SCHEMA app AUTHORIZATION {owner};
CREATE SCHEMA sales;
CREATE SEQUENCE sales.customer_id_seq;
CREATE VIEW public.invoice AS SELECT 1 AS one;
CREATE TABLE item (id int PRIMARY KEY, n int);
INSERT INTO item SELECT i, i FROM generate_series(1, 10) AS i;
CREATE TABLE sales.invoice (id int PRIMARY KEY, n int);
INSERT INTO sales.invoice SELECT i, i FROM generate_series(1, 20) AS i;
SET ROLE {owner};
CREATE TABLE app.customer (id serial PRIMARY KEY, name text, spare int GENERATED ALWAYS AS (length(name)) STORED);
INSERT INTO app.customer (name) SELECT 'n' || i FROM generate_series(1, 30) AS i;
CREATE INDEX by_name ON app.customer (name);
CREATE TABLE app.purchase (id int PRIMARY KEY, customer int REFERENCES app.customer);
INSERT INTO app.purchase SELECT i, i FROM generate_series(1, 5) AS i;
CREATE TABLE app.line (what text);
ALTER TABLE app.line REPLICA IDENTITY FULL;
INSERT INTO app.line SELECT 'line' FROM generate_series(1, 7);
CREATE TABLE app.event (day int, what text, PRIMARY KEY (day)) PARTITION BY RANGE (day);
CREATE TABLE app.event_1 PARTITION OF app.event FOR VALUES FROM (1) TO (10);
CREATE TABLE app.event_2 PARTITION OF app.event FOR VALUES FROM (10) TO (20);
INSERT INTO app.event SELECT i, 'x' FROM generate_series(1, 15) AS i;
CREATE MATERIALIZED VIEW app.total AS SELECT count(*) FROM app.customer;
CREATE VIEW app.names AS SELECT name FROM app.customer;
CREATE SEQUENCE app.numbers;
SELECT setval('app.numbers', 77);
CREATE FUNCTION app.one() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
RESET ROLE
"""
PRIVILEGES = """
SET ROLE {owner};
GRANT USAGE ON SCHEMA app TO {reader}, {grantor}, PUBLIC;
GRANT SELECT ON app.customer TO {grantor} WITH GRANT OPTION;
GRANT SELECT ON app.line TO PUBLIC;
GRANT UPDATE (name) ON app.customer TO {reader};
GRANT EXECUTE ON FUNCTION app.one() TO {reader};
REVOKE EXECUTE ON FUNCTION app.one() FROM PUBLIC;
REVOKE DELETE ON app.purchase FROM {owner};
ALTER TABLE app.line ENABLE ROW LEVEL SECURITY;
CREATE POLICY readers ON app.line FOR SELECT TO {reader} USING (what <> ' TO "x"; ''');
COMMENT ON POLICY readers ON app.line IS 'who reads';
CREATE POLICY several ON app.line FOR UPDATE TO {reader}, {grantor} USING (true);
CREATE POLICY everybody ON app.line USING (true);
ALTER DEFAULT PRIVILEGES IN SCHEMA app GRANT SELECT ON TABLES TO {reader};
RESET ROLE;
SET ROLE {grantor};
GRANT SELECT ON app.customer TO {reader};
RESET ROLE;
CREATE FOREIGN DATA WRAPPER wrapper;
CREATE SERVER remote FOREIGN DATA WRAPPER wrapper;
CREATE USER MAPPING FOR {reader} SERVER remote;
CREATE USER MAPPING FOR PUBLIC SERVER remote;
CREATE USER MAPPING FOR {grantor} SERVER remote;
ALTER DEFAULT PRIVILEGES FOR ROLE {grantor} IN SCHEMA app GRANT INSERT ON TABLES TO PUBLIC;
SELECT lo_from_bytea(4711, 'x');
ALTER LARGE OBJECT 4711 OWNER TO {owner};
GRANT SELECT ON LARGE OBJECT 4711 TO {grantor} WITH GRANT OPTION;
GRANT UPDATE ON LARGE OBJECT 4711 TO PUBLIC;
SET ROLE {grantor};
GRANT SELECT ON LARGE OBJECT 4711 TO {reader};
RESET ROLE
"""

DROP_ROLES = """
DO $$
DECLARE role regrole;
BEGIN
    FOR role IN SELECT oid FROM pg_roles
                 WHERE oid >= 16384
                   AND oid NOT IN (SELECT refobjid FROM pg_shdepend WHERE refclassid = 'pg_authid'::regclass)
    LOOP EXECUTE 'DROP ROLE ' || role; END LOOP;
END $$
"""
# Only a superuser can restore what is dropped here.
WITHOUT_SUPERUSER = "DROP FOREIGN DATA WRAPPER wrapper CASCADE"
# Owners and privileges of everything, and whom policies and user mappings are for.
ROLES_QUERY = """
WITH objects AS (
    SELECT 'table' AS kind, c.oid::regclass::text AS name, relowner AS owner, relacl AS acl FROM pg_class c
     WHERE relnamespace IN (SELECT oid FROM pg_namespace WHERE nspname IN ('app', 'sales', 'public'))
    UNION ALL SELECT 'column', attrelid::regclass::text || attname, NULL, attacl FROM pg_attribute
               WHERE attacl IS NOT NULL AND attrelid >= 16384
    UNION ALL SELECT 'schema', nspname, nspowner, nspacl FROM pg_namespace WHERE nspname IN ('app', 'sales', 'public')
    UNION ALL SELECT 'function', oid::regprocedure::text, proowner, proacl FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 'type', oid::regtype::text, typowner, typacl FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT 'server', srvname, srvowner, srvacl FROM pg_foreign_server
    UNION ALL SELECT 'large object', oid::text, lomowner, lomacl FROM pg_largeobject_metadata
    UNION ALL SELECT 'default ' || defaclobjtype::text, defaclnamespace::regnamespace::text, defaclrole, defaclacl
                FROM pg_default_acl
    UNION ALL SELECT 'policy', polname, role, NULL FROM pg_policy, unnest(polroles) AS of (role)
    UNION ALL SELECT 'user mapping', srvname, umuser, NULL FROM pg_user_mappings)
SELECT kind, name, coalesce(pg_get_userbyid(owner), ''), coalesce(pg_get_userbyid(grantor), ''),
       coalesce(CASE grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(grantee) END, ''), privilege_type, is_grantable
  FROM objects LEFT JOIN LATERAL aclexplode(acl) ON true
"""


@dataclass(frozen=True, slots=True)
class TwoPlaces:
    """The fleet with the snapshot, another database on its server, and one on another server.

    `truth` is what `roles_of` found when the snapshot was taken.
    """

    fleet: Fleet
    beside: Fleet
    other: Fleet
    spark: SparkSession
    truth: list[tuple[str, ...]]

    def restore(self, *words: str, to: Fleet | None = None, name: str = NAME) -> dict[str, Any]:
        """Run the restore, which must succeed."""
        code, done = self.run(*words, to=to, name=name)
        assert code == 0, done
        return done

    def refuse(self, *words: str, to: Fleet | None = None) -> dict[str, Any]:
        """Run the restore, which must be refused and leave nothing."""
        code, refused = self.run(*words, to=to)
        assert code in (2, 3), refused
        assert databases(to or self.other) == set()
        return refused

    def run(self, *words: str, to: Fleet | None = None, name: str = NAME) -> tuple[int, dict[str, Any]]:
        path = str((to or self.other).path)
        return run_here(self.fleet, "restore", name, "--to", path, *words, spark=self.spark)


def databases(fleet: Fleet) -> set[str]:
    """The databases that a restore into the fleet has made."""
    found = ask(with_database(fleet.primaries[0], "postgres").dsn, "SELECT datname FROM pg_database")
    return {name for (name,) in found if name.startswith(TARGET)}


def ask(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, client_encoding="utf8") as connection:
        return connection.execute(query.encode()).fetchall()


def await_sessions_over(fleet: Fleet) -> None:
    """Wait until the server has noticed that the command's sessions are closed, and with them its locks."""
    dsn = with_database(fleet.primaries[0], "postgres").dsn
    deadline = time.monotonic() + SECONDS_MAX
    while ask(dsn, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'cutline%'") != [(0,)]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def value(fleet: Fleet, query: str) -> Any:
    """The only value that the query has in the fleet's database."""
    ((found,),) = ask(fleet.primaries[0].dsn, query)
    return found


def roles_of(fleet: Fleet) -> list[tuple[str, ...]]:
    """Whose everything in the fleet's database is, and who may use it."""
    return sorted(tuple(map(str, row)) for row in ask(fleet.primaries[0].dsn, ROLES_QUERY))


def renamed(rows: list[tuple[str, ...]], names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The same with other names of roles."""
    return sorted((*row[:2], *(names.get(one, one) for one in row[2:5]), *row[5:]) for row in rows)


@contextmanager
def emptied(*fleets: Fleet) -> Iterator[None]:
    """Drop the restored databases at the end, and the roles that are not the source's."""
    try:
        yield
    finally:
        for fleet in fleets:
            dsn = with_database(fleet.primaries[0], "postgres").dsn
            for name in databases(fleet):
                execute(dsn, f"DROP DATABASE {quoted(name)} WITH (FORCE)")
            execute(dsn, DROP_ROLES)


@contextmanager
def two_places(folder: Path, spark: SparkSession) -> Iterator[TwoPlaces]:
    folders = [folder / "first", folder / "second"]
    try:
        first, second = (
            configure_fleet(
                start_fleet(one, shards=1, backups=0, settings={"fsync": "off"}),
                folder / f"{one.name}.toml",
                f"file://{folder}/store",
            )
            for one in folders
        )
        execute(with_database(first.primaries[0], "postgres").dsn, CREATION)
        fleet, beside = named(first, "shop.toml", SOURCE), named(first, "beside.toml", TARGET)
        other = named(second, "other.toml", TARGET)
        dsn = make_conninfo(fleet.primaries[0].dsn, client_encoding="utf8")
        execute(dsn, *(f"CREATE ROLE {quoted(role)}" for role in ROLES))
        names = {"owner": quoted(OWNER), "reader": quoted(READER), "grantor": quoted(GRANTOR)}
        execute(dsn, TABLES.format(**names), PRIVILEGES.format(**names))
        runs = Runs(fleet, Ready(spark))
        with dropping_slots(fleet):
            runs.init()
            runs.full(NAME, large_objects=True)
            truth = roles_of(fleet)
            execute(dsn, WITHOUT_SUPERUSER)
            runs.full(PLAIN, large_objects=True)
            yield TwoPlaces(fleet, beside, other, spark, truth)
    finally:
        for one in folders:
            stop_fleet(one, delete=True)


def named(fleet: Fleet, name: str, database: str) -> Fleet:
    """The same servers with another database."""
    path = fleet.path.with_name(name)
    path.write_text(fleet.path.read_text().replace("/bank", f"/{database}"))
    return load_fleet(path)
