"""Correct three faults of pg_dump: what it writes would not load, or would create something else.

The statement of a faulty identity sequence is written anew from the catalogs. In that of a faulty table, constraints
are corrected where the catalogs say exactly what pg_dump wrote, and only outside of quotes: nothing else that an owner
of tables can choose (names, defaults) stands outside. Texts are raw (fleet.nodes.encodings), all
identifiers quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from cutline.fleet.nodes.encodings import RAW, raw_text
from cutline.fleet.tables.names import quote_identifier
from cutline.snapshots.ddl.archive import SEQUENCE, Contents, statements_of_entry

# From version 18 on pg_dump writes these names unquoted (dumpTableSchema, for inherited columns): a syntax error if the
# name has a space, and another name if it has a capital letter.
UNQUOTED_QUERY = """
SELECT c.conrelid::bigint, namesend(c.conname), namesend(a.attname)
  FROM pg_constraint c JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
 WHERE c.contype = 'n' AND NOT a.attislocal AND quote_ident(c.conname) <> c.conname
 ORDER BY c.oid
"""
# Of a server before 18 it writes them without a name, in a place where only 18 reads them.
INHERITED_QUERY = """
SELECT c.oid::bigint, namesend(n.nspname), namesend(c.relname), namesend(a.attname)
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE current_setting('server_version_num')::int < 180000 AND c.relkind IN ('r', 'f') AND a.attnum > 0
   AND a.attnotnull AND NOT a.attislocal AND NOT a.attisdropped
 ORDER BY c.oid, a.attnum
"""
# pg_dump does not write the type of the sequence of an identity column (dumpSequence), so it would get the type of its
# column, which is an error if that is too small for its bounds. CREATE TABLE … (LIKE … INCLUDING IDENTITY) and ALTER
# SEQUENCE … AS make such sequences.
OTHER_TYPES_QUERY = """
SELECT c.oid::bigint, namesend(tn.nspname), namesend(t.relname), namesend(a.attname), namesend(n.nspname),
       namesend(c.relname), a.attidentity = 'a', s.seqtypid::regtype::text, s.seqstart, s.seqmin, s.seqmax,
       s.seqincrement, s.seqcache, s.seqcycle,
       CASE WHEN c.relpersistence <> t.relpersistence
            THEN CASE c.relpersistence WHEN 'u' THEN 'UNLOGGED' ELSE 'LOGGED' END ELSE '' END
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0 AND d.deptype = 'i'
       AND d.refclassid = 'pg_class'::regclass
  JOIN pg_class t ON t.oid = d.refobjid JOIN pg_namespace tn ON tn.oid = t.relnamespace
  JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
 WHERE a.atttypid <> s.seqtypid
 ORDER BY c.oid
"""
PG_CLASS, TABLES = 1259, ("TABLE", "FOREIGN TABLE")
BEGIN, BEGIN_UNNAMED = "\n    CONSTRAINT ", "\n    NOT NULL "
# What a scan of a table's statement skips, and where such a name may stand. A doubled quote is read as two adjacent
# strings. pg_dump writes no block comment and, for a table, no dollar quote. U& before a quote changes nothing.
QUOTED_OR_BEGIN = re.compile(
    rf"""--[^\n]*|[eE]'(?:[^'\\]|\\.)*(?:'|\Z)|'[^']*(?:'|\Z)|"[^"]*(?:"|\Z)|(?P<begin>{BEGIN}|{BEGIN_UNNAMED})""",
    re.DOTALL,
)
ENDS = re.compile(r"(?: NO INHERIT)?(?:,?\n)")


@dataclass(frozen=True, slots=True)
class UnquotedName:
    """A NOT NULL constraint whose name needs quotes, and its column."""

    constraint: str
    column: str


@dataclass(frozen=True, slots=True)
class InheritedNotNull:
    """An inherited column that is NOT NULL, in a server whose NOT NULL constraints have no names."""

    schema: str
    table: str
    column: str


@dataclass(frozen=True, slots=True)
class OtherType:
    """The sequence of an identity column whose type differs from the column's.

    `logging` is "LOGGED" or "UNLOGGED" if the table is the other one.
    """

    table_schema: str
    table: str
    column: str
    schema: str
    name: str
    is_always: bool
    type: str
    start: int
    smallest: int
    largest: int
    increment: int
    cache: int
    cycles: bool
    logging: str = ""


