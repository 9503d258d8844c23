"""A drill restores objects into tablespaces with the snapshot's names, which its own servers get for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IN_PLACE = "SET allow_in_place_tablespaces = on"
OBJECTS = (
    'CREATE TABLE item (id int PRIMARY KEY USING INDEX TABLESPACE "fast \'disks\'", name text) TABLESPACE "größer"',
    "CREATE INDEX by_name ON item (name) TABLESPACE \"fast 'disks'\"",
    'CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id) TABLESPACE "größer"',
    "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (9) TABLESPACE pg_default",
    'CREATE MATERIALIZED VIEW names TABLESPACE "größer" AS SELECT name FROM item',
    "INSERT INTO item VALUES (1, 'one'), (2, 'two')",
    "CREATE ROLE placer",
    "ALTER TABLE item OWNER TO placer",
)
QUERY = """
SELECT string_agg(relname || ' ' || encode(convert_to(spcname, getdatabaseencoding()), 'hex'), ', ' ORDER BY relname)
  FROM pg_class c JOIN pg_tablespace t ON t.oid = reltablespace WHERE relnamespace = 'public'::regnamespace
"""
LEFT_QUERY = """
SELECT ARRAY(SELECT rolname::text FROM pg_roles ORDER BY 1),
       ARRAY(SELECT a.grantee::regrole::text FROM pg_tablespace, aclexplode(spcacl) AS a
              WHERE spcname !~ '^pg_' AND a.grantee <> spcowner)
"""


def query(dsn: str, text: str) -> tuple[object, ...]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(text.encode()).fetchone() or ()


def create_objects(servers: EmbeddedFleet) -> list[str]:
    """Create tablespaces and objects in them; return what the shards' objects are in."""
    for node in servers.primaries:
        # Its own name has no UTF-8 bytes on one server.
        encoding = "LATIN1" if node is servers.primaries[0] else "UTF8"
        execute(node.dsn("postgres"), f"CREATE DATABASE bank TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
        names = (f"CREATE TABLESPACE \"{name}\" LOCATION ''" for name in ("fast 'disks'", "größer"))
        execute(make_conninfo(node.dsn(), client_encoding="utf8"), IN_PLACE, *names, *OBJECTS)
    return [str(query(node.dsn(), QUERY)[0]) for node in servers.primaries]


def test_objects_come_back_in_their_tablespaces(spark: SparkSession, tmp_path: Path) -> None:
    with fleet_of(tmp_path / "fleet", [require_server(major) for major in MAJORS], schema=False) as servers:
        found = create_objects(servers)
        assert ("6772f6df6572" in found[0], "6772c3b6c39f6572" in found[1]) == (True, True), found
        more = "".join(
            f'\n[[drill.assertion]]\nnode = "{node.id}"\nsql = {json.dumps(QUERY)}\nexpected = {json.dumps(expected)}\n'
            for node, expected in zip(servers.primaries, found, strict=True)
        )
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=more)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full("snp", only_primary=True)
        spare = "".join(
            f'\n[[node]]\nid = "{node.id}"\ndsn = "{make_conninfo(node.dsn())}"\n' for node in servers.primaries
        )
        (tmp_path / "spare.toml").write_text(f'name = "spare"\nstore = "/nowhere"\n{spare}')
        before = [query(node.dsn(), LEFT_QUERY) for node in servers.primaries]
        code, document = run_here(fleet, "drill", "snp", "--to", str(tmp_path / "spare.toml"), spark=spark)
        assert (code, document.get("result")) == (0, "holds"), json.dumps(document)
        assert [query(node.dsn(), LEFT_QUERY) for node in servers.primaries] == before
    code, document = run_here(fleet, "drill", "snp", spark=spark)
    assert (code, document.get("result")) == (0, "holds"), json.dumps(document)
    code, document = run_here(fleet, "check", "snp", "--restorable", spark=spark)
    assert (document["restorable"]["ddl"], document["restorable"]["ddl_detail"]) == ("run", None), document
