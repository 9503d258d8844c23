"""A drill on servers that have the snapshot's roles creates other roles in their place, each its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROLES = ("anna", "ben", "clerk", "staff")
STATEMENTS = (
    *(f"CREATE ROLE {role}" for role in ROLES),
    "GRANT clerk TO ben",
    "CREATE EXTENSION postgres_fdw",
    "GRANT USAGE ON FOREIGN DATA WRAPPER postgres_fdw TO anna",
    "CREATE SCHEMA shop AUTHORIZATION anna",
    "GRANT USAGE, CREATE ON SCHEMA shop TO ben WITH GRANT OPTION",
    "SET ROLE ben",
    "GRANT USAGE ON SCHEMA shop TO clerk",
    "CREATE TABLE shop.sale (id int PRIMARY KEY, item int, seller text)",
    "INSERT INTO shop.sale VALUES (1, 1, 'ben'), (2, 1, 'anna')",
    "GRANT SELECT ON shop.sale TO anna WITH GRANT OPTION",
    "RESET ROLE",
    "SET ROLE anna",
    "GRANT SELECT ON shop.sale TO clerk, staff",
    "CREATE TABLE shop.item (id int PRIMARY KEY, name text)",
    "INSERT INTO shop.item VALUES (1, 'one')",
    "GRANT SELECT (id), UPDATE (name) ON shop.item TO ben, clerk",
    "GRANT REFERENCES ON shop.item TO ben",
    "CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw",
    "GRANT USAGE ON FOREIGN SERVER far TO ben, clerk",
    "CREATE USER MAPPING FOR anna SERVER far OPTIONS (user 'a')",
    "CREATE USER MAPPING FOR ben SERVER far OPTIONS (user 'b')",
    "CREATE USER MAPPING FOR PUBLIC SERVER far",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA shop GRANT SELECT ON TABLES TO ben",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA shop GRANT SELECT ON TABLES TO clerk WITH GRANT OPTION",
    "ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC",
    "RESET ROLE",
    "SET ROLE ben",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA shop GRANT SELECT ON TABLES TO anna",
    "ALTER TABLE shop.sale ADD FOREIGN KEY (item) REFERENCES shop.item",
    "ALTER TABLE shop.sale ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE shop.sale FORCE ROW LEVEL SECURITY",
    "CREATE POLICY own ON shop.sale TO anna, ben, clerk USING (seller = current_user)",
    "CREATE FUNCTION shop.total() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT count(*) FROM shop.sale'",
    "REVOKE ALL ON FUNCTION shop.total() FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION shop.total() TO anna, clerk",
    "CREATE TYPE shop.mood AS ENUM ('a')",
    "REVOKE USAGE ON TYPE shop.mood FROM PUBLIC",
    "GRANT USAGE ON TYPE shop.mood TO anna",
    "CREATE SEQUENCE shop.counter",
    "REVOKE ALL ON SEQUENCE shop.counter FROM ben",
    "RESET ROLE",
    "CREATE VIEW shop.sales AS SELECT * FROM shop.sale",
    "ALTER VIEW shop.sales OWNER TO staff",
    "SELECT lo_from_bytea(4711, 'x')",
    "ALTER LARGE OBJECT 4711 OWNER TO anna",
    "GRANT SELECT ON LARGE OBJECT 4711 TO ben, clerk",
    "ALTER ROLE ben IN DATABASE bank SET work_mem = '5MB'",
    "ALTER DATABASE bank SET statement_timeout = '1h'",
)
EXTENSIONS = "[drill]\nextensions = ['postgres_fdw']\n"
ASSERTIONS = """
[[drill.assertion]]
node = "{node}"
sql = "SELECT count(*), (SELECT count(*) FROM shop.item) FROM shop.sale"
expected = [[2, 1]]

[[drill.assertion]]
node = "{node}"
sql = '''
SELECT count(DISTINCT relowner), bool_and(pg_get_userbyid(relowner) ^@ 'cutline_drill_')
  FROM pg_class WHERE oid = ANY ('{{shop.sale,shop.item,shop.sales}}'::regclass[])
'''
expected = [[3, true]]
"""
LEFT_QUERY = """
SELECT ARRAY(SELECT rolname::text FROM pg_roles ORDER BY 1), ARRAY(SELECT datname::text FROM pg_database ORDER BY 1)
"""


def left_on(dsn: str) -> object:
    with psycopg.connect(dsn) as connection:
        return connection.execute(LEFT_QUERY).fetchone()


def test_roles_that_exist_get_stand_ins(spark: SparkSession, tmp_path: Path) -> None:
    with fleet_of(tmp_path / "fleet", [require_server(major) for major in MAJORS], schema=False) as servers:
        for node in servers.primaries:
            execute(node.dsn("postgres"), "CREATE DATABASE bank")
            execute(node.dsn(), *STATEMENTS)
        more = "".join(ASSERTIONS.format(node=node.id) for node in servers.primaries)
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=EXTENSIONS + more)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        code, document = run_here(fleet, "create", "snp", "--large-objects", "--only-primary", spark=spark)
        assert code == 0, document
        before = [left_on(node.dsn()) for node in servers.primaries]
        # On servers of their own, and together on one.
        for places in (servers.primaries, [servers.primaries[-1]] * len(MAJORS)):
            spare = "".join(
                f'\n[[node]]\nid = "{node.id}"\ndsn = "{place.dsn(node.id)}"\n'
                for node, place in zip(servers.primaries, places, strict=True)
            )
            (tmp_path / "spare.toml").write_text(f'name = "spare"\nstore = "/nowhere"\n{spare}')
            code, document = run_here(fleet, "drill", "snp", "--to", str(tmp_path / "spare.toml"), spark=spark)
            assert (code, document.get("result")) == (0, "holds"), json.dumps(document)
            assert [left_on(node.dsn()) for node in servers.primaries] == before
