from __future__ import annotations

import pytest
from msgspec.structs import replace

from cutline.snapshots.ddl.dump import (
    DumpFaults,
    InheritedNotNull,
    OtherType,
    UnquotedName,
    quote_names,
    set_not_null,
    write_identity,
)
from tests.unit.made_archives import MadeEntry, made_archive

# As pg_dump 18.4 writes it, with --quote-all-identifiers.
HEIR = '''CREATE TABLE "public"."q" (
    CONSTRAINT {} NOT NULL "B c",
    NOT NULL "a",
    "x" integer CONSTRAINT "own ""one""" NOT NULL,
    CONSTRAINT "z NOT NULL z" CHECK (("x" > 0))
)
INHERITS ("public"."p");
'''
# Two columns with which the owner of a table once made a restore run statements of his own.
COLUMN = "c\n    CONSTRAINT int);ALTER ROLE m SUPERUSER;/* NOT NULL "
HOSTILE = f'''CREATE TABLE "m"."t" (
    "{COLUMN}" integer,
    "*/ --" integer
);
'''


@pytest.mark.parametrize(("bare", "quoted"), [
    ("na me", '"na me"'), ('Capital"s', '"Capital""s"'), ("new\nline", '"new\nline"'), ("int);--", '"int);--"'),
])  # fmt: skip
def test_the_name_of_an_inherited_not_null_constraint_is_quoted(bare: str, quoted: str) -> None:
    assert quote_names(HEIR.format(bare), [UnquotedName(bare, "B c")]) == HEIR.format(quoted)


def test_a_name_that_contains_the_text_of_another_is_quoted_as_a_whole() -> None:
    inner, outer = "In ner", 'o NOT NULL "a",\n    CONSTRAINT In ner'
    names = [UnquotedName(inner, "B c"), UnquotedName(outer, "B c")]
    quoted = '"o NOT NULL ""a"",\n    CONSTRAINT In ner"'
    assert quote_names(HEIR.format(outer), names) == HEIR.format(quoted)
    assert quote_names(HEIR.format(outer), names[::-1]) == HEIR.format(quoted)


def test_what_looks_like_such_a_name_across_two_columns_stays_unchanged() -> None:
    """The quotes of the text that is looked for may end one name and begin the next one."""
    fault = UnquotedName("int);ALTER ROLE mallory SUPERUSER;/*", " integer,\n    ")
    first = f"    CONSTRAINT {fault.constraint} NOT NULL "
    for begin in ("", "\n"):
        columns = (begin + first, "b", fault.column, "\n*/*/ SELECT (1 --")
        names = ",\n".join(f'    "{name}" integer' for name in columns)
        text = f'CREATE TABLE "m"."t" (\n{names}\n);\n'
        assert quote_names(text, [fault]) == text
    default = 'CREATE TABLE "m"."t" (\n    "a" text DEFAULT \'\n    CONSTRAINT Ab NOT NULL "c"\n\'\n);\n'
    assert quote_names(default, [UnquotedName("Ab", "c")]) == default


@pytest.mark.parametrize(("written", "corrected"), [
    ('    NOT NULL "a",\n    "b" integer NOT NULL', '    "b" integer NOT NULL'),
    ('    "b" integer NOT NULL,\n    NOT NULL "a"', '    "b" integer NOT NULL'),
    ('    NOT NULL "a"', ""),
    ('    "\n    NOT NULL ""a"",\n" integer,\n    NOT NULL "a"', '    "\n    NOT NULL ""a"",\n" integer'),
])  # fmt: skip
def test_an_inherited_column_of_an_older_server_is_set_not_null_after_its_table(written: str, corrected: str) -> None:
    """pg_dump 18 writes the first, pg_dump 15 to 17 the second."""
    inherited = [InheritedNotNull("s", 't"t', "a")]
    text = 'CREATE TABLE "s"."t""t" (\n{}\n)\nINHERITS ("public"."p");\n'
    after = '\nALTER TABLE ONLY "s"."t""t" ALTER COLUMN "a" SET NOT NULL;\n'
    whole = text.format(corrected) if corrected else text.replace("{}\n", "")
    assert set_not_null(text.format(written), inherited) == whole + after
    assert set_not_null(whole + after, inherited) == whole + after


