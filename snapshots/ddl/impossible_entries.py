"""Find entries that no archive of pg_dump contains, because no server could run them.

- An entry depends on an entry that the archive lacks. pg_dump lists only dependencies on objects that it dumps
  (pg_dump.c, BuildArchiveDependencies): what depends on a member of an extension is listed as depending on the
  extension.
- A statement is cut off: a quote or a parenthesis is not closed, or there is no semicolon at the end.
- A statement begins with other words than pg_dump writes for objects of that type, or creates another object, or is
  missing.
- Further statements of an entry do something else than create or change objects.
- Two entries create the same object.
- The archive says that its texts have another encoding than the one that they are dumped in.

Names that no entry creates are found by unknown_names.py. This is no parser: only a server can tell whether it refuses
a statement for other reasons. pg_dump quotes all names. A doubled quote is read as two adjacent strings. pg_dump
doubles quotes, so no quote follows a backslash, with any value of standard_conforming_strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from cutline.fleet.table_names import quote_identifier, table_name
from cutline.nodes.encodings import RAW
from cutline.snapshots.ddl.ddl_archive import ArchiveEntry, DdlArchive, statements_of_entry
from cutline.snapshots.ddl.quoted_names import shown

# Text that is skipped: comments, literals, names and dollar quotes.
DOLLAR = r"\$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*)?\$"
SKIPPED = re.compile(rf"""--[^\n]*|[eE]'(?:[^'\\]|\\.)*'|'[^']*'|"[^"]*"|({DOLLAR}).*?\1""", re.DOTALL)
UNCLOSED = re.compile(rf"""['"]|{DOLLAR}""")
FIRST_WORDS = re.compile(r"[A-Z]+(?: [A-Z]+)*")
CREATE = "CREATE "
# The words with which the statements of an object's entry begin (pg_dump.c). Any of some types may be an ALTER TABLE:
# for an identity column, for a trigger that a partition has from its parent.
ALTER_TABLE = ("ALTER TABLE", "ALTER FOREIGN TABLE")
BEGINNINGS: Mapping[str, tuple[str, ...]] = {
    "TABLE": ("CREATE TABLE", "CREATE UNLOGGED TABLE"),
    "FOREIGN TABLE": ("CREATE FOREIGN TABLE",),
    "VIEW": ("CREATE VIEW",),
    "MATERIALIZED VIEW": ("CREATE MATERIALIZED VIEW", "CREATE UNLOGGED MATERIALIZED VIEW"),
    "SEQUENCE": ("CREATE SEQUENCE", "CREATE UNLOGGED SEQUENCE", *ALTER_TABLE),
    "SEQUENCE OWNED BY": ("ALTER SEQUENCE",),
    "TYPE": ("CREATE TYPE",),
    "DOMAIN": ("CREATE DOMAIN",),
    "FUNCTION": ("CREATE FUNCTION",),
    "PROCEDURE": ("CREATE PROCEDURE",),
    "AGGREGATE": ("CREATE AGGREGATE",),
    "TRIGGER": ("CREATE TRIGGER", "CREATE CONSTRAINT TRIGGER", *ALTER_TABLE),
    "RULE": ("CREATE RULE", "CREATE OR REPLACE VIEW"),
    "POLICY": ("CREATE POLICY",),
    "ROW SECURITY": ("ALTER TABLE",),
    "INDEX": ("CREATE INDEX", "CREATE UNIQUE INDEX"),
    "INDEX ATTACH": ("ALTER INDEX",),
    "TABLE ATTACH": ("ALTER TABLE",),
    "CONSTRAINT": (*ALTER_TABLE, "ALTER DOMAIN"),
    "CHECK CONSTRAINT": (*ALTER_TABLE, "ALTER DOMAIN"),
    "FK CONSTRAINT": ALTER_TABLE,
    "DEFAULT": (*ALTER_TABLE, "ALTER VIEW"),
    "EXTENSION": ("CREATE EXTENSION",),
    "COMMENT": ("COMMENT ON",),
    "DEFAULT ACL": ("ALTER DEFAULT PRIVILEGES",),
    "ACL": ("GRANT", "REVOKE", "SET SESSION AUTHORIZATION"),
}
RELATIONS = frozenset({"TABLE", "FOREIGN TABLE", "VIEW", "MATERIALIZED VIEW", "SEQUENCE"})
# The verbs of all further statements in an entry, and those that the body of a function or a rule can't contain.
VERBS = frozenset({"CREATE", "ALTER", "COMMENT", "GRANT", "REVOKE", "SET", "RESET", "SELECT", "SECURITY", "REFRESH"})
NEVER_IN_BODIES = frozenset({"DROP", "TRUNCATE", "CREATE", "GRANT", "REVOKE", "COPY", "DO", "CALL", "LOCK", "LOAD"})
WITH_BODIES = frozenset({"FUNCTION", "PROCEDURE", "RULE"})
# Their statements begin with CREATE, a type and the qualified name of the entry's object.
NAMED = RELATIONS | {"TYPE", "DOMAIN"}
# pg_dump lists what these depend on by itself, even if it does not dump it (dumpComment, dumpSecLabel, dumpACL,
# dumpSequence, dumpDatabase, refreshMatViewData, dumpRelationStats).
OTHER_DEPENDENCIES = frozenset(
    {
        "COMMENT",
        "SECURITY LABEL",
        "ACL",
        "SEQUENCE OWNED BY",
        "DATABASE PROPERTIES",
        "MATERIALIZED VIEW DATA",
        "STATISTICS DATA",
    }
)
INDEX = "INDEX"
ENCODING, ENCODING_STATEMENT = "ENCODING", f"SET client_encoding = '{RAW}';"


