"""Sealed damage of DDL: statements of the newest dump that are other, lost or additional, on one shard or on both.

The commit describes tables, columns, types, keys and sequences a second time. Everything else is in the DDL alone; the
DDL of another shard that had the same object shows a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cutline.snapshots.ddl.ddl_archive import (
    SETTINGS,
    ArchiveEntry,
    Contents,
    NewEntry,
    extract,
    rewrite,
    statements_of_entry,
)
from tests.damage_matrix.damaged import Damaged
from tests.damage_matrix.kinds import SINGLE, Expected, Found, Hidden, Kind, Restorable, doubted, found
from tests.damage_matrix.world import DATABASE, OWNER, READER

DESCRIBED, ALONE = "DDL: what the commit describes", "DDL: what nothing else describes"
Edit = Callable[[bytes, Contents], bytes]
PLACES: Mapping[str, tuple[str, ...]] = {"one shard": ("s1",), "both shards": ("s1", "s2")}
DIFFER = "shards may differ, and a change reaches one after the other"
OF_ROWS = "the DDL contradicts rows alone, and a check does not evaluate constraints over rows"
ON_ALL_SHARDS = "the DDL of every shard says so, and nothing else in the store describes the object"


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    for name, edit in _described().items():
        yield from _on_shards(DESCRIBED, name, edit, found("definition", "roles", "rows", "partition"))
    for name, (edit, table) in _refused_rows().items():
        family = DESCRIBED if "domain" in name else ALONE
        yield from _on_shards(family, name, edit, Restorable(OF_ROWS, "s1", f"public.{table}"))
    for name, edit in _alone().items():
        yield from _on_shards(ALONE, name, edit, Hidden(ON_ALL_SHARDS), doubted("shards", reason=DIFFER))
    for name, edit in (*_refused().items(), *_missing().items()):
        yield from _on_shards(ALONE, name, edit, found("definition", "unreadable", "roles"))


def _on_shards(family: str, name: str, edit: Edit, on_both: Expected, on_one: Expected | None = None) -> Iterator[Kind]:
    """Yield the kind on one shard and on both; without `on_one`, a check finds it on one shard as well."""
    for where, shards in PLACES.items():

        def damage(store: Damaged, shards: tuple[str, ...] = shards) -> None:
            for shard in shards:
                store.edit_ddl(shard, edit)
            store.seal()

        expected = on_both
        if len(shards) == 1:
            expected = on_one or (replace(on_both, node="s1") if isinstance(on_both, Found) else on_both)
        yield Kind(f"{name} ({where})", family, SINGLE, damage, expected)


def find(contents: Contents, kind: str, name: str) -> ArchiveEntry:
    """Return the entry of an object."""
    return next(entry for entry in contents.entries if (entry.kind, entry.name) == (kind, name))


def replacing(kind: str, name: str, old: str, new: str) -> Edit:
    """Replace a part of an object's statements."""

    def edit(body: bytes, contents: Contents) -> bytes:
        entry = find(contents, kind, name)
        statements = statements_of_entry(body, entry)
        assert old in statements, statements
        return rewrite(body, contents, {entry.number: statements.replace(old, new, 1)})

    return edit


def losing(kind: str, name: str) -> Edit:
    """Lose an object."""

    def edit(body: bytes, contents: Contents) -> bytes:
        lost = find(contents, kind, name)
        return extract(body, contents, [
            entry for entry in contents.entries if entry.number != lost.number and entry.kind not in SETTINGS
        ])  # fmt: skip

    return edit


def adding(kind: str, name: str, statements: str) -> Edit:
    """Add an object before all others."""
    return lambda body, contents: rewrite(body, contents, {}, first=(NewEntry(kind, name, statements),))


def owned_by(kind: str, name: str, owner: str) -> Edit:
    """Give an object to another owner."""
    return lambda body, contents: rewrite(body, contents, {}, owners={find(contents, kind, name).number: owner})


