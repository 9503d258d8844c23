"""What the statements of an archive say, as pg_dump 15 to 18 write them."""

from __future__ import annotations

import pytest

from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.described_ddl import (
    DescribedSequence,
    DescribedTable,
    Description,
    describe,
    read_grantees,
    read_sequence,
    read_table,
)
from tests.unit.made_archives import MadeEntry, made_archive
from tests.unit.made_definitions import MadeChain, altered

STATEMENT = 'CREATE INDEX "account_twice" ON "public"."account" USING "btree" ("public"."twice"("id"));'


@pytest.fixture(scope="module")
def ddl() -> DdlArchive:
    return MadeChain.kept().ddl("s1", 2)


def table_of(text: str) -> DescribedTable:
    table = read_table(text)
    assert table is not None
    return table


def test_of_a_statement_only_stored_columns_are_read() -> None:
    """As pg_dump 18 writes it: a default may contain anything, and a generated column has no stored value."""
    table = table_of("""CREATE TABLE "s"."a ""b" (
    "id" bigint NOT NULL,
    "of ""x"", y" character varying(3) DEFAULT 'a,
    "no" text (' COLLATE "C",
    "n" numeric(10,2) DEFAULT "s"."f"(1, (2)) CONSTRAINT "nn" NOT NULL,
    "is" boolean DEFAULT (1 IS NOT NULL),
    "at" timestamp(3) with time zone,
    "twice" integer GENERATED ALWAYS AS (("id" * 2)) STORED,
    "auto" integer NOT NULL,
    "e" "s"."E" DEFAULT E'\\\\',
    CONSTRAINT "c" CHECK (("id" > 0))
);

ALTER TABLE ONLY "s"."a ""b" ALTER COLUMN "e" SET STORAGE EXTERNAL;
""")
    assert (table.is_whole, table.is_ordered, table.has_full_identity) == (True, True, False)
    assert [(column.name, column.type, column.is_not_null) for column in table.columns] == [
        ("id", "bigint", True), ('of "x", y', "character varying(3)", False), ("n", "numeric(10,2)", True),
        ("is", "boolean", False), ("at", "timestamp(3) with time zone", False), ("auto", "integer", True),
        ("e", "s.E", False),
    ]  # fmt: skip
    assert [column.default for column in table.columns] == [
        None, "'a,\n    \"no\" text ('", '"s"."f"(1, (2))', "(1 IS NOT NULL)", None, None, "E'\\\\'",
    ]  # fmt: skip
    assert table.generated == {"twice"}
    assert table_of('CREATE TABLE "s"."none" (\n);\n').columns == ()


def test_tables_of_the_same_structure_are_read_once_whatever_their_names() -> None:
    columns = '(\n    "id" bigint NOT NULL\n)'
    names = ['"s"."t"', '"s (a"."t OF ""x"".""y"" "', '"s"."a "" PARTITION BY ("']
    tables = [table_of(f"CREATE TABLE {name} {columns};\n") for name in names]
    assert all(table is tables[0] for table in tables)
    assert [column.name for column in tables[0].columns] == ["id"]
    assert table_of(f"CREATE UNLOGGED TABLE {names[0]} {columns};\n") is tables[0]
    for name in names:
        typed = table_of(f'CREATE TABLE {name} OF "s"."ty" (\n    "id" WITH OPTIONS NOT NULL\n);\n')
        assert (typed.of_type, typed.columns) == (("s", "ty"), ())
        heir = table_of(f'CREATE TABLE {name} {columns}\nINHERITS ("s"."p");\n')
        assert (heir.parents, len(heir.columns)) == ((("s", "p"),), 1)
        full = table_of(f"CREATE TABLE {name} {columns};\n\nALTER TABLE ONLY {name} REPLICA IDENTITY FULL;\n")
        assert full.has_full_identity
        assert read_table(f'CREATE TABLE {name} {columns}\nPARTITION BY HASH ("id");\n') is None


def test_tables_of_other_kinds_name_where_their_columns_come_from() -> None:
    assert read_table('CREATE TABLE "s"."r" (\n    "id" bigint\n)\nPARTITION BY RANGE ("id");\n') is None
    assert read_table('CREATE TABLE "s"."t" OF "s"."ty"\nPARTITION BY RANGE ("a");\n') is None
    child = table_of('CREATE TABLE "s"."c" (\n    "own" bigint\n)\nINHERITS ("s"."p", "s"."q (;");\n')
    assert (child.parents, [column.name for column in child.columns]) == ((("s", "p"), ("s", "q (;")), ["own"])
    of_type = table_of('CREATE TABLE "s"."t" OF "s"."ty" (\n    "a" WITH OPTIONS NOT NULL\n);\n')
    assert (of_type.of_type, of_type.columns, of_type.is_whole) == (("s", "ty"), (), False)
    full = table_of('CREATE TABLE "s"."f" (\n    "v" text\n);\n\nALTER TABLE ONLY "s"."f" REPLICA IDENTITY FULL;\n')
    assert full.has_full_identity


