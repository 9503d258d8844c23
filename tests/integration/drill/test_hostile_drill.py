"""What owners of tables have put into a snapshot gets nowhere in a drill, and an assertion ends in its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs

import cutline.restore.drill.servers
from cutline.cli.output.restore_report import drill_lines, preview_lines
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.sandbox import find_confinement
from cutline.fleet.config import AssertionTable, DrillTable, Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.fleet.units import Duration
from cutline.nodes.connections import with_database
from cutline.restore.drill.drill import DrillReport, run_drill
from cutline.restore.drill.servers import DrillUnfitError
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import RestorePreview
from tests.commands.snapshot_runs import Ready, Runs
from tests.faults.cancelled_command import cancel_when
from tests.integration.documented_roles import drop_role
from tests.integration.own_database import own_database
from tests.integration.refusing import NoSpark, execute
from tests.integration.restored_shop import ask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, DATABASE = "hostile", "hostile_shop"
CANCEL_SECONDS_MAX = 20.0
DENIED = "42501"
# What is tried, and what PostgreSQL answers a role without privileges: insufficient_privilege, unless it is said.
ATTACKS = {
    "COPY (SELECT 1) TO PROGRAM 'cat > /dev/null'": DENIED,
    "COPY m.taken FROM '/etc/passwd'": DENIED,
    "COPY (SELECT 1) TO '/tmp/planted'": DENIED,
    "SELECT pg_read_file('/etc/passwd')": DENIED,
    "SELECT pg_ls_dir('/')": DENIED,
    "SELECT lo_import('/etc/passwd')": DENIED,
    "SELECT setting FROM pg_file_settings": DENIED,
    "ALTER ROLE CURRENT_USER SUPERUSER": DENIED,
    "GRANT pg_execute_server_program TO CURRENT_USER": DENIED,
    "CREATE ROLE another": DENIED,
    "CREATE EXTENSION file_fdw": DENIED,
    "CREATE FUNCTION m.c() RETURNS int LANGUAGE c AS 'libc.so.6', 'getpid'": DENIED,
    "CREATE FUNCTION m.i() RETURNS int LANGUAGE internal AS 'pg_backend_pid'": DENIED,
    "CREATE EVENT TRIGGER other ON ddl_command_end EXECUTE FUNCTION m.on_ddl()": DENIED,
    "LOAD 'dblink'": DENIED,
    # It belonged to the superuser of the source, whose role is an ordinary one here.
    "SELECT m.as_owner('COPY (SELECT 1) TO PROGRAM ''cat > /dev/null''')": DENIED,
    # Another server lets everybody in, but no role without privileges gets there.
    "SELECT * FROM ext.dblink('{elsewhere}', 'SELECT 1') AS t (i int)": "2F003",
    "SELECT m.guess()": "2F003",
}
# sqlclient_unable_to_establish_sqlconnection: that socket is not there.
GUESS, NO_SOCKET = "SELECT * FROM ext.dblink('{elsewhere} password=guessed', 'SELECT 1') AS t (i int)", "08001"
TO_BECOME = ("SET ROLE %I", "SET SESSION AUTHORIZATION %I", "GRANT %I TO CURRENT_USER")
READ_ONLY = "25006"
PLANTED = """
CREATE FUNCTION m.outcome(what text) RETURNS text LANGUAGE plpgsql AS $$
  BEGIN EXECUTE what; RETURN 'done'; EXCEPTION WHEN OTHERS THEN RETURN SQLSTATE; END $$;
CREATE FUNCTION m.broken() RETURNS TABLE (what text, found text) LANGUAGE sql AS $$
  SELECT what, found FROM (VALUES {attacks}) AS attack (what, expected), m.outcome(what) AS found
   WHERE found NOT IN (expected, '{read_only}', '{no_socket}')
  UNION ALL
  SELECT what, found FROM unnest(ARRAY[{to_become}]) AS how, pg_roles, format(how, rolname) AS what,
         m.outcome(what) AS found
   WHERE rolsuper AND found NOT IN ('{denied}', '{read_only}') $$;
CREATE FUNCTION m.guess() RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM {guess}; END $$;
CREATE FUNCTION m.powers() RETURNS TABLE (what text) LANGUAGE sql AS $$
  SELECT rolname FROM pg_roles
   WHERE rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')
     AND pg_has_role(oid, 'MEMBER')
  UNION ALL SELECT 'attributes' FROM pg_roles
   WHERE rolname = session_user AND (rolsuper OR rolcreaterole OR rolreplication) $$;
CREATE OR REPLACE FUNCTION m.is_safe() RETURNS boolean LANGUAGE plpgsql AS $$
  DECLARE found text;
  BEGIN
    SELECT string_agg(said.what, '; ') INTO found
      FROM (SELECT b.what || ': ' || b.found FROM m.broken() AS b UNION ALL SELECT p.what FROM m.powers() AS p)
        AS said (what);
    IF found <> '' THEN RAISE '%', found; END IF;
    PERFORM lo_create(0);
    RETURN true;
  END $$;
