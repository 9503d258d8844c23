"""Names in the DDL that nothing creates. The statements have the form in which pg_dump 18 quotes all names."""

from __future__ import annotations

import pytest

from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.unknown_names import unknown_names
from tests.unit.made_archives import MadeEntry, made_body

VIEW = '''CREATE VIEW "m"."v" AS
 SELECT "t"."id",
    EXTRACT(year FROM "t"."at") AS "year",
    'x
   FROM "no"."table"'::"text" AS "note"
   FROM (("m"."t"
     LEFT JOIN "m"."u" "al
   FROM ""z"".""none""" USING ("id"))
     CROSS JOIN "m"."f"() "f"("n"));
'''
TABLE = (
    'CREATE TABLE "m"."{}" (\n    "id" integer DEFAULT 1,\n    "a""b(" "text",\n'
    '    CONSTRAINT "c" CHECK (("id" > 0))\n);\n'
)
TABLES = MadeEntry("TABLE", "t", "m", TABLE.format("t")), MadeEntry("TABLE", "u", "m", TABLE.format("u"))
ADD = 'ALTER TABLE ONLY "m"."t"\n    ADD CONSTRAINT "t_c" '
INDEX = 'CREATE UNIQUE INDEX "i" ON "m"."t" USING "btree" '
EXTENSION = MadeEntry("EXTENSION", "x", None, 'CREATE EXTENSION IF NOT EXISTS "x" WITH SCHEMA "m";\n')


def problems(*entries: MadeEntry) -> list[str]:
    return list(unknown_names(DdlArchive.of(made_body(entries))))


def test_a_view_of_a_relation_that_nothing_creates_is_found() -> None:
    view = MadeEntry("VIEW", "v", "m", VIEW, dependencies=(1, 2))
    assert problems(*TABLES, view) == []
    assert problems(TABLES[0], MadeEntry("VIEW", "v", "m", VIEW, dependencies=(1,))) == [
        "VIEW m.v reads m.u, which the DDL does not create"
    ]
    other = VIEW.replace('FROM (("m"."t"', 'FROM (("m"."nothing"')
    assert problems(*TABLES, MadeEntry("VIEW", "v", "m", other)) == [
        "VIEW m.v reads m.nothing, which the DDL does not create"
    ]


def test_a_view_may_read_what_the_server_or_an_extension_has() -> None:
    read = '("pg_catalog"."pg_class"\n     JOIN "information_schema"."tables" ON (true))'
    server = f'CREATE VIEW "m"."v" AS\n SELECT 1\n   FROM {read};\n'
    assert problems(MadeEntry("VIEW", "v", "m", server)) == []
    assert problems(EXTENSION, MadeEntry("VIEW", "v", "m", VIEW, dependencies=(1,))) == []
    assert len(problems(EXTENSION, MadeEntry("VIEW", "v", "m", VIEW))) == 2


@pytest.mark.parametrize("name", ["o", 'o OF "x" (', "o INHERITS (", "o PARTITION OF "])
def test_only_tables_that_list_all_of_their_columns_lack_others(name: str) -> None:
    quoted = name.replace('"', '""')
    index = MadeEntry("INDEX", "i", "m", f'CREATE INDEX "i" ON "m"."{quoted}" USING "btree" ("none");\n')

    def found(statement: str, kind: str = "TABLE") -> list[str]:
        return problems(MadeEntry(kind, name, "m", statement), index)

    columns = '(\n    "id" integer\n)'
    assert len(found(f'CREATE TABLE "m"."{quoted}" {columns};\n')) == 1
    assert len(found(f'CREATE FOREIGN TABLE "m"."{quoted}" {columns}\nSERVER "s";\n', "FOREIGN TABLE")) == 1
    assert found(f'CREATE TABLE "m"."{quoted}" {columns}\nINHERITS ("m"."p");\n') == []
    assert found(f'CREATE TABLE "m"."{quoted}" OF "m"."ty" (\n    "id" WITH OPTIONS NOT NULL\n);\n') == []


