from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restore.ddl.statements import STATEMENTS_MAX, TEXT_MAX, batches, settings_of, statement_ends, statements_of

# Statements as pg_dump writes them, with semicolons that do not end them.
WHOLE = [
    "SELECT pg_catalog.set_config('search_path', '', false);",
    """CREATE TABLE "public"."a;b" ("c""; d" integer DEFAULT ';'::"text" NOT NULL);""",
    "COMMENT ON TABLE \"public\".\"t\" IS 'it''s; -- no comment /* nor this';",
    r"CREATE VIEW v AS SELECT E'it\'s; \\' AS x, e'\\';",
    "/* a; /* nested; */ still; */ SELECT 1;",
    "-- Name: x; Type: TABLE; it's\nCREATE SCHEMA s;",
    "CREATE FUNCTION f() RETURNS integer LANGUAGE plpgsql AS $$ begin; return 1; end $$;",
    "CREATE FUNCTION f$a() RETURNS text LANGUAGE sql AS $_$ SELECT $$;$$ || '$' ; $_$;",
    "CREATE FUNCTION g(a integer) RETURNS integer LANGUAGE sql\n"
    "    BEGIN ATOMIC\n SELECT CASE WHEN (a > 1) THEN 1 ELSE 2 END AS b;\n SELECT 2;\nEND;",
    "CREATE OR REPLACE PROCEDURE p() LANGUAGE sql BEGIN ATOMIC INSERT INTO t VALUES (1); END;",
    "CREATE RULE r AS ON INSERT TO t DO ALSO (INSERT INTO u VALUES (1); DELETE FROM w;);",
    'CREATE TABLE "begin" (a integer CHECK (CASE WHEN a > 0 THEN true END));',
    "CREATE TABLE begin_ (éa$1$ integer, b text DEFAULT '$1$');",
    "ALTER TABLE t ADD CONSTRAINT c CHECK (b <> $é$;$é$);",
]


@given(st.lists(st.sampled_from(WHOLE), max_size=12))
def test_a_script_is_split_where_its_statements_end(chosen: list[str]) -> None:
    script = "\n\n\n".join(chosen) + "\n"
    ends = list(statement_ends(script))
    assert [script[begin:end].strip() for begin, end in zip([0, *ends], ends, strict=False)] == chosen


@given(st.lists(st.sampled_from(WHOLE), max_size=12))
def test_statements_are_split_without_the_comments_before_them(chosen: list[str]) -> None:
    script = "".join(f"\n--\n-- Name: {number}; Type: ';\n--\n\n{one}\n" for number, one in enumerate(chosen))
    bare = [one.removeprefix("-- Name: x; Type: TABLE; it's\n") for one in chosen]
    found = list(statements_of(script))
    assert [one.bare for one in found if one.bare] == bare
    assert "".join(one.text for one in found) == script


@pytest.mark.parametrize(
    "rest", ["", "' ;", "E'\\' ;", "$$ ;", "/* ;", '" ;', "(;", "CREATE FUNCTION f() BEGIN ATOMIC ;"]
)
def test_text_that_never_ends_is_not_a_statement(rest: str) -> None:
    assert list(statement_ends(f"SELECT 1;{rest}")) == [len("SELECT 1;")]


def test_batches_are_the_whole_script_in_bounded_pieces() -> None:
    script = "".join(f"CREATE TABLE t{number} (a text DEFAULT ';');\n" for number in range(2 * STATEMENTS_MAX + 1))
    pieces = list(batches(script + "-- the end\n"))
    assert "".join(pieces) == script + "-- the end\n"
    assert [piece.count("CREATE") for piece in pieces] == [STATEMENTS_MAX, STATEMENTS_MAX, 1]
    long = f"COMMENT ON TABLE t IS '{'x' * TEXT_MAX}';"
    assert list(batches(long + long)) == [long, long]
    assert list(batches("\n")) == []


def test_no_batch_ends_as_another_role() -> None:
    grants = "".join(f"\nGRANT SELECT ON t{number} TO a;" for number in range(STATEMENTS_MAX))
    for what in ("ROLE", "SESSION AUTHORIZATION"):
        as_other = f"SELECT 1;\nSET {what} a;\n{grants}\nRESET {what};"
        assert list(batches(f"{as_other}{grants}")) == [as_other, grants]


def test_settings_are_what_a_session_keeps() -> None:
    kept = "SET row_security = off;\nSELECT pg_catalog.set_config('search_path', '', false);\nSET ROLE a;\nRESET ROLE;"
    others = "\nSELECT 1;\nCREATE FUNCTION f() RETURNS text SET work_mem = 1 LANGUAGE sql AS $$\nSET a = b;\n$$;"
    assert settings_of(kept + others) == kept


@pytest.mark.parametrize(
    "before", ["", "SET lock_timeout = 0;\n", "-- it's\nSELECT pg_catalog.set_config('a', ';', false);\n"]
)
def test_backslashes_escape_if_a_setting_at_the_beginning_says_so(before: str) -> None:
    script = f"{before}SET standard_conforming_strings = off;\n-- Name: it's\nSELECT 'a\\';';\nSELECT 'b';\n"
    assert [one.bare for one in statements_of(script) if one.bare][-2:] == ["SELECT 'a\\';';", "SELECT 'b';"]


def test_the_same_line_in_the_body_of_a_function_says_nothing() -> None:
    body = "CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$\nSET standard_conforming_strings = off;\n$$;"
    script = f"SET lock_timeout = 0;\n{body}\nSELECT 'a\\';\nSELECT 'b';\n"
    assert [one.bare for one in statements_of(script) if one.bare] == [
        "SET lock_timeout = 0;",
        body,
        "SELECT 'a\\';",
        "SELECT 'b';",
    ]
