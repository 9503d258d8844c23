"""Which entries pg_dump can't have written. The statements have the form in which pg_dump 18 quotes all names."""

from __future__ import annotations

import pytest

from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.impossible_entries import impossible_entries
from tests.unit.made_archives import MadeEntry, made_body

FUNCTION = """CREATE FUNCTION "m"."f"("t" "text") RETURNS "text"
    LANGUAGE "plpgsql" STABLE
    AS $_$BEGIN
  -- the quote's other half is not here (
  RETURN $a$ $$ " ' ( $a$ || $1;
END$_$;
"""
ATOMIC = """CREATE FUNCTION "m"."f"() RETURNS bigint
    LANGUAGE "sql"
    BEGIN ATOMIC
 DELETE FROM "m"."t"
   WHERE ("t"."n" IS DISTINCT FROM 'a''b;('::"text");
 SELECT "count"(*) AS "count"
    FROM "m"."none";
END;
"""
TABLE = 'CREATE TABLE "m"."{}" (\n    "id" integer DEFAULT 1\n);\n'
TABLES = MadeEntry("TABLE", "t", "m", TABLE.format("t")), MadeEntry("TABLE", "u", "m", TABLE.format("u"))


def problems(*entries: MadeEntry) -> list[str]:
    return list(impossible_entries(DdlArchive.of(made_body(entries))))


def problems_of(kind: str, statements: str, name: str = "t") -> list[str]:
    return problems(MadeEntry(kind, name, "m", statements))


@pytest.mark.parametrize(
    ("kind", "statements"),
    [
        ("FUNCTION", FUNCTION),
        ("FUNCTION", ATOMIC),
        ("TABLE", TABLE.format("t") + '\n\nALTER TABLE ONLY "m"."t" FORCE ROW LEVEL SECURITY;\n'),
        ("TABLE", 'CREATE UNLOGGED TABLE "m"."t" (\n    "a" "text" DEFAULT E\'\\\\(\'\'\'::"text"\n);\n'),
        # Without standard_conforming_strings.
        ("TABLE", 'CREATE TABLE "m"."t" (\n    "a" "text" DEFAULT \'\\\\\'::"text"\n);\n'),
        ("SEQUENCE", 'ALTER TABLE "m"."t" ALTER COLUMN "id" ADD GENERATED ALWAYS AS IDENTITY (\n    CACHE 1\n);\n'),
        ("TRIGGER", '\nALTER TABLE "m"."t" DISABLE TRIGGER "b";\n'),
        ("RULE", 'CREATE OR REPLACE VIEW "m"."t" AS\n SELECT 1 AS "a";\n'),
        ("CONSTRAINT", 'ALTER DOMAIN "m"."t"\n    ADD CONSTRAINT "c" NOT NULL;\n'),
        ("ACL", 'SET SESSION AUTHORIZATION "a";\nGRANT ALL ON TABLE "m"."t" TO "b";\nRESET SESSION AUTHORIZATION;\n'),
        ("ACL", 'GRANT SELECT("a"),UPDATE("a") ON TABLE "m"."t" TO "b";\n'),
        ("SCHEMA", "-- *not* creating schema, since initdb creates it\n\n"),
        # Of types that are not known, and entries without statements.
        ("WHIM", "CREATE WHIM ##;\n"),
        ("SEARCH PATH", ""),
    ],
)
def test_what_pg_dump_writes_is_possible(kind: str, statements: str) -> None:
    assert problems_of(kind, statements) == []


@pytest.mark.parametrize(
    ("kind", "statements"),
    [
        *(("FUNCTION", FUNCTION[:length]) for length in range(1, len(FUNCTION) - 1)),
        *(("TABLE", TABLE.format("t")[:length]) for length in range(1, len(TABLE.format("t")) - 1)),
        ("VIEW", 'CREATE VIEW "m"."t" AS\n SELECT \'a AS b;\n'),
        ("VIEW", 'CREATE VIEW "m"."t" AS\n SELECT 1 AS "b;\n'),
        ("VIEW", 'CREATE VIEW "m"."t" AS\n SELECT (1 AS "b";\n'),
    ],
)
def test_a_statement_that_is_cut_off_is_found_wherever_it_ends(kind: str, statements: str) -> None:
    assert problems_of(kind, statements) == [f"the statement for {kind} m.t is cut off"]


