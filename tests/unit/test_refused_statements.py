"""Refused statements: no password that may be in one is shown, and the file of them has each as it was."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from cutline.cli.output.refused_statements import write_refused
from cutline.fleet.config import Node
from cutline.restore.ddl.ddl import POST_DATA, PRE_DATA, DdlEntry, Refusal
from cutline.restore.ddl.statements import statements_of
from cutline.restore.plan.report import describe_refusals
from cutline.restore.run.refused import DdlRefusedError
from cutline.restore.targets.target import target_of
from cutline.storage.errors import remember_secret

SECRET, WORD = "hunter2", "forgotten"
SERVER = f"""CREATE SERVER "far" FOREIGN DATA WRAPPER "w" OPTIONS (\n    "token" '{SECRET}'\n);"""
MAPPING = f"""CREATE USER MAPPING FOR "bob" SERVER "far" OPTIONS (\n    "password" '{SECRET}',\n    "user" 'bob'\n);"""
LONG = f"CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$SELECT '{WORD}{'x' * 30_000}'$$;"
NODE = Node("s1", f"dbname=shop host=db1 user=restorer password={SECRET}")


def refusals() -> list[Refusal]:
    entries = [
        DdlEntry(1, "SERVER", "", "far", SERVER),
        DdlEntry(2, "USER MAPPING", "", "bob SERVER far", MAPPING, (1,)),
        DdlEntry(3, "FUNCTION", "public", "f()", LONG),
    ]
    return [
        Refusal(entries[0], PRE_DATA, "no such wrapper", SERVER),
        Refusal(entries[1], PRE_DATA, "it needs SERVER far", "", needs="SERVER far"),
        Refusal(entries[2], POST_DATA, "no", LONG),
    ]


def test_no_password_of_a_refused_statement_is_shown() -> None:
    found = describe_refusals(target_of("s1", NODE, (), "0" * 32), refusals())
    error = DdlRefusedError("refused", found)
    shown = [one.text() for one in refusals()] + [one.text() for one in found]
    for text in (*shown, repr(found), json.dumps([one.document() for one in found]), json.dumps(error.details)):
        assert SECRET not in text
    assert shown[0] == 'SERVER far: no such wrapper (CREATE SERVER "far" FOREIGN DATA WRAPPER "w" OPTIONS (…);)'


def test_the_file_of_refused_statements_can_be_run(tmp_path: Path) -> None:
    """It is for its user alone, and neither cut off nor redacted as an error's details are."""
    remember_secret(WORD)
    error = DdlRefusedError("refused", describe_refusals(target_of("s1", NODE, (), "0" * 32), refusals()))
    path, _ = write_refused("operation", error.refused, tmp_path, is_published=True)
    assert path is not None
    written = Path(path).read_text()
    assert all(one in written for one in (SERVER, MAPPING, LONG))
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("script", "is_sql"),
    [
        ("INSERT INTO t VALUES\n('\\! touch x'),\n(E'\\'\n\\! touch x');", True),
        ("CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$SELECT '\n\\! touch x'$$; -- \\! touch x", True),
        ('COMMENT ON TABLE "a\n\\! touch x" IS NULL; /* \\! touch x */', True),
        ("INSERT INTO t VALUES\n('1');\n\\! touch x\n", False),
        ("SELECT 1 \\g |touch", False),
        ("SELECT '\\' \\! touch x", False),
        ("SELECT $a$ $b$ $a$\\! touch x $b$", False),
        ("SELECT 1;-- x\r\\! touch x", False),
        ("SELECT 1\0;", False),
        ("SELECT E'a''\\' \\! touch x';", True),
        ("SELECT E'\\';\n\\! touch x\n--';", True),
        ("SELECT 1E'\\';\n\\! touch x\n--';", False),
        ("SELECT 1.E'\\';\n\\! touch x\n--';", False),
        ("SELECT B'1', 1e5, -1.5e+10, .5, date 'today', a[1:2], $1, \"E\".\"b\" FROM copy -- it's\n;", True),
        ("SELECT 'it''s', '', '''', 'c:\\', '1'::\"bit\", '2'::\"INT\", \"a\"[\"lo\":\"Hi\"];", True),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 2; END;", True),
        ("CREATE OR REPLACE PROCEDURE f(begin int)\nBEGIN ATOMIC SELECT 1 /* end */; -- end\n END;", True),
        ('CREATE TABLE "begin" (begin int);\nCREATE TRIGGER begin EXECUTE FUNCTION f();', True),
        ("CREATE FUNCTION f() AS $$a$a$ $b$$; CREATE FUNCTION f() AS $é$;'$$ $$é$;", True),
        ("SELECT 1; /* a /* b */ */ -- c", True),
        ("-- it's\n/* it's */ SELECT 1;", True),
        ("-- it's\n", True),
        ("SELECT 1", False),
        ("SELECT (1;", False),
        ("SELECT '", False),
        ("SELECT E'a\\", False),
        ('SELECT "', False),
        ("SELECT $$;", False),
        ("SELECT 1; /* /* */", False),
        ("COPY x FROM STDIN;", False),
        ("SELECT 1; -- a\n/* b */ copy x FROM STDIN;", False),
        ("'a' COPY x FROM STDIN;", False),
        ("BEGIN;", False),
        ("SET standard_conforming_strings = off;", False),
        ('SET SESSION AUTHORIZATION "a";\nRESET SESSION AUTHORIZATION;\nSET ROLE "a";\nRESET ROLE;', True),
        ("SELECT 1$a$;", False),
        ("SELECT $1$a$;", False),
        ("SELECT 1a$a$;", False),
        ("CREATE /**/ FUNCTION f() BEGIN ATOMIC;", False),
        ("CREATE 'a' FUNCTION f() BEGIN ATOMIC;", False),
        ("CREATE :a FUNCTION f() BEGIN ATOMIC;", False),
        ("SELECT E'a'\n'\\';", False),
        ("SELECT E'a' -- b\n'\\';", False),
        ("SELECT U&'a';", False),
        ("SELECT :LAST_ERROR_MESSAGE;", False),
        ("SELECT 1:::LAST_ERROR_MESSAGE;", False),
        ("SELECT :'LAST_ERROR_MESSAGE';", False),
        ('SELECT :"LAST_ERROR_MESSAGE";', False),
        ("SELECT :{?DBNAME};", False),
        ("SELECT :E'\\' ; ';", False),
    ],
)
def test_the_file_has_statements_alone(tmp_path: Path, script: str, is_sql: bool) -> None:  # noqa: FBT001
    """By more, who can write to a store that is not encrypted would have psql pass over the lines after it."""
    entry = DdlEntry(1, "TABLE DATA", "public", "t", script)
    found = describe_refusals(target_of("s1", NODE, (), "0" * 32), [Refusal(entry, PRE_DATA, "no", script)])
    path, _ = write_refused("operation", found, tmp_path, is_published=True)
    written = Path(path or "").read_text()
    assert all((one.bare in written) == is_sql for one in statements_of(script) if one.bare)
    assert ("-- Left out: psql might run commands in it" in written) == (not is_sql)


