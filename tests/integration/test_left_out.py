"""Everything in a database that a snapshot leaves out is named: nothing is skipped silently.

The test compares catalogs: everything that the source has and the restored database lacks must have been named.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.cli.commands.check import lines_of as check_lines
from cutline.cli.commands.create import lines_of as create_lines
from cutline.cli.output.left_out import LARGE_OBJECTS_REMEDY
from cutline.cli.output.restore_report import lines_of as restore_lines
from cutline.nodes.connections import with_database
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.conftest import FleetFactory

NAME = "named"
END_SECONDS_MAX = 30
RULES = '[groups]\nexclude = ["audit.*"]\nappend_only = ["public.log"]\n'
WARNING = (
    "warning: only inserts and truncates are captured, not updates and deletes (after ALTER TABLE … REPLICA IDENTITY"
    " FULL, the next increment copies the table again and captures all changes): public.log"
)

SCHEMA = """
CREATE ROLE app;
CREATE SCHEMA audit;
CREATE TABLE audit.entry (id int PRIMARY KEY);
INSERT INTO audit.entry VALUES (1);
CREATE TABLE log (what text);
INSERT INTO log VALUES ('first');
CREATE UNLOGGED TABLE cache (id serial PRIMARY KEY, v text);
INSERT INTO cache (v) VALUES ('a'), ('b');
CREATE UNLOGGED SEQUENCE ticket;
SELECT nextval('ticket'), nextval('ticket');
CREATE FOREIGN DATA WRAPPER nothing;
CREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing;
CREATE USER MAPPING FOR CURRENT_USER SERVER elsewhere;
CREATE FOREIGN TABLE remote (id int) SERVER elsewhere;
CREATE TABLE parent (id int, day date, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);
CREATE TABLE parent_1 PARTITION OF parent FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE TABLE parent_2 PARTITION OF parent FOR VALUES FROM ('2026-02-01') TO ('2026-03-01') PARTITION BY LIST (id);
INSERT INTO parent VALUES (1, '2026-01-05');
CREATE TABLE spread (id int) PARTITION BY LIST (id);
CREATE FOREIGN TABLE spread_remote PARTITION OF spread FOR VALUES IN (1) SERVER elsewhere;
CREATE MATERIALIZED VIEW totals AS SELECT count(*) AS n FROM account;
CREATE VIEW happy AS SELECT id FROM account;
CREATE TABLE of_extension (id int PRIMARY KEY);
ALTER EXTENSION plpgsql ADD TABLE of_extension;
INSERT INTO of_extension VALUES (1);
SELECT lo_create(0), lo_create(0);
CREATE FUNCTION noted() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN END $$;
CREATE EVENT TRIGGER noted ON ddl_command_end EXECUTE FUNCTION noted();
CREATE FUNCTION twice(int) RETURNS int LANGUAGE sql RETURN $1 * 2;
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE POLICY own ON account USING (true);
CREATE RULE quiet AS ON DELETE TO audit.entry DO INSTEAD NOTHING;
CREATE STATISTICS related ON id, balance FROM account;
CREATE PUBLICATION theirs FOR TABLE account;
CREATE SUBSCRIPTION ours CONNECTION 'dbname=nowhere' PUBLICATION theirs WITH (connect = false);
CREATE CAST (mood AS int) WITH INOUT;
COMMENT ON TABLE account IS 'what everybody has';
GRANT SELECT ON account TO app;
ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO app;
ALTER DATABASE bank SET work_mem = '5MB';
ALTER ROLE app IN DATABASE bank SET search_path = 'audit';
GRANT CONNECT ON DATABASE bank TO app;
COMMENT ON DATABASE bank IS 'money';
ALTER DATABASE bank OWNER TO app
"""
EXPECTED = {
    ("excluded_table", "audit.entry"),
    ("unlogged_table", "public.cache"),
    ("unlogged_sequence", "public.cache_id_seq"),
    ("unlogged_sequence", "public.ticket"),
    ("foreign_table", "public.remote"),
    ("foreign_table", "public.spread_remote"),
    ("extension_table", "public.of_extension"),
    ("temporary_tables", "pg_temp"),
    ("large_objects", "pg_largeobject"),
    ("subscription", "ours"),
    ("append_only_table", "public.log"),
}
# Everything in a database except rows, by type and by a name that does not depend on oids.
OBJECTS_QUERY = """
SELECT DISTINCT o.type, o.identity
  FROM (SELECT classid, objid, objsubid FROM pg_depend UNION SELECT classid, objid, objsubid FROM pg_shdepend
         WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION SELECT 'pg_class'::regclass, oid, 0 FROM pg_class UNION SELECT 'pg_proc'::regclass, oid, 0 FROM pg_proc
        UNION SELECT 'pg_type'::regclass, oid, 0 FROM pg_type) AS d
 CROSS JOIN pg_identify_object(d.classid, d.objid, d.objsubid) AS o
 WHERE o.type <> 'large object' AND o.identity !~ '^(pg_catalog|pg_toast|information_schema)[.]'
   AND o.identity !~ 'toast'