@dataclass(frozen=True, slots=True)
class DumpFaults:
    """The relations whose entries pg_dump writes wrong, by oid: tables with such constraints, and such sequences."""

    names: Mapping[int, list[UnquotedName]] = field(default_factory=dict)
    inherited: Mapping[int, list[InheritedNotNull]] = field(default_factory=dict)
    types: Mapping[int, OtherType] = field(default_factory=dict)

    def correct(self, body: bytes, contents: Contents) -> dict[int, str]:
        """The statements, by number, of the archive's entries that have a fault."""
        corrected: dict[int, str] = {}
        for entry in contents.entries:
            oid = entry.oid if entry.catalog == PG_CLASS else 0
            if entry.kind in TABLES and oid in self.names:
                corrected[entry.number] = quote_names(statements_of_entry(body, entry), self.names[oid])
            elif entry.kind in TABLES and oid in self.inherited:
                corrected[entry.number] = set_not_null(statements_of_entry(body, entry), self.inherited[oid])
            elif entry.kind == SEQUENCE and oid in self.types:
                corrected[entry.number] = write_identity(self.types[oid])
        return corrected


def read_dump_faults(connection: psycopg.Connection[Any]) -> DumpFaults:
    """The database's relations whose entries pg_dump writes wrong. No transaction may be open."""
    with connection.transaction():
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        unquoted = connection.execute(UNQUOTED_QUERY).fetchall()
        inherited_columns = connection.execute(INHERITED_QUERY).fetchall()
        others = connection.execute(OTHER_TYPES_QUERY).fetchall()
    names: dict[int, list[UnquotedName]] = {}
    for oid, constraint, column in unquoted:
        names.setdefault(oid, []).append(UnquotedName(raw_text(constraint), raw_text(column)))
    inherited: dict[int, list[InheritedNotNull]] = {}
    for oid, *texts in inherited_columns:
        inherited.setdefault(oid, []).append(InheritedNotNull(*(raw_text(one) for one in texts)))
    types: dict[int, OtherType] = {}
    for oid, *given in others:
        name = [raw_text(one) for one in given[:5]]
        types[oid] = OtherType(name[0], name[1], name[2], name[3], name[4], *given[5:])
    return DumpFaults(names, inherited, types)


def quote_names(text: str, names: Iterable[UnquotedName]) -> str:
    """The statement of a table with the names of these constraints quoted, where they stand outside of quotes."""
    # A longer name may begin with the text of a shorter one.
    corrections = [
        (f"{BEGIN}{one.constraint} NOT NULL {column}", f"{BEGIN}{quote_identifier(one.constraint)} NOT NULL {column}")
        for one in sorted(names, key=lambda name: -len(name.constraint))
        for column in [quote_identifier(one.column)]
    ]
    pieces: list[str] = []
    offset = done = 0
    while found := QUOTED_OR_BEGIN.search(text, offset):
        offset = found.end()
        if found["begin"]:
            start = found.start()
            for written, quoted in corrections:
                if text.startswith(written, start) and ENDS.match(text, start + len(written)):
                    pieces += [text[done:start], quoted]
                    offset = done = start + len(written)
                    break
    return "".join([*pieces, text[done:]])


def set_not_null(text: str, inherited: Iterable[InheritedNotNull]) -> str:
    """The statement of a table without these constraints, and after it the statements that set the columns NOT NULL.

    So a pg_dump before 18 writes it; where it did, nothing is changed.
    """
    for one in inherited:
        column = quote_identifier(one.column)
        written = f"{BEGIN_UNNAMED}{column}"
        for found in QUOTED_OR_BEGIN.finditer(text):
            start, end = found.start(), found.start() + len(written)
            if found["begin"] and text.startswith(written, start) and ENDS.match(text, end):
                before, after = text[:start], text[end:]
                # The comma behind it goes, or, at the end of the list, the one before it.
                text = before + after[1:] if after.startswith(",") else before.removesuffix(",") + after
                table = f"{quote_identifier(one.schema)}.{quote_identifier(one.table)}"
                text += f"\nALTER TABLE ONLY {table} ALTER COLUMN {column} SET NOT NULL;\n"
                break
    return text


def write_identity(one: OtherType) -> str:
    """The statements that make the column an identity column whose sequence has its own type and bounds."""
    name = f"{quote_identifier(one.schema)}.{quote_identifier(one.name)}"
    table = f"{quote_identifier(one.table_schema)}.{quote_identifier(one.table)}"
    statements = (
        f"ALTER TABLE {table} ALTER COLUMN {quote_identifier(one.column)}"
        f" ADD GENERATED {'ALWAYS' if one.is_always else 'BY DEFAULT'} AS IDENTITY (\n    SEQUENCE NAME {name}\n"
        f"    INCREMENT BY {one.increment}\n    CACHE {one.cache}\n    {'' if one.cycles else 'NO '}CYCLE\n);\n"
        f"ALTER SEQUENCE {name} AS {one.type} MINVALUE {one.smallest} MAXVALUE {one.largest}"
        f" START WITH {one.start} RESTART;\n"
    )
    return statements + (f"ALTER SEQUENCE {name} SET {one.logging};\n" if one.logging else "")