def test_inherited_columns_are_those_of_all_ancestors_except_for_generated_ones() -> None:
    tables = {
        ("s", "p"): table_of('CREATE TABLE "s"."p" (\n "id" int,\n "g" int GENERATED ALWAYS AS (1) STORED\n);'),
        ("s", "c"): table_of('CREATE TABLE "s"."c" (\n "own" text,\n "g" int\n)\nINHERITS ("s"."p");'),
        ("s", "d"): table_of('CREATE TABLE "s"."d" (\n)\nINHERITS ("s"."c", "s"."p");'),
        ("s", "t"): table_of('CREATE TABLE "s"."t" OF "s"."ty";'),
        ("s", "x"): table_of('CREATE TABLE "s"."x" (\n)\nINHERITS ("s"."of an extension");'),
    }
    described = Description(tables, composites={("s", "ty"): ("a", "b")})
    assert described.stored_columns(("s", "d")) == {"id", "own"}
    assert described.stored_columns(("s", "t")) == {"a", "b"}
    assert described.stored_columns(("s", "x")) is None


@pytest.mark.parametrize(
    ("text", "type_", "expected"),
    [
        (
            'CREATE SEQUENCE "s"."a"\n    START WITH 1\n    INCREMENT BY 1\n    NO MINVALUE\n    NO MAXVALUE\n'
            "    CACHE 1;\n",
            "bigint", DescribedSequence(1, cycles=False, smallest=1, largest=2**63 - 1),
        ),
        (
            'CREATE SEQUENCE "s"."CYCLE MINVALUE 7"\n    AS smallint\n    START WITH -1\n    INCREMENT BY -5\n'
            "    MINVALUE -100\n    NO MAXVALUE\n    CACHE 20\n    CYCLE;\n",
            "bigint", DescribedSequence(-5, cycles=True, smallest=-100, largest=-1),
        ),
        (
            'ALTER TABLE "s"."t" ALTER COLUMN "id" ADD GENERATED BY DEFAULT AS IDENTITY (\n    SEQUENCE NAME "s"."q"\n'
            "    START WITH 1\n    INCREMENT BY 2\n    NO MINVALUE\n    MAXVALUE 99\n    CACHE 1\n);\n",
            "integer", DescribedSequence(2, cycles=False, smallest=1, largest=99),
        ),
        # As Cutline writes one whose type is not its column's.
        (
            'ALTER TABLE "s"."t" ALTER COLUMN "id" ADD GENERATED ALWAYS AS IDENTITY (\n    SEQUENCE NAME "s"."q"\n'
            '    INCREMENT BY 1\n    CACHE 1\n    NO CYCLE\n);\nALTER SEQUENCE "s"."q" AS bigint MINVALUE 1'
            " MAXVALUE 9223372036854775807 START WITH 1 RESTART;\n",
            "integer", DescribedSequence(1, cycles=False, smallest=1, largest=2**63 - 1),
        ),
        (
            'CREATE SEQUENCE "s"."a"\n    INCREMENT BY 1\n', "",
            DescribedSequence(1, cycles=False, smallest=None, largest=None),
        ),
    ],
)  # fmt: skip
def test_the_limits_of_a_sequence_are_those_of_its_type_unless_they_are_given(
    text: str, type_: str, expected: DescribedSequence
) -> None:
    """PostgreSQL manual, CREATE SEQUENCE."""
    assert read_sequence(text, type_) == expected


def test_an_archive_is_described(ddl: DdlArchive) -> None:
    described = describe(ddl)
    assert described.fed == {("public", "entry_id_seq"): (("public", "entry", "id"),)}
    assert described.enums == {16386: ("sad", "happy")}
    assert described.owners == {"postgres"}
    assert described.default_of(("public", "account", "later")) == "'for all rows'::\"text\""
    assert described.default_of(("public", "entry", "id")) == '"nextval"(\'"public"."entry_id_seq"\'::"regclass")'
    assert described.oids["public", "account"] == 16391
    assert described.database is not None
    assert (described.database.name, described.database.oid, described.database.encoding) == ("bank", 16384, "UTF8")
    index, table = (("INDEX", "INDEX public.account_twice"), ("TABLE", "TABLE public.account"))
    assert described.digests[index] != described.digests[table]