def _described() -> Mapping[str, Edit]:
    return {
        "the names of two columns of one type are exchanged": _exchange_columns,
        "a column has another name": replacing("TABLE", "typed", '"note"', '"other"'),
        "a column has another type": replacing("TABLE", "typed", '"note" "text"', '"note" "bytea"'),
        "a column has another limit": replacing("TABLE", "typed", "character varying(8)", "character varying(9)"),
        "a column is lost": replacing("TABLE", "twin_a", ',\n    "v" "text"', ""),
        "a column more": replacing("TABLE", "twin_a", '"v" "text"', '"v" "text",\n    "more" integer'),
        "a table is lost": losing("TABLE", "twin_a"),
        "a table more": adding("TABLE", "more", 'CREATE TABLE "public"."more" ("id" integer);\n'),
        "a primary key is lost": losing("CONSTRAINT", "twin_a twin_a_pkey"),
        "a primary key has another column": replacing("CONSTRAINT", "twin_a twin_a_pkey", '("id")', '("v")'),
        "a sequence is lost": losing("SEQUENCE", "ring"),
        "a sequence more": adding("SEQUENCE", "more", 'CREATE SEQUENCE "public"."more";\n'),
        "a sequence has another increment": replacing("SEQUENCE", "counter", "INCREMENT BY 1", "INCREMENT BY 5"),
        "a sequence does not cycle": replacing("SEQUENCE", "ring", "\n    CYCLE", ""),
        "the values of a sequence have another bound": replacing("SEQUENCE", "ring", "MAXVALUE 10", "MAXVALUE 20"),
        "an unlogged table is logged": replacing("TABLE", "scratch", "CREATE UNLOGGED TABLE", "CREATE TABLE"),
        "a table is unlogged": replacing("TABLE", "twin_a", "CREATE TABLE", "CREATE UNLOGGED TABLE"),
        "its texts are in another encoding": replacing("ENCODING", "ENCODING", "SQL_ASCII", "LATIN1"),
        "another encoding": replacing("DATABASE", DATABASE, "UTF8", "LATIN1"),
        "rows are identified by no index": losing("INDEX", "byindex_a"),
        # The stamps of the columns in the states of the tables are as they were.
        "a default is another": replacing("TABLE", "account", "DEFAULT 0", "DEFAULT 1"),
        "the default of a column that was added is another": replacing("TABLE", "grown", "DEFAULT 3", "DEFAULT 4"),
        "NOT NULL is lost": replacing("TABLE", "typed", '"needed" "text" NOT NULL', '"needed" "text"'),
        "a label of an enum that rows have": replacing("TYPE", "mood", "'ok'", "'fine'"),
        "the labels of an enum in another order": replacing("TYPE", "mood", "'ok',\n    'happy'", "'happy',\n    'ok'"),
        "a generated column more": replacing(
            "TABLE", "twin_a", '"v" "text"', '"v" "text",\n    "more" integer GENERATED ALWAYS AS ("id") STORED'
        ),
        "an identity's sequence is lost": losing("SEQUENCE", "ticket_id_seq"),
        "a label of an enum more": replacing("TYPE", "mood", "'happy'", "'happy',\n    'more'"),
    }


def _exchange_columns(body: bytes, contents: Contents) -> bytes:
    entry = find(contents, "TABLE", "transfer")
    statements = statements_of_entry(body, entry)
    exchanged = statements.replace('"from_account"', '"?"').replace('"to_account"', '"from_account"')
    return rewrite(body, contents, {entry.number: exchanged.replace('"?"', '"to_account"')})


def _alone() -> Mapping[str, Edit]:
    return {
        "an owner is another": owned_by("TABLE", "account", READER),
        "an index is lost": losing("INDEX", "transfer_from"),
        "an index has another column": replacing("INDEX", "transfer_from", '"from_account"', '"to_account"'),
        "an index becomes unique": replacing("INDEX", "transfer_from", "CREATE INDEX", "CREATE UNIQUE INDEX"),
        # A commit lists the columns of a key in the order of the table, as the WAL does.
        "the columns of a key have another order": replacing(
            "CONSTRAINT", "pairkey pairkey_pkey", '("a", "b")', '("b", "a")'
        ),
        "a unique constraint is lost": losing("CONSTRAINT", "account account_owner_key"),
        "a foreign key is lost": losing("FK CONSTRAINT", "transfer transfer_to_account_fkey"),
        "a CHECK constraint is lost": replacing(
            "TABLE", "account", ',\n    CONSTRAINT "not_overdrawn" CHECK (("balance" >= 0))', ""
        ),
        "a CHECK constraint allows more": replacing("TABLE", "account", '("balance" >= 0)', '("balance" >= -1)'),
        "a policy is lost": losing("POLICY", "account seen"),
        "a policy allows other rows": replacing("POLICY", "account seen", "USING (true)", "USING (false)"),
        "row level security is not enabled": losing("ROW SECURITY", "account"),
        "a trigger is lost": losing("TRIGGER", "account stamped"),
        "a function has another body": replacing("FUNCTION", "twice(integer)", "$1 * 2", "$1 * 3"),
        "a view has another condition": replacing("VIEW", "rich", "100", "200"),
        "a view is lost": losing("VIEW", "rich"),
        "a privilege is lost": losing("ACL", 'TABLE "account"'),
        "a privilege more": replacing("ACL", 'TABLE "account"', "GRANT SELECT", "GRANT UPDATE"),
        "a comment is another": replacing("COMMENT", 'TABLE "account"', "the accounts", "other accounts"),
        "a domain allows more": replacing("DOMAIN", "positive", "> 0", "> -1"),
        "a sequence starts elsewhere": replacing("SEQUENCE", "counter", "START WITH 1", "START WITH 2"),
        "a sequence belongs to no column": losing("SEQUENCE OWNED BY", "transfer_id_seq"),
        "a function more": adding(
            "FUNCTION", "more()", 'CREATE FUNCTION "public"."more"() RETURNS integer LANGUAGE sql AS \'SELECT 1\';\n'
        ),
    }