UNION ALL SELECT 'comment', objoid::regclass::text FROM pg_description
 WHERE classoid = 'pg_class'::regclass AND objoid > 16384
UNION ALL SELECT 'privileges', oid::regclass::text || relacl::text FROM pg_class
 WHERE relacl IS NOT NULL AND oid > 16384
UNION ALL SELECT 'populated', oid::regclass::text FROM pg_class WHERE relkind = 'm' AND relispopulated
UNION ALL SELECT 'large objects', count(*)::text FROM pg_largeobject_metadata
UNION ALL SELECT 'setting', array_to_string(setconfig, ',') FROM pg_db_role_setting g
  JOIN pg_database b ON b.oid = g.setdatabase AND b.datname = current_database()
UNION ALL SELECT 'subscription', subname FROM pg_subscription
  JOIN pg_database b ON b.oid = subdbid AND b.datname = current_database()
UNION ALL SELECT 'sequence ' || sequencename, last_value::text FROM pg_sequences
UNION ALL SELECT 'database', 'owner ' || pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()
UNION ALL SELECT 'database', 'privileges ' || datacl::text FROM pg_database WHERE datname = current_database()
UNION ALL SELECT 'database', 'comment ' || shobj_description(oid, 'pg_database') FROM pg_database
 WHERE datname = current_database()
