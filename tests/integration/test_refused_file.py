"""The file of refused statements, run with psql once the target is mended, makes what the restore could not."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import cutline.restore.run.refused
from cutline.cli.output.refused_statements import READING, write_refused
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool, tool
from cutline.nodes.watch import watch_nodes
from cutline.restore.ddl.database_ddl import DatabaseDdl
from cutline.restore.ddl.ddl import PRE_DATA, DdlEntry, Refusal
from cutline.restore.ddl.running import EARLIER, DdlRun
from cutline.restore.ddl.statements import is_statements_alone
from cutline.restore.plan.checked_ddl import CheckedDdl
from cutline.restore.plan.report import RefusedStatement, describe_refusals
from cutline.restore.targets.target import target_of
from cutline.snapshots.records.commit import DatabasePrivilege, DatabaseProperties
from tests.commands.ddl_runs import NOTHING, dumped_ddl
from tests.integration.refusing import execute

SOURCE, AGAIN, ROLE = "refused_source", "refused_again", "refused_owner"
# What a connection string, psql and SQL each quote.
ODD = """refused odd ' " \\ :USER é"""
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
    path, _ = write_refused("operation", refused, tmp_path, is_published=True)
    execute(again.dsn, MENDED)
    run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={path}", source.dsn)
    execute(source.dsn, MENDED)
    assert schema_of(again) == schema_of(source)
    with psycopg.connect(again.dsn) as connection:
        assert connection.execute(FACTS_QUERY).fetchall() == [(321, "f", ROLE, "é")]


@pytest.fixture
def two(source: Node) -> Iterator[list[Node]]:
    """Two databases that have the same empty table."""
    maintenance = with_database(source, "postgres")
    nodes = [replace(with_database(source, name), id=f"s{number}") for number, name in enumerate((AGAIN, ODD), 1)]
    quoted = quote_identifier(ODD)
    try:
        execute(maintenance.dsn, f"CREATE DATABASE {quoted}")
        for node in nodes:
            execute(node.dsn, "CREATE TABLE job (id int PRIMARY KEY, v text)")
        yield nodes
    finally:
        execute(maintenance.dsn, f"DROP DATABASE IF EXISTS {quoted} WITH (FORCE)")


def refused_rows(node: Node, *before: str) -> list[RefusedStatement]:
    """What is written of a node whose rows were refused, after entries `before`: they say whose they are."""
    insert = f"INSERT INTO public.job VALUES (1, '{node.id}') ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v;\n"
    entries = [DdlEntry(number, "TABLE DATA", "public", "job", text) for number, text in enumerate([*before, insert])]
    refusals = [Refusal(one, PRE_DATA, "no", one.statements) for one in entries]
    return describe_refusals(target_of(node.id, node, (), "0" * 32), refusals)


def rows_of(node: Node) -> list[str]:
    with psycopg.connect(node.dsn) as connection:
        return [v for (v,) in connection.execute("SELECT v FROM job")]


def run_psql(*arguments: str, settings: str = os.devnull) -> subprocess.CompletedProcess[str]:
    """Run psql with this file in the place of ~/.psqlrc."""
    command, environment = [*tool("psql"), "--quiet", *arguments], os.environ | {"PSQLRC": settings}
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=60, check=False, env=environment
    )


