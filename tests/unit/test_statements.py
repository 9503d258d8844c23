from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.restore.ddl.statements import statement_ends, statements_of

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