@pytest.mark.parametrize("name", ["it's", 'say "so', "E'\"\\"])
def test_a_quote_in_a_comment_begins_no_string(name: str) -> None:
    """pg_restore writes the object's name into a comment before the statement."""
    comment = f"--\n-- Name: {name}; Type: TABLE; Schema: public; Owner: me\n--\n\n"
    fault = UnquotedName("int);ALTER ROLE m SUPERUSER;/*", "c")
    hostile = f'CREATE TABLE "m"."t" (\n    "x\n    CONSTRAINT {fault.constraint} NOT NULL ""c"",\n" integer\n);\n'
    columns = hostile.replace('""c""', '"c"')
    for text in (hostile, columns):
        assert quote_names(comment + text, [fault]) == comment + text
    bare, quoted = HEIR.format("na me"), HEIR.format('"na me"')
    assert quote_names(comment + bare, [UnquotedName("na me", "B c")]) == comment + quoted


@pytest.mark.parametrize("text", [HEIR.format('"na me"'), HEIR.format("plain"), HOSTILE])
def test_everything_else_stays_unchanged(text: str) -> None:
    assert (
        quote_names(text, [UnquotedName("na me", "B c"), UnquotedName("int);ALTER ROLE m SUPERUSER;/*", "c")]) == text
    )


# What pg_dump 18.4 writes for such a sequence, apart from what is wrong in it: the bounds of another type.
IDENTITY = """ALTER TABLE "m"."u" ALTER COLUMN "id" ADD GENERATED {} AS IDENTITY (
    SEQUENCE NAME "o""p"."t_id_seq"
    INCREMENT BY -2
    CACHE 7
    {}CYCLE
);
ALTER SEQUENCE "o""p"."t_id_seq" AS bigint MINVALUE 1 MAXVALUE 9000000000 START WITH 3 RESTART;
"""
OTHER = OtherType(
    "m", "u", "id", 'o"p', "t_id_seq", is_always=False, type="bigint", start=3, smallest=1, largest=9000000000,
    increment=-2, cache=7, cycles=True,
)  # fmt: skip


def test_the_sequence_of_an_identity_column_gets_its_type_before_bounds_that_need_it() -> None:
    assert write_identity(OTHER) == IDENTITY.format("BY DEFAULT", "")
    changed = replace(OTHER, is_always=True, cycles=False, logging="LOGGED")
    logged = 'ALTER SEQUENCE "o""p"."t_id_seq" SET LOGGED;\n'
    assert write_identity(changed) == IDENTITY.format("ALWAYS", "NO ") + logged


def test_only_the_entries_of_the_relations_are_corrected() -> None:
    given = [("TABLE", 7), ("TABLE", 9), ("TABLE DATA", 7), ("SEQUENCE", 8), ("COMMENT", 8)]
    body, contents = made_archive([MadeEntry(kind, oid=oid, statements=HEIR.format("na me")) for kind, oid in given])
    names = {7: [UnquotedName("na me", "B c")], 8: [UnquotedName("na me", "B c")]}
    faults = DumpFaults(names, {9: [InheritedNotNull("public", "q", "a")]}, {8: OTHER, 9: OTHER})
    strict = HEIR.format("na me").replace('    NOT NULL "a",\n', "")
    assert faults.correct(body, contents) == {
        1: HEIR.format('"na me"'),
        2: f'{strict}\nALTER TABLE ONLY "public"."q" ALTER COLUMN "a" SET NOT NULL;\n',
        4: write_identity(OTHER),
    }
    other = [MadeEntry("TABLE", oid=7, catalog=1255, statements=HEIR.format("na me"))]
    assert faults.correct(*made_archive(other)) == {}