@pytest.mark.parametrize(
    ("kind", "statements", "unknown"),
    [
        ("CONSTRAINT", ADD + 'PRIMARY KEY ("id");\n', ""),
        ("CONSTRAINT", ADD + 'PRIMARY KEY ("id", "none");\n', "column none, which m.t does not have"),
        ("CONSTRAINT", ADD + 'UNIQUE NULLS NOT DISTINCT ("id") INCLUDE ("a""b(");\n', ""),
        ("CONSTRAINT", ADD + 'UNIQUE ("id") INCLUDE ("a");\n', "column a, which m.t does not have"),
        ("CONSTRAINT", ADD + 'EXCLUDE USING "gist" ("id" WITH =);\n', ""),
        ("FK CONSTRAINT", ADD + 'FOREIGN KEY ("id") REFERENCES "m"."u"("id") ON DELETE CASCADE;\n', ""),
        ("FK CONSTRAINT", ADD + 'FOREIGN KEY ("id", PERIOD "a""b(") REFERENCES "m"."u"("id", PERIOD "a""b(");\n', ""),
        ("FK CONSTRAINT", ADD + 'FOREIGN KEY ("none") REFERENCES "m"."u"("id");\n', "column none, which m.t does not"),
        ("FK CONSTRAINT", ADD + 'FOREIGN KEY ("id") REFERENCES "m"."u"("none");\n', "column none, which m.u does not"),
        ("FK CONSTRAINT", ADD + 'FOREIGN KEY ("id") REFERENCES "m"."w"("id");\n', "m.w, which the DDL does not create"),
        ("INDEX", INDEX + '("id" DESC, "a""b(" "pg_catalog"."text_ops") INCLUDE ("id") WHERE ("none" > 1);\n', ""),
        ("INDEX", INDEX + '("lower"(("a""b(")::"text"), (("none" + 1)), "m"."f"("id"));\n', ""),
        ("INDEX", INDEX + '("id", "none" DESC);\n', "column none, which m.t does not have"),
        ("INDEX", INDEX.replace('"t"', 'ONLY "m"."w"').replace('"m".ONLY', "ONLY") + '("id");\n', "m.w, which the DDL"),
    ],
)  # fmt: skip
def test_a_constraint_or_an_index_names_tables_and_columns_that_are_there(
    kind: str, statements: str, unknown: str
) -> None:
    found = problems(*TABLES, MadeEntry(kind, "t t_c", "m", statements))
    if unknown:
        (found_one,) = found
        assert f"{kind} m.t t_c names {unknown}" in found_one
    else:
        assert found == []
    assert problems(*TABLES, EXTENSION, MadeEntry(kind, "t t_c", "m", statements, dependencies=(3,))) == []


@pytest.mark.parametrize("more", ['\nINHERITS ("m"."u")', ' PARTITION BY RANGE ("id")'])
def test_a_table_may_have_columns_that_its_statement_lacks(more: str) -> None:
    table = MadeEntry("TABLE", "t", "m", TABLE.format("t").replace(");\n", f"){more};\n"))
    index = MadeEntry("INDEX", "i", "m", INDEX + '("none");\n')
    assert bool(problems(table, TABLES[1], index)) == ("PARTITION" in more)
    typed = MadeEntry("TABLE", "t", "m", 'CREATE TABLE "m"."t" OF "m"."type" (\n    "id" WITH OPTIONS\n);\n')
    assert problems(typed, index) == []


def test_a_trigger_calls_a_function_that_is_there() -> None:
    function = MadeEntry("FUNCTION", 'f("text")', "m", 'CREATE FUNCTION "m"."f"("text") RETURNS "trigger"\n AS $$$$;\n')
    call = 'CREATE TRIGGER "r" BEFORE INSERT ON "m"."t" FOR EACH ROW WHEN (\'EXECUTE FUNCTION "m"."g"(\' <> \'\') '
    call += "EXECUTE FUNCTION {};\n"
    for called in ('"m"."f"()', "\"m\".\"f\"('a', 'b(')", '"suppress_redundant_updates_trigger"()'):
        assert problems(*TABLES, function, MadeEntry("TRIGGER", "t r", "m", call.format(called))) == []
    odd = MadeEntry("FUNCTION", "f(x()", "m", 'CREATE FUNCTION "m"."f(x"() RETURNS "trigger"\n AS $$$$;\n')
    assert problems(*TABLES, odd, MadeEntry("TRIGGER", "t r", "m", call.format('"m"."f(x"()'))) == []
    trigger = MadeEntry("TRIGGER", "t r", "m", call.format('"m"."g"()'))
    assert problems(*TABLES, function, trigger) == ["TRIGGER m.t r calls m.g, which the DDL does not create"]
    of_extension = MadeEntry("TRIGGER", "t r", "m", call.format('"m"."g"()'), dependencies=(1,))
    assert problems(EXTENSION, *TABLES, of_extension) == []
    assert problems(*TABLES, MadeEntry("TRIGGER", "t r", "m", 'ALTER TABLE "m"."t" DISABLE TRIGGER "r";\n')) == []


def test_a_function_is_in_a_language_that_is_there() -> None:
    text = 'CREATE FUNCTION "m"."f"("a" "text" DEFAULT \' LANGUAGE "x"\') RETURNS integer\n    LANGUAGE {} STABLE\n'
    text += '    AS $$ LANGUAGE "y" $$;\n'
    for language in ('"sql"', '"plpgsql"', '"c"', '"internal"'):
        assert problems(MadeEntry("FUNCTION", "f", "m", text.format(language))) == []
    unknown = "FUNCTION m.f is written in plnone, a language that the DDL does not create"
    assert problems(MadeEntry("FUNCTION", "f", "m", text.format('"plnone"'))) == [unknown]
    own = MadeEntry("PROCEDURAL LANGUAGE", "plnone", None, 'CREATE OR REPLACE PROCEDURAL LANGUAGE "plnone";\n')
    assert problems(own, MadeEntry("FUNCTION", "f", "m", text.format('"plnone"'))) == []
    of_extension = MadeEntry("FUNCTION", "f", "m", text.format('"plnone"'), dependencies=(1,))
    assert problems(EXTENSION, of_extension) == []


def test_a_statement_with_many_quotes_that_does_not_fit_is_read_in_an_instant() -> None:
    # Each doubled quote can be read as part of a name, or as two names.
    names = '"' + '""' * 30 + '"'
    text = f'{ADD}FOREIGN KEY ({names}) REFERENCED "m"."u"("id");\n'
    assert problems(*TABLES, MadeEntry("FK CONSTRAINT", "t t_c", "m", text)) == []