"""


def rows(dsn: str, query: str) -> set[tuple[Any, ...]]:
    with psycopg.connect(dsn, options="-c search_path=pg_catalog") as connection:
        return set(connection.execute(query.encode()).fetchall())


def names_of(left_out: tuple[LeftOut, ...] | None) -> set[tuple[str, str]]:
    assert left_out is not None
    assert {one.node for one in left_out} <= {"s1"}
    found = [(str(one.kind), one.name) for one in left_out]
    assert len(found) == len(set(found))
    return set(found)


@pytest.fixture
def runs(fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path) -> Runs:
    embedded = fleet_factory(shards=1, backups=0)
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=RULES)
    server = with_database(fleet.nodes[0], "postgres").dsn
    # An in-place tablespace needs no directory outside the data directory.
    execute(server, "SET allow_in_place_tablespaces = on", "CREATE TABLESPACE slow LOCATION ''")
    execute(server, "ALTER DATABASE bank SET TABLESPACE slow")
    execute(fleet.nodes[0].dsn, *SCHEMA.split(";\n"))
    found = Runs(fleet, Ready(spark))
    found.init()
    return found


def test_everything_that_is_not_restored_is_named(runs: Runs) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)
    with psycopg.connect(source) as session:
        session.execute("CREATE TEMPORARY TABLE passing (id int)")
        session.commit()
        code, document = run_here(runs.fleet, "create", NAME, "--dry-run")
        assert code == 0
        assert {(one["kind"], one["name"]) for one in document["left_out"]} == EXPECTED
        commit = runs.full(NAME)
    assert names_of(commit.left_out) == EXPECTED
    assert read_chain(runs.fleet.store.open(), NAME).left_out == commit.left_out
    assert_every_line(create_lines(commit))
    # The backend drops its temporary tables only after the client has disconnected.
    deadline = time.monotonic() + END_SECONDS_MAX
    while rows(source, "SELECT FROM pg_class WHERE relname = 'passing'"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = rows(source, OBJECTS_QUERY)

    target = replace(runs.fleet, nodes=(with_database(runs.fleet.nodes[0], "back"),))
    report = runs.restore(NAME, target)
    assert_every_line(restore_lines(report))
    (restored,) = (node.dsn for node in target.nodes)
    assert_nothing_else_is_missing(before, rows(restored, OBJECTS_QUERY))
    for table in ("audit.entry", "public.cache", "public.parent", "public.log"):
        (count,) = rows(restored, f"SELECT count(*) FROM {table}")
        assert count == (1 if table in ("public.parent", "public.log") else 0,), table
    assert rows(restored, "SELECT n FROM public.totals") == rows(source, "SELECT n FROM public.totals")

    assert_an_increment_names_what_it_leaves_out(runs, source)
    assert_every_output_warns_of_append_only_tables(runs)


def assert_every_line(lines: list[str]) -> None:
    """The text has every name, and one line per kind."""
    shown = [line for line in lines if line.startswith(("not in the snapshot: ", "warning: "))]
    assert len(shown) == len({kind for kind, _ in EXPECTED})
    for kind, name in EXPECTED - {("large_objects", "pg_largeobject"), ("temporary_tables", "pg_temp")}:
        assert any(name in line for line in shown), (kind, name)
    assert "not in the snapshot: 1 temporary table (session-local, not restored): 1 on s1" in shown
    assert f"not in the snapshot: 2 large objects (not restored): 2 on s1; {LARGE_OBJECTS_REMEDY}" in shown
    sequences = "public.cache_id_seq on s1; public.ticket on s1"
    assert f"not in the snapshot: 2 unlogged sequences (restart at their initial value): {sequences}" in shown
    assert WARNING in shown


def assert_nothing_else_is_missing(before: set[tuple[Any, ...]], after: set[tuple[Any, ...]]) -> None:
    """The restored database lacks what was named, and nothing else."""
    missing = {f"{kind}: {name}" for kind, name in before - after}
    explained = {
        "large objects: 2",
        "subscription: ours",
        "sequence ticket: 2",
        "sequence cache_id_seq: 2",
    }
    # Only the extension's own script could create its table again, and this extension's script does not.
    of_extension = {one for one in missing if re.search(r"\bof_extension", one)}
    assert "table: public.of_extension" in of_extension
    assert missing == explained | of_extension


def assert_an_increment_names_what_it_leaves_out(runs: Runs, source: str) -> None:
    execute(
        source,
        "CREATE UNLOGGED TABLE later (id int)",
        "SELECT lo_create(0)",
        "DROP FOREIGN TABLE remote",
        "ALTER SEQUENCE ticket SET LOGGED",
    )
    commit = runs.increment(NAME)
    new = {("unlogged_table", "public.later")}
    dropped = {
        ("foreign_table", "public.remote"),
        ("unlogged_sequence", "public.ticket"),
        ("temporary_tables", "pg_temp"),
    }
    assert names_of(commit.left_out) == (EXPECTED | new) - dropped
    (large,) = (one for one in commit.left_out or () if one.kind == LeftOutKind.LARGE_OBJECTS)
    assert large.count == 3
    assert WARNING in create_lines(commit)


def assert_every_output_warns_of_append_only_tables(runs: Runs) -> None:
    assert WARNING in run_as_text(runs.fleet, "show", NAME)
    # Of several snapshots; what helps is with each.
    assert re.sub(r" \(after .*?\)", "", WARNING) + f" (in {NAME})" in run_as_text(runs.fleet, "list")
    code, document = run_here(runs.fleet, "show", NAME)
    assert (code, document["append_only"]) == (0, ["public.log"])
    assert ("unlogged_table", "public.later") in {(one["kind"], one["name"]) for one in document["left_out"]}
    report = runs.check(NAME)
    assert f"  {WARNING}" in check_lines(report)
    assert report.to_json()["snapshots"][0]["append_only"] == ["public.log"]
    # Nothing is new: what is left out is counted.
    words = ("create", NAME, "--incremental")
    lines = run_as_text(runs.fleet, *words, spark=runs.spark.session()).splitlines()
    assert [line for line in lines if line.startswith(("not in the snapshot", "warning: "))] == []
    (counted,) = [line for line in lines if line.startswith("left out as before: ")]
    assert "3 large objects (not restored)" in counted
    assert counted.endswith(f" show {NAME}")