def impossible_entries(archive: DdlArchive) -> Iterator[str]:
    """Yield in words which of the archive's entries pg_dump can't have written, and why."""
    entries = archive.contents.entries
    numbers = frozenset(entry.number for entry in entries)
    created = set[tuple[str, str]]()
    for entry in entries:
        if entry.kind not in OTHER_DEPENDENCIES and not numbers.issuperset(entry.dependencies):
            yield f"the DDL lacks an object on which {entry_label(entry)} depends"
        text = statements_of_entry(archive.body, entry)
        yield from _statement_problems(entry, text)
        # No two objects have the same statement, because that has the name.
        if entry.kind in BEGINNINGS and text.startswith(CREATE):
            if (entry.kind, text) in created:
                yield f"two entries create {entry_label(entry)}"
            created.add((entry.kind, text))


def entry_label(entry: ArchiveEntry) -> str:
    """Return the type and the name of an entry's object."""
    return f"{entry.kind} {shown(table_name(entry.schema, entry.name) if entry.schema else entry.name)}"


def _statement_problems(entry: ArchiveEntry, text: str) -> Iterator[str]:
    # A restore would convert every name and comment from the other encoding.
    if entry.kind == ENCODING and text.strip() != ENCODING_STATEMENT:
        yield f"the DDL's encoding is set by {shown(text.strip())!r}, but it was dumped as {RAW}"
        return
    statements = _first_words(text)
    if statements is None:
        yield f"the statement for {entry_label(entry)} is cut off"
        return
    beginnings = BEGINNINGS.get(entry.kind)
    # Entries of other types may have no statement: pg_dump only comments on the schema "public".
    if beginnings is None:
        return
    if not statements:
        yield f"there is no statement for {entry_label(entry)}"
        return
    words, *others = statements
    if not any(f"{words} ".startswith(f"{beginning} ") for beginning in beginnings):
        yield f"the statement for {entry_label(entry)} begins with {words or 'no SQL'}"
    elif entry.kind in NAMED and words.startswith("CREATE "):
        name = f"{words} {quote_identifier(entry.schema)}.{quote_identifier(entry.name)}"
        if not text.lstrip().startswith(name):
            yield f"the statement for {entry_label(entry)} creates another object"
    elif entry.kind == INDEX and not text.lstrip().startswith(f"{words} {quote_identifier(entry.name)} ON "):
        yield f"the statement for {entry_label(entry)} creates another object"
    for more in others:
        verb = more.partition(" ")[0]
        is_known = verb not in NEVER_IN_BODIES if entry.kind in WITH_BODIES else verb in VERBS
        if not is_known:
            yield f"the statements for {entry_label(entry)} contain {verb or 'something else than SQL'}"


# Most statements are the same in every DDL of a chain.
@lru_cache(maxsize=1 << 15)
def _first_words(text: str) -> tuple[str, ...] | None:
    """Return the words with which each of the statements begins; None if they are cut off."""
    bare = SKIPPED.sub("\0", text).strip("\0\n ")
    if not bare:
        return ()
    if UNCLOSED.search(bare) or bare.count("(") != bare.count(")") or not bare.endswith(";"):
        return None
    found = (FIRST_WORDS.match(one.lstrip("\0\n ")) for one in bare.split(";")[:-1])
    return tuple(match[0] if match else "" for match in found)