def test_statements_of_each_node_run_in_its_database_alone(two: list[Node], tmp_path: Path) -> None:
    path, line = write_refused("all", [*refused_rows(two[0]), *refused_rows(two[1])], tmp_path, is_published=True)
    # As the line has it, and from any other database.
    words = shlex.split(line.partition("then run: ")[2])
    assert words[:4] == ["psql", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={path}"]
    for access in (words[4], two[1].dsn, with_database(two[0], "postgres").dsn):
        done = run_psql(f"--file={path}", "--dbname", access)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert [rows_of(node) for node in two] == [["s1"], ["s2"]]
        for node in two:
            execute(node.dsn, "TRUNCATE job")


@pytest.mark.parametrize("lost", ["port=1", "sslmode=unknown"])
def test_without_the_node_nothing_runs_in_the_database_before(two: list[Node], tmp_path: Path, lost: str) -> None:
    gone = replace(two[0], dsn=f"{two[0].dsn} {lost}")
    path, _ = write_refused("gone", refused_rows(gone), tmp_path, is_published=True)
    done = run_psql(f"--file={path}", "--dbname", two[1].dsn)
    assert done.returncode == 3, done
    assert [rows_of(node) for node in two] == [[], []]


def test_it_is_done_whatever_the_user_has_set_for_psql(two: list[Node], tmp_path: Path) -> None:
    settings = tmp_path / "psqlrc"
    settings.write_text("\\set AUTOCOMMIT off\n\\set ON_ERROR_ROLLBACK on\n\\set SINGLELINE on\n")
    before = "INSERT INTO public.job\nVALUES (2, 'on two lines');\nINSERT INTO public.job VALUES ('a', '');\n"
    path, _ = write_refused("psqlrc", refused_rows(two[0], before), tmp_path, is_published=True)
    for stop, code in (("0", 0), ("1", 3)):
        done = run_psql(f"--set=ON_ERROR_STOP={stop}", f"--file={path}", two[1].dsn, settings=str(settings))
        assert done.returncode == code, done
        assert rows_of(two[0]) == (["on two lines"] if code else ["on two lines", "s1"])
        execute(two[0].dsn, "TRUNCATE job")


def test_before_the_databases_have_their_names_nothing_runs(two: list[Node], tmp_path: Path) -> None:
    """A database that has the name is the one that is replaced."""
    path, line = write_refused("unfinished", refused_rows(two[0]), tmp_path, is_published=False)
    assert line == f"the refused statements are in {path}"
    done = run_psql(f"--file={path}", "--dbname", two[0].dsn)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert rows_of(two[0]) == []
    assert "INSERT INTO public.job VALUES (1, 's1')" in Path(path or "").read_text()


# By each of them psql takes the line that begins with a backslash for its own, in one way of reading SQL or another.
COMMAND = "\\! touch {marker}"
HOSTILE = {
    "comment": (f"SELECT 1;-- x\r{COMMAND}",),
    "two entries": ("SELECT '", f"SELECT '\n{COMMAND}\n'"),
    "copy": (f"CREATE TEMP TABLE x (a text); COPY x FROM STDIN;\nSELECT '\n\\.\n{COMMAND}\n';",),
    "setting": (f"SET standard_conforming_strings = off;\nSELECT '\\'' ;\n{COMMAND}\n--';",),
    "variable": (f"DO $$ BEGIN RAISE EXCEPTION '{COMMAND}'; END $$;\n:LAST_ERROR_MESSAGE\n;",),
    "number": (f"SELECT 1E'\\';\n{COMMAND}\n--';",),
}


@pytest.mark.parametrize("is_checked", [True, False])
def test_no_statement_runs_a_program(
    two: list[Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_checked: bool,  # noqa: FBT001
) -> None:
    """Whoever can write to a store that is not encrypted chooses the statements. psql's restrict mode is enough."""
    if not is_checked:
        monkeypatch.setattr("cutline.cli.output.refused_statements.is_statements_alone", lambda _: True)
    for name, entries in HOSTILE.items():
        marker = tmp_path / name.replace(" ", "_")
        refused = refused_rows(two[0], *(one.format(marker=marker) for one in entries))
        path, _ = write_refused(name, [*refused, *refused_rows(two[1])], tmp_path, is_published=True)
        run_psql(f"--file={path}", "--dbname", two[0].dsn)
        assert not marker.exists(), name
        if is_checked:
            # Without the statements that were left out, the others ran.
            assert [rows_of(node) for node in two] == [["s1"], ["s2"]], name
        else:
            # Without it each does run one.
            script = Path(path or "").read_bytes().split(b"\n")
            removed = (b"\\restrict", b"\\unrestrict", READING.strip().encode())
            kept = [line for line in script if not line.startswith(removed)]
            Path(path or "").write_bytes(b"\n".join(kept))
            run_psql(f"--file={path}", "--dbname", two[0].dsn)
            assert marker.exists(), name
        for node in two:
            execute(node.dsn, "TRUNCATE job")


def test_what_belongs_to_the_database_is_in_its_encoding(
    source: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was an earlier process of the restore that was refused it."""
    again, role = with_database(source, AGAIN), "refused_né"
    grant = DatabasePrivilege(grantor="", grantee=role, privilege="CONNECT", with_grant_option=False)
    database = DatabaseDdl(AGAIN, DatabaseProperties(owner="", privileges=(grant,)), "postgres")
    ddl, target = structs.replace(NOTHING, database=database), target_of("s1", again, (), "0" * 32)
    with watch_nodes([source]) as watch, psycopg.connect(source.dsn) as connection:
        run = DdlRun(again, ddl, watch)
        run.all_sections()
        (refused,) = describe_refusals(target, run.refusals.values())
        assert refused.reason.endswith("does not exist")
        assert f'TO "{role}"' in refused.statement
        monkeypatch.setattr(cutline.restore.run.refused, "plan_database", lambda *_: None)
        monkeypatch.setattr(cutline.restore.run.refused, "read_all_ddl", lambda *_: CheckedDdl({"s1": ddl}))
        baseline = {target.source: SimpleNamespace(encoding="LATIN1")}
        plan = SimpleNamespace(chain=SimpleNamespace(baseline=baseline))
        resumed: Any = SimpleNamespace(plan=plan, connections={"s1": connection}, folder=tmp_path)
        (earlier,) = cutline.restore.run.refused._describe_earlier(resumed, target, [refused.object])
    assert (earlier.reason, earlier.script) == (EARLIER, refused.script)
    path, _ = write_refused("database", [refused], tmp_path, is_published=True)
    in_utf8 = make_conninfo(again.dsn, client_encoding="UTF8")
    try:
        execute(in_utf8, f'CREATE ROLE "{role}"')
        done = run_psql("--set=ON_ERROR_STOP=1", f"--file={path}", source.dsn)
        assert (done.returncode, done.stderr) == (0, "")
        with psycopg.connect(again.dsn) as connection:
            query = "SELECT array_to_string(datacl, ' ') FROM pg_database WHERE datname = current_database()"
            assert f"{role}" in connection.execute(query).fetchone()[0]  # type: ignore[index]  # one row
    finally:
        execute(in_utf8, f'REVOKE ALL ON DATABASE {AGAIN} FROM "{role}"', f'DROP ROLE "{role}"')


# psql takes what follows each of them for a part of it, or of its data, or of a transaction that is not committed.
JOINING = (
    "SELECT 1$a$;",
    "SELECT $1$a$;",
    "CREATE /**/ FUNCTION f() RETURNS int BEGIN ATOMIC;",
    "CREATE :a FUNCTION f() RETURNS int BEGIN ATOMIC;",
    "SELECT (1;",
    "SELECT :E'\\';';",
    "DO $$BEGIN RAISE EXCEPTION ''''; END$$;\nSELECT :LAST_ERROR_MESSAGE;",
    "COPY job FROM STDIN;",
    "BEGIN;",
)


def test_no_statement_takes_in_what_follows(two: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(JOINING):
        refused = [*refused_rows(two[0], text), *refused_rows(two[1])]
        path, _ = write_refused(f"left-out-{number}", refused, tmp_path, is_published=True)
        done = run_psql(f"--file={path}", "--dbname", two[0].dsn)
        assert (done.returncode, done.stderr) == (0, ""), (text, done)
        assert [rows_of(node) for node in two] == [["s1"], ["s2"]], text
        for node in two:
            execute(node.dsn, "TRUNCATE job")
        with monkeypatch.context() as context:
            context.setattr("cutline.cli.output.refused_statements.is_statements_alone", lambda _: True)
            path, _ = write_refused(f"joined-{number}", refused, tmp_path, is_published=True)
        run_psql(f"--file={path}", "--dbname", two[0].dsn)
        assert [rows_of(node) for node in two] != [["s1"], ["s2"]], text
        for node in two:
            execute(node.dsn, "TRUNCATE job")


def test_no_statement_changes_how_psql_reads_the_next_one(two: list[Node], tmp_path: Path) -> None:
    """Whatever a function has set, a backslash is none that escapes, and bytes are not those of another encoding."""
    for setting in ("'standard_conforming_strings', 'off'", "'client_encoding', 'SJIS'"):
        before = (
            f"CREATE TABLE public.made AS SELECT pg_catalog.set_config({setting}, false);\n"
            # In SJIS the last byte of the letter and the quote are one character.
            "INSERT INTO public.job VALUES (2, 'c:\\');\nINSERT INTO public.job VALUES (3, 'Á');\n"
        )
        path, _ = write_refused("reading", refused_rows(two[1], before), tmp_path, is_published=True)
        done = run_psql("--set=ON_ERROR_STOP=1", f"--file={path}", two[0].dsn)
        assert (done.returncode, done.stderr) == (0, ""), (setting, done)
        assert rows_of(two[1]) == ["c:\\", "Á", "s2"], setting
        execute(two[1].dsn, "TRUNCATE job", "DROP TABLE made")


# What dumps have of all that matters to where a statement ends.
KEPT = (
    "CREATE FUNCTION quotes() RETURNS text LANGUAGE sql AS $a$SELECT $$ ' ; $_$ \\'$$ || $_$ \" $_$ -- it's\n$a$",
    "CREATE FUNCTION body(i int) RETURNS int BEGIN ATOMIC SELECT CASE WHEN i > 1.5e10 THEN 1 ELSE 2 END; SELECT 3; END",
    "CREATE PROCEDURE \"begin\"() BEGIN ATOMIC SELECT 'end;' AS x -- end\n; END",
    "CREATE TABLE \"begin\" (begin int DEFAULT 1, b bit(3) DEFAULT B'101', c text DEFAULT 'c:\\',"
    " d text DEFAULT E'a\\nb\\\\''', e text CHECK (e ~ '^\\w+$'), \"Low\" int, a int[])",
    'CREATE VIEW slices AS SELECT a[1:2] AS x, a["Low":begin] AS y, b & B\'1\'::bit(3) AS "é;" FROM "begin"',
    'COMMENT ON TABLE "begin" IS $$it\'s -- a /* $_$ " \\ ; \\! :USER\n\\connect x\n$$',
    f'GRANT SELECT ON "begin" TO {ROLE} WITH GRANT OPTION',
    f"SET ROLE {ROLE}",
    'GRANT SELECT ON "begin" TO PUBLIC',
    "RESET ROLE",
    "CREATE RULE odd AS ON INSERT TO \"begin\" DO (SELECT 1; SELECT ';')",
)


def test_every_statement_of_a_dump_is_kept(source: Node, tmp_path: Path) -> None:
    execute(source.dsn, MENDED, *KEPT)
    again = with_database(source, AGAIN)
    with watch_nodes([source]) as watch:
        ddl = dumped_ddl(source, tmp_path, watch)
    refusals = [Refusal(entry, name, "no", "") for name, entries in ddl.sections.items() for entry in entries]
    refused = describe_refusals(target_of("s1", again, (), "0" * 32), refusals)
    assert [one.script for one in refused if not is_statements_alone(one.script)] == []
    path, _ = write_refused("dump", refused, tmp_path, is_published=True)
    run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={path}", source.dsn)
    assert schema_of(again) == schema_of(source)


def test_psql_without_a_restrict_mode_runs_nothing(two: list[Node], tmp_path: Path) -> None:
    path, _ = write_refused("old", refused_rows(two[0]), tmp_path, is_published=True)
    script = Path(path or "")
    # To it the command is unknown.
    script.write_text(script.read_text().replace("\\restrict", "\\unknown"))
    done = run_psql(f"--file={path}", "--dbname", two[0].dsn)
    assert (done.returncode, rows_of(two[0])) == (3, []), done


def test_a_superuser_runs_what_an_ordinary_role_was_refused(two: list[Node], tmp_path: Path) -> None:
    execute(two[0].dsn, f"ALTER ROLE {ROLE} LOGIN")
    ordinary = replace(two[0], dsn=make_conninfo(two[0].dsn, user=ROLE))
    path, line = write_refused("role", refused_rows(ordinary), tmp_path, is_published=True)
    command = shlex.split(line.partition("then run: ")[2])[1:]
    # Whoever starts psql.
    done = run_psql(*command[:-1], two[0].dsn)
    assert done.returncode == 3, done
    assert "permission denied for table job" in done.stderr
    script = Path(path or "")
    lines = script.read_text().splitlines(keepends=True)
    (number,) = (number for number, text in enumerate(lines) if "change the user in the next line" in text)
    superuser = conninfo_to_dict(two[0].dsn)["user"]
    lines[number + 1] = lines[number + 1].replace(f"user={ROLE}", f"user={superuser}")
    script.write_text("".join(lines))
    done = run_psql(*command)
    assert (done.returncode, done.stderr, rows_of(two[0])) == (0, "", ["s1"])