def test_an_index_may_be_a_replica_identity(ddl: DdlArchive) -> None:
    identity = '\n\nALTER TABLE ONLY "public"."account" REPLICA IDENTITY USING INDEX "account_twice";\n'
    index = 'CREATE UNIQUE INDEX "account_twice" ON "public"."account" USING "btree" ("id" DESC, "owner" "text_ops")'
    changed = altered(ddl, {"INDEX account_twice": (STATEMENT, f'{index} INCLUDE ("balance");{identity}')})
    assert describe(changed).identities == {("public", "account"): {"id", "owner"}}
    unique = 'ALTER TABLE ONLY "public"."account"\n    ADD CONSTRAINT "u" UNIQUE NULLS NOT DISTINCT ("owner");'
    changed = altered(ddl, {"INDEX account_twice": (STATEMENT, f"{unique}{identity}")})
    assert describe(changed).identities == {("public", "account"): {"owner"}}


def test_the_database_of_other_locales_and_with_settings_is_read(ddl: DdlArchive) -> None:
    before = "WITH TEMPLATE = template0 ENCODING = 'UTF8' LOCALE_PROVIDER = libc LOCALE = 'C';"
    after = (
        "WITH TEMPLATE = template0 ENCODING = 'LATIN1' LOCALE_PROVIDER = icu LC_COLLATE = 'C' LC_CTYPE = 'de_DE'"
        " ICU_LOCALE = 'de' ICU_RULES = '&V << w ''';\n"
        "ALTER DATABASE \"bank\" SET \"search_path\" TO '$user', 'a, b';\n"
        'ALTER ROLE "clerk" IN DATABASE "bank" SET "my.note" TO \'it\'\'s; so\';\n'
    )
    database = describe(altered(ddl, {"DATABASE bank": (before, after)})).database
    assert database is not None
    assert (database.encoding, database.locale_provider) == ("LATIN1", "i")
    assert (database.collate, database.ctype) == ("C", "de_DE")
    assert (database.locale, database.icu_rules) == ("de", "&V << w '")
    assert database.settings == {("", "search_path"): ("$user", "a, b"), ("clerk", "my.note"): ("it's; so",)}


def test_own_types_are_known_by_their_oids() -> None:
    entries = [
        MadeEntry(kind, name, "m", statements, oid, 1247)
        for kind, name, oid, statements in (
            ("TYPE", "pair", 16390,
             'CREATE TYPE "m"."pair" AS (\n\t"number" numeric(6,2),\n\t"word" "text" COLLATE "C"\n);\n'),
            ("TYPE", "spans", 16400, 'CREATE TYPE "m"."spans" AS RANGE (\n    subtype = text\n);\n'),
            ("DOMAIN", "a; b", 16401, 'CREATE DOMAIN "m"."a; b" AS timestamp(3) without time zone NOT NULL;\n'),
            ("DOMAIN", "share", 16402,
             'CREATE DOMAIN "m"."share" AS numeric(5,2)\n\tCONSTRAINT "c" CHECK ((VALUE > (0)::numeric));\n'),
            ("DOMAIN", "list", 16403, 'CREATE DOMAIN "m"."list" AS "m"."pair"[] DEFAULT NULL::"m"."pair"[];\n'),
        )
    ]  # fmt: skip
    described = describe(DdlArchive(*made_archive(entries)))
    assert described.fields == {16390: ("numeric(6,2)", "text")}
    assert described.composites == {("m", "pair"): ("number", "word")}
    assert described.bases == {16401: "timestamp(3) without time zone", 16402: "numeric(5,2)", 16403: "m.pair[]"}


def test_the_roles_that_have_privileges_are_read() -> None:
    """As pg_dump 16 writes them; a name may contain anything."""
    text = (
        'REVOKE ALL ON FUNCTION "s"."f"("a" integer) FROM PUBLIC;\n'
        'GRANT ALL ON FUNCTION "s"."f"("a" integer) TO "caller";\n'
        'SET SESSION AUTHORIZATION "grantor";\n'
        'GRANT SELECT("id"),UPDATE("id") ON TABLE "s"."a TO ""x"";\nGRANT ALL ON b TO c;" TO "a ""role""";\n'
        "RESET SESSION AUTHORIZATION;\n"
        'GRANT USAGE ON SCHEMA "s" TO "other" WITH GRANT OPTION;\n'
        'GRANT USAGE ON SCHEMA "s" TO PUBLIC;\n'
        'REVOKE ALL ON SCHEMA "s" FROM "owner";\n'
    )
    assert read_grantees(text) == {"caller", 'a "role"', "other"}