CREATE FUNCTION m.never_ends() RETURNS int LANGUAGE plpgsql AS $$
  BEGIN LOOP BEGIN PERFORM pg_sleep(3600); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; END $$;
"""
# In the source it holds at once.
HELD = """
CREATE FUNCTION m.holds() RETURNS boolean LANGUAGE plpgsql AS $$
  BEGIN IF current_user ^@ 'cutline_drill_' THEN PERFORM m.never_ends(); END IF; RETURN true; END $$;
CREATE TABLE m.held (id int PRIMARY KEY CHECK (m.holds())); INSERT INTO m.held VALUES (1)
"""
ASSERTIONS = (
    AssertionTable("s1", "SELECT what, found FROM m.broken()"),
    AssertionTable("s1", "SELECT what FROM m.powers()"),
    # What m.is_safe has left while the rows were loaded: it has run.
    AssertionTable("s1", "SELECT count(*) FROM pg_largeobject_metadata", 2),
    AssertionTable("s1", "SELECT ext.hstore('a', 'b') IS NOT NULL, count(*) FROM m.checked", ((True, 2),)),
)
OF_PUBLIC = AssertionTable("s1", "SELECT has_schema_privilege('mallory', 'public', 'CREATE')", expected=True)
UNSEEN = AssertionTable("s1", "SELECT m.outcome('SELECT m.guess()')", NO_SOCKET)
ALLOWED = ("dblink",)
# The functions of extensions whose privileges pg_dump writes: none has those that CREATE EXTENSION made any more.
MEMBERS = """
SELECT count(*) FROM pg_proc WHERE pronamespace = 'ext'::regnamespace AND proacl IS NOT NULL
"""


@pytest.fixture(scope="module")
def hostile(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """A snapshot of a database in which an ordinary role has planted what it could, beside what takes a superuser."""
    folder = tmp_path_factory.mktemp("hostile")
    elsewhere = f"host={shared_fleet.primaries[0].folder} port=5432 user=postgres dbname=postgres"
    attacks = {what.replace("{elsewhere}", elsewhere): code for what, code in ATTACKS.items()}
    values = ", ".join(f"($a${what}$a$, '{code}')" for what, code in attacks.items())
    planted = PLANTED.format(
        attacks=values, to_become=", ".join(f"'{how}'" for how in TO_BECOME), read_only=READ_ONLY, denied=DENIED,
        no_socket=NO_SOCKET, guess=GUESS.replace("{elsewhere}", elsewhere).removeprefix("SELECT "),
    )  # fmt: skip
    with own_database(shared_fleet, folder, DATABASE) as fleet:
        (node,) = fleet.nodes
        try:
            execute(
                node.dsn,
                "CREATE ROLE mallory; CREATE SCHEMA m AUTHORIZATION mallory; CREATE SCHEMA ext",
                "CREATE EXTENSION hstore SCHEMA ext; CREATE EXTENSION dblink SCHEMA ext",
                "GRANT USAGE ON SCHEMA ext TO mallory; GRANT EXECUTE ON FUNCTION ext.dblink_connect_u(text) TO mallory",
                "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ext TO mallory",
                "GRANT CREATE ON SCHEMA public TO mallory; GRANT USAGE ON SCHEMA pg_catalog TO mallory",
                "COMMENT ON EXTENSION dblink IS 'ours'",
                "CREATE FUNCTION m.as_owner(what text) RETURNS void SECURITY DEFINER LANGUAGE plpgsql"
                " AS $$ BEGIN EXECUTE what; END $$",
                "SET ROLE mallory",
                "CREATE FUNCTION m.is_safe() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
                "CREATE TABLE m.checked (id int PRIMARY KEY, CHECK (m.is_safe()))",
                "CREATE TABLE m.taken (line text PRIMARY KEY)",
                "CREATE FUNCTION m.on_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'",
                "INSERT INTO m.checked VALUES (1), (2)",
                planted,
                "RESET ROLE",
                "CREATE EVENT TRIGGER seen ON ddl_command_start WHEN TAG IN ('CREATE DOMAIN')"
                " EXECUTE FUNCTION m.on_ddl()",
                "CREATE PUBLICATION everything FOR ALL TABLES",
            )
            runs = Runs(fleet, Ready(spark))
            runs.init()
            runs.full(NAME, only_primary=True)
            yield runs
        finally:
            execute(node.dsn, "DROP SCHEMA m CASCADE; DROP SCHEMA ext CASCADE; DROP OWNED BY mallory")
            drop_role(with_database(node, "postgres").dsn, "mallory")


def drill(
    runs: Runs,
    own: Fleet | None = None,
    announce: Callable[[RestorePlan, RestorePreview], None] | None = None,
    **rules: object,
) -> DrillReport:
    fleet = replace(runs.fleet, drill=structs.replace(DrillTable(extensions=ALLOWED), **rules))
    return run_drill(fleet, RestoreRequest(NAME), runs.spark, Silent(), announce, own=own)


def test_owners_code_has_no_power_while_rows_are_loaded_nor_when_assertions_are_asked(
    hostile: Runs, tmp_path: Path
) -> None:
    unseen = (UNSEEN,) if find_confinement(tmp_path).namespaces else ()
    shown: list[str] = []

    def announce(plan: RestorePlan, preview: RestorePreview) -> None:
        shown.extend(preview_lines(plan, preview))

    report = drill(hostile, announce=announce, assertion=(*ASSERTIONS, OF_PUBLIC, *unseen))
    assert [(one.holds, one.why, one.found) for one in report.assertions if not one.holds] == []
    # What only a superuser creates is not tried, and named.
    left_out = "\n".join(report.restored.left_out)
    for what in ("event trigger seen on s1", "publication everything on s1", "dblink_connect_u"):
        assert what in left_out, left_out
    of_extensions = [
        one for one in report.restored.left_out if one.endswith(" in schema ext on s1: it belongs to an extension")
    ]
    (count,) = ask(hostile.fleet.nodes[0].dsn, MEMBERS)[0]
    assert len(of_extensions) == len(set(of_extensions)) == count
    # People read the number, once.
    crowd = f"left out: privileges of {count} objects of extensions in schema ext on s1: --json lists all of them"
    lines = [one for one in (*shown, *drill_lines(report)) if one.startswith("left out: ")]
    assert lines.count(crowd) == 1
    assert len(lines) == len(set(lines)) == len(report.restored.left_out) - count + 1
    # Schema public belongs to no extension: it has its privileges.
    assert 'left out: privileges of SCHEMA "pg_catalog" on s1: only a superuser can grant them' in lines
    assert 'SCHEMA "public"' not in left_out


def test_nor_has_it_any_on_servers_of_ones_own(hostile: Runs) -> None:
    # Its server has a file system of its own in the test before; here it is the machine's.
    assert not Path("/tmp/planted").exists()
    report = drill(hostile, hostile.fleet, assertion=ASSERTIONS)
    assert not Path("/tmp/planted").exists()
    assert [(one.holds, one.why, one.found) for one in report.assertions if not one.holds] == []


def test_an_extension_that_is_not_trusted_is_refused_before_anything_runs(hostile: Runs) -> None:
    fleet = replace(hostile.fleet, drill=DrillTable())
    with pytest.raises(DrillUnfitError, match="extensions of the snapshot are not trusted: dblink") as raised:
        run_drill(fleet, RestoreRequest(NAME), NoSpark(), Silent())
    hint = raised.value.hint.splitlines()
    assert hint[0].endswith('[drill] extensions = ["dblink"] in fleet.toml')
    assert hint[1] == "or restore without them: --allow-refused-ddl"
    assert hint[2].endswith(f"snapshot drill {NAME} --to FILE")


def test_an_assertion_whose_function_swallows_its_cancellation_ends_with_its_session_or_its_server(
    hostile: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = AssertionTable("s1", "SELECT m.never_ends()", timeout=Duration(1))
    count = AssertionTable("s1", "SELECT count(*) FROM m.checked", 2)
    first, second = drill(hostile, assertion=(endless, count)).assertions
    assert (first.holds, first.why, second.holds) == (False, "no answer after 1 s, so its session was terminated", True)
    assert 1 <= first.seconds < 10
    # Of a function in C, say, that never looks whether it is to end.
    monkeypatch.setattr(cutline.restore.drill.servers, "TERMINATE", "SELECT %s < 0 AND %s < 0")
    report = drill(hostile, assertion=(endless, count))
    first, second = report.assertions
    assert (first.holds, second.holds) == (False, None)
    assert second.why == "not run: the server was stopped because an earlier assertion never finished"
    assert report.result == "fails"


def test_a_drill_is_cancelled_whose_load_a_check_holds_for_ever(hostile: Runs, tmp_path: Path) -> None:
    (node,) = hostile.fleet.nodes
    execute(node.dsn, HELD)
    try:
        hostile.full("held", only_primary=True)
    finally:
        execute(node.dsn, "DROP TABLE m.held")
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'{hostile.fleet.path.read_text()}\n[drill]\nextensions = ["dblink"]\n')
    held = "SELECT count(*) FROM pg_stat_activity WHERE usename ^@ 'cutline_drill_' AND wait_event = 'PgSleep'"

    def is_held() -> bool:
        with psycopg.connect(with_database(node, "postgres").dsn) as connection:
            return connection.execute(held.encode()).fetchone() != (0,)

    words = ("drill", "held", "--to", str(hostile.fleet.path))
    run = cancel_when(load_fleet(fleet), is_held, *words, spark=hostile.spark.running)
    assert (run.code, run.results, is_held()) == (8, ["cancelled"], False), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    with psycopg.connect(with_database(node, "postgres").dsn) as connection:
        query = "SELECT datname FROM pg_database UNION SELECT rolname FROM pg_roles"
        assert [name for (name,) in connection.execute(query) if "cutline_drill" in name] == []