def _refused_rows() -> Mapping[str, tuple[Edit, str]]:
    """What PostgreSQL runs, but the rows don't fit: what is changed, and the table."""
    return {
        "a domain refuses a value that rows have": (replacing("DOMAIN", "positive", "> 0", "> 100"), "typed"),
        "an index is unique that rows don't fit": (
            replacing("INDEX", "account_balance", "CREATE INDEX", "CREATE UNIQUE INDEX"), "account",
        ),
    }  # fmt: skip


def _refused() -> Mapping[str, Edit]:
    """What PostgreSQL refuses to run."""
    return {
        "a statement is no SQL": replacing("VIEW", "rich", "CREATE VIEW", "CREATE VUEW"),
        "a statement is cut off": replacing("FUNCTION", "twice(integer)", "2$_$;", "2"),
        "a view of a table that does not exist": replacing("VIEW", "rich", '"account"', '"nothing"'),
        "a type that a table needs is lost": losing("TYPE", "mood"),
        "a function that a trigger calls is lost": losing("FUNCTION", "stamp()"),
        "an owner that is no role": owned_by("TABLE", "account", f"{OWNER}_2"),
        "an extension that no server has": adding("EXTENSION", "nothing", 'CREATE EXTENSION "nothing";\n'),
        "a function in a language that does not exist": replacing("FUNCTION", "twice(integer)", '"sql"', '"plnone"'),
        "an index on a column that does not exist": replacing("INDEX", "transfer_from", '"from_account"', '"nothing"'),
        "an index on a table that does not exist": replacing(
            "INDEX", "transfer_from", 'ON "public"."transfer"', 'ON "public"."nothing"'
        ),
        "a key with a column that does not exist": replacing(
            "CONSTRAINT", "account account_owner_key", '("owner")', '("nothing")'
        ),
        "a foreign key to a table that does not exist": replacing(
            "FK CONSTRAINT", "transfer transfer_to_account_fkey", '"account"("id")', '"nothing"("id")'
        ),
        "a foreign key to a column that does not exist": replacing(
            "FK CONSTRAINT", "transfer transfer_to_account_fkey", '"account"("id")', '"account"("nothing")'
        ),
        "a trigger calls a function that does not exist": replacing(
            "TRIGGER", "account stamped", '"stamp"', '"nothing"'
        ),
        "a statement drops a table": replacing(
            "FUNCTION", "twice(integer)", "$_$;", '$_$;\nDROP TABLE "public"."account" CASCADE;'
        ),
        "an index twice": _repeat_index,
    }


def _repeat_index(body: bytes, contents: Contents) -> bytes:
    index = find(contents, "INDEX", "transfer_from")
    again = NewEntry(index.kind, index.name, statements_of_entry(body, index))
    return rewrite(body, contents, {}, first=(again,))


def _missing() -> Mapping[str, Edit]:
    """What PostgreSQL runs, although pg_dump can't have written it."""
    return {
        "an index without a statement": lambda body, contents: rewrite(
            body, contents, {find(contents, "INDEX", "transfer_from").number: "\n"}
        ),
        "an index has another name": replacing("INDEX", "transfer_from", 'INDEX "transfer_from"', 'INDEX "other"'),
    }