def test_settings_of_what_is_left_out_hold_for_what_follows(tmp_path: Path) -> None:
    entries = [
        DdlEntry(number, "TABLE", "public", f"t{number}", text, tablespace="fast")
        for number, text in enumerate(["SELECT '", "CREATE TABLE t1 ();"])
    ]
    refused = [Refusal(one, PRE_DATA, "no", "") for one in entries]
    found = describe_refusals(target_of("s1", NODE, (), "0" * 32), refused)
    path, _ = write_refused("operation", found, tmp_path, is_published=True)
    begin, _, end = Path(path or "").read_text().partition("-- Left out")
    assert 'SET default_tablespace = "fast";' in begin.splitlines()
    assert "CREATE TABLE t1 ();" in end.splitlines()


def test_no_password_of_a_dsn_is_in_the_file_or_in_the_command_that_runs_it(tmp_path: Path) -> None:
    found = describe_refusals(target_of("s1", NODE, (), "0" * 32), [refusals()[2]])
    assert SECRET not in repr(found)
    path, line = write_refused("operation", found, tmp_path, is_published=True)
    access = "user=restorer dbname=shop host=db1"
    assert line.endswith(f"; correct them, then run: psql --no-psqlrc --set=ON_ERROR_STOP=1 --file={path} '{access}'")
    written = Path(path or "").read_text()
    assert f'\\connect -reuse-previous=off "{access}"\n' in written
    assert SECRET not in written
