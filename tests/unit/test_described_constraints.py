"""The constraints that statements of pg_dump state, and those that are left out because rows need not satisfy them."""

from __future__ import annotations

import pytest

from cutline.snapshots.ddl.ddl_archive import DdlArchive, NewEntry, read_contents, rewrite
from cutline.snapshots.ddl.described_constraints import (
    Attached,
    Check,
    Constraints,
    Domain,
    ForeignKey,
    ListBound,
    RangeBound,
    UniqueKey,
    describe_constraints,
    read_bound,
)
from tests.unit.made_definitions import MadeChain

ENTRY = ("public", "entry")


def described(kind: str, *statements: str) -> Constraints:
    """The constraints of the kept DDL, with entries of this kind before all others."""
    ddl = MadeChain.kept().ddl("s1", 2)
    entries = tuple(NewEntry(kind, "more", text) for text in statements)
    body = rewrite(ddl.body, ddl.contents, {}, first=entries)
    return describe_constraints(DdlArchive(body, read_contents(body)))


def test_the_keys_references_and_partitions_of_real_ddl_are_read() -> None:
    found = describe_constraints(MadeChain.kept().ddl("s1", 2))
    assert UniqueKey("entry_pkey", ENTRY, ("id",)) in found.unique
    reference = ForeignKey("entry_account_fkey", ENTRY, ("account",), ("public", "account"), ("id",))
    assert found.references == (reference,)
    assert found.partitioned == {("public", "parts"): ("RANGE", ("id",))}
    assert found.attached["public", "parts_low"] == Attached(("public", "parts"), RangeBound(("0",), ("10",)))
    assert sorted(found.leaves(("public", "parts"))) == [("public", "parts_high"), ("public", "parts_low")]
    assert found.leaves(ENTRY) == (ENTRY,)
    assert (found.others, found.has_own_collations) == (0, False)


@pytest.mark.parametrize(
    "statement",
    [
        'CREATE UNIQUE INDEX "u" ON "public"."entry" USING "btree" ("account", "remark" COLLATE "C" DESC NULLS LAST)'
        ' INCLUDE ("id") NULLS NOT DISTINCT WITH ("fillfactor"=\'70\') TABLESPACE "fast";',
        'CREATE UNIQUE INDEX "u" ON "public"."entry" USING "btree" ("account", "remark") NULLS NOT DISTINCT;',
    ],
)
def test_a_unique_index_of_plain_columns_is_a_key(statement: str) -> None:
    found = described("INDEX", statement)
    assert UniqueKey("u", ENTRY, ("account", "remark"), counts_nulls=True) in found.unique
    assert found.others == 0


@pytest.mark.parametrize(
    "statement",
    [
        'CREATE UNIQUE INDEX "u" ON "public"."entry" USING "btree" ("account") WHERE ("id" > 5);',
        'CREATE UNIQUE INDEX "u" ON "public"."entry" USING "btree" ("lower"("remark"));',
        'CREATE UNIQUE INDEX "u" ON "public"."entry" USING "btree" ("remark" "text_pattern_ops");',
    ],
)
def test_other_unique_indexes_are_counted_and_not_read(statement: str) -> None:
    found = described("INDEX", statement)
    assert (len([one for one in found.unique if one.name == "u"]), found.others) == (0, 1)


@pytest.mark.parametrize("form", ['UNIQUE ("id", "at" WITHOUT OVERLAPS)', 'EXCLUDE USING "gist" ("id" WITH =)'])
def test_a_constraint_of_other_values_than_plain_columns_is_counted(form: str) -> None:
    text = f'ALTER TABLE ONLY "public"."entry"\n    ADD CONSTRAINT "u UNIQUE" {form};\n'
    assert described("CONSTRAINT", text).others == 1


@pytest.mark.parametrize(
    ("rest", "is_read"),
    [
        ("", True),
        (' ON DELETE SET NULL ("NOT VALID") DEFERRABLE INITIALLY DEFERRED', True),
        (" MATCH FULL", True),
        (" NOT VALID", False),
        (" NOT ENFORCED", False),
    ],
)
def test_a_reference_counts_if_the_server_guarantees_it(rest: str, is_read: bool) -> None:  # noqa: FBT001  # a case
    text = (
        'ALTER TABLE "public"."a""b"\n    ADD CONSTRAINT "more" FOREIGN KEY ("x", "y")'
        f' REFERENCES "public"."entry"("id", "account"){rest};\n'
    )
    found = [one for one in described("FK CONSTRAINT", text).references if one.name == "more"]
    expected = ForeignKey("more", ("public", 'a"b'), ("x", "y"), ENTRY, ("id", "account"))
    assert found == ([expected] if is_read else [])


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("FOR VALUES FROM (0) TO ('-5')", RangeBound(("0",), ("-5",))),
        ("FOR VALUES FROM (MINVALUE, 'it''s') TO (7, MAXVALUE)", RangeBound(("MINVALUE", "it's"), ("7", "MAXVALUE"))),
        ("FOR VALUES IN ('a', NULL)", ListBound(frozenset({"a", None}))),
        ("FOR VALUES WITH (modulus 4, remainder 1)", None),
        ("FOR VALUES FROM (E'\\\\') TO (MAXVALUE)", None),
        ("DEFAULT", None),
    ],
)
def test_the_bound_of_a_partition_is_read_if_it_has_plain_values(
    text: str, bound: RangeBound | ListBound | None
) -> None:
    assert read_bound(text) == bound


def test_checks_of_tables_and_domains_are_read_as_text() -> None:
    table = (
        'CREATE TABLE "public"."more" (\n    "a" integer,\n    "b" "text" COLLATE "public"."own",\n'
        '    CONSTRAINT "c" CHECK ((("a" > 0) AND ("b" <> \'),\'::"text"))),\n'
        '    CONSTRAINT "d" CHECK (("a" < 9)) NO INHERIT\n);\n'
    )
    found = described("TABLE", table)
    assert found.checks["", "more"] == (
        Check("c", '((("a" > 0) AND ("b" <> \'),\'::"text")))'), Check("d", '(("a" < 9))'),
    )  # fmt: skip
    assert found.has_own_collations
    domain = (
        'CREATE DOMAIN "public"."p" AS character varying(3) DEFAULT \'x\'::character varying NOT NULL\n'
        '\tCONSTRAINT "c" CHECK ((VALUE > 0))\n\tCONSTRAINT "d" CHECK ((VALUE <> \');\n\'::"text"));\n'
    )
    assert described("DOMAIN", domain).domains == {
        ("public", "p"): Domain(
            "character varying(3)", (Check("c", "((VALUE > 0))"), Check("d", "((VALUE <> ');\n'::\"text\"))")),
        )
    }  # fmt: skip
