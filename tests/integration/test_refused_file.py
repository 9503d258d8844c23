"""The file of refused statements, run with psql once the target is mended, makes what the restore could not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cli.output.refused_statements import write_refused
from embedded.fleet import EmbeddedFleet
from fleet.config import Node
from fleet.nodes.connections import with_database
from fleet.nodes.watch import watch_nodes
from fleet.programs.wheel import run_tool
from restore.ddl.running import DdlRun
from restore.report import describe_refusals
from restore.targets.target import target_of
from tests.commands.ddl_runs import dumped_ddl
from tests.integration.refusing import execute

SOURCE, AGAIN, ROLE = "refused_source", "refused_again", "refused_owner"
# Tables of one entry each, with statements after CREATE TABLE: owner, statistics, storage, identity.
OBJECTS = (
    f"CREATE FUNCTION home(v text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS"
    f" $$BEGIN IF current_database() <> '{SOURCE}' THEN RAISE 'not at home'; END IF; RETURN v; END$$",
    "CREATE TABLE made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text,"
    " g text GENERATED ALWAYS AS (home(U&'\\00e9')) STORED)",
    "ALTER TABLE made ALTER v SET STATISTICS 321, ALTER v SET STORAGE external, REPLICA IDENTITY FULL",
    f"ALTER TABLE made OWNER TO {ROLE}",
    f"GRANT SELECT ON made TO {ROLE} WITH GRANT OPTION",
    "COMMENT ON TABLE made IS U&'\\00e9'",
)
MENDED = "CREATE OR REPLACE FUNCTION home(v text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT v'"
FACTS_QUERY = """
SELECT a.attstattarget, c.relreplident::text, pg_get_userbyid(c.relowner), obj_description(c.oid)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid WHERE c.relname = 'made' AND a.attname = 'v'
"""


@pytest.fixture
def source(shared_fleet: EmbeddedFleet) -> Iterator[Node]:
    """A database whose encoding is not UTF-8."""
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    node = with_database(maintenance, SOURCE)
    try:
        execute(maintenance.dsn, f"CREATE ROLE {ROLE}")
        for database in (SOURCE, AGAIN):
            execute(maintenance.dsn, f"CREATE DATABASE {database} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
        execute(node.dsn, *OBJECTS)
        yield node
    finally:
        for database in (SOURCE, AGAIN):
            execute(maintenance.dsn, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
        execute(maintenance.dsn, f"DROP ROLE IF EXISTS {ROLE}")


def schema_of(node: Node) -> list[str]:
    return run_tool("pg_dump", "--schema-only", "--restrict-key=same", node.dsn).stdout.splitlines()


def test_it_has_every_statement_of_what_was_refused(source: Node, tmp_path: Path) -> None:
    again = with_database(source, AGAIN)
    with watch_nodes([source]) as watch:
        run = DdlRun(again, dumped_ddl(source, tmp_path, watch), watch)
        run.before_rows()
        run.after_rows()
    refused = describe_refusals(target_of("s1", again, (), "0" * 32), run.refusals.values())
    (table,) = (one for one in refused if not one.needs)
    assert (table.object, table.reason) == ("TABLE public.made", "not at home")
    # For people it is the one that the server refused.
    assert table.statement.startswith("CREATE TABLE")
    assert "SET STATISTICS" not in table.statement
    path, _ = write_refused("operation", refused, tmp_path)
    execute(again.dsn, MENDED)
    run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={path}", again.dsn)
    execute(source.dsn, MENDED)
    assert schema_of(again) == schema_of(source)
    with psycopg.connect(again.dsn) as connection:
        assert connection.execute(FACTS_QUERY).fetchall() == [(321, "f", ROLE, "é")]