@pytest.mark.parametrize(
    ("kind", "statements", "problem"),
    [
        ("VIEW", 'CREATE VUEW "m"."t" AS\n SELECT 1;\n', "begins with CREATE VUEW"),
        ("VIEW", 'CREATE VIEWS "m"."t" AS\n SELECT 1;\n', "begins with CREATE VIEWS"),
        ("INDEX", TABLE.format("t"), "begins with CREATE TABLE"),
        ("TABLE", "();\n", "begins with no SQL"),
        ("TABLE", TABLE.format("u"), "creates another object"),
        ("DOMAIN", 'CREATE DOMAIN "other"."t" AS integer;\n', "creates another object"),
        ("INDEX", 'CREATE INDEX "u" ON "m"."u" USING "btree" ("id");\n', "creates another object"),
    ],
)
def test_a_statement_of_another_kind_or_object_is_found(kind: str, statements: str, problem: str) -> None:
    assert problems_of(kind, statements) == [f"the statement for {kind} m.t {problem}"]


@pytest.mark.parametrize("statements", ["", "\n\n", "-- nothing\n"])
@pytest.mark.parametrize("kind", ["TABLE", "INDEX", "FUNCTION", "FK CONSTRAINT", "POLICY", "SEQUENCE", "EXTENSION"])
def test_an_object_without_a_statement_is_found(kind: str, statements: str) -> None:
    assert problems_of(kind, statements) == [f"there is no statement for {kind} m.t"]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("FUNCTION", FUNCTION), ("FUNCTION", ATOMIC), ("TABLE", TABLE.format("t")),
        ("RULE", 'CREATE RULE "t" AS\n    ON DELETE TO "m"."t" DO INSTEAD NOTHING;\n'),
        ("INDEX", 'CREATE INDEX "t" ON "m"."u" USING "btree" ("id");\n'),
    ],
)  # fmt: skip
def test_a_further_statement_that_drops_something_is_found(kind: str, first: str) -> None:
    for more, verb in (('DROP TABLE "m"."u" CASCADE;\n', "DROP TABLE"), ("truncate;\n", "something else than SQL")):
        found = problems_of(kind, first + more)
        if kind in ("FUNCTION", "RULE") and not verb.startswith("DROP"):
            # Bodies contain statements of many kinds.
            assert found == []
        else:
            assert found == [f"the statements for {kind} m.t contain {verb.split()[0] if verb[0] == 'D' else verb}"]
    assert problems_of(kind, first + 'ALTER TABLE ONLY "m"."t" FORCE ROW LEVEL SECURITY;\n') == []


def test_a_rule_of_several_commands_is_possible() -> None:
    commands = '(INSERT INTO "m"."u" ("id")\n  VALUES (1);\n DELETE FROM "m"."u";\n)'
    assert problems_of("RULE", f'CREATE RULE "t" AS\n    ON DELETE TO "m"."t" DO INSTEAD {commands};\n') == []


def test_an_object_that_two_entries_create_is_found() -> None:
    assert problems(*TABLES, TABLES[0]) == ["two entries create TABLE m.t"]
    comment = MadeEntry("COMMENT", "TABLE t", "m", 'COMMENT ON TABLE "m"."t" IS \'x\';\n')
    assert problems(comment, comment) == []


def test_a_lost_entry_on_which_others_depend_is_found() -> None:
    table = MadeEntry("TABLE", "t", "m", TABLE.format("t"), dependencies=(2,))
    assert problems(table, MadeEntry("TYPE", "mood", "m", 'CREATE TYPE "m"."mood" AS ENUM (\n    \'ok\'\n);\n')) == []
    assert problems(table) == ["the DDL lacks an object on which TABLE m.t depends"]


@pytest.mark.parametrize("kind", ["ACL", "COMMENT", "SECURITY LABEL", "MATERIALIZED VIEW DATA"])
def test_what_is_said_of_an_object_that_is_not_dumped_is_possible(kind: str) -> None:
    statements = {"ACL": 'GRANT SELECT ON TABLE "pg_catalog"."pg_authid" TO "a";\n'}.get(kind, "COMMENT ON b;\n")
    assert problems(MadeEntry(kind, "t", "m", statements, dependencies=(99,))) == []
