"""Correct two faults of pg_dump: what it writes would not load, or would create something else.

Only the text of the entry that has the fault is changed, only outside of quotes, and only where the catalogs say
exactly what pg_dump wrote there: nothing else that an owner of tables can choose (names, defaults) stands outside.
Texts are raw (fleet.nodes.encodings), with all identifiers quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from fleet.nodes.encodings import RAW, raw_text
from fleet.tables.names import quote_identifier

# From version 18 on pg_dump writes these names unquoted (dumpTableSchema, for inherited columns): a syntax error if the
# name has a space, and another name if it has a capital letter.
UNQUOTED_QUERY = """
SELECT c.conrelid::bigint, namesend(c.conname), namesend(a.attname)
  FROM pg_constraint c JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
 WHERE c.contype = 'n' AND NOT a.attislocal AND quote_ident(c.conname) <> c.conname
 ORDER BY c.oid
"""
# pg_dump does not write the type of the sequence of an identity column (dumpSequence), so it would get the type of its
# column, which is an error if that is too small for its bounds. CREATE TABLE … (LIKE … INCLUDING IDENTITY) and ALTER
# SEQUENCE … AS make such sequences.
OTHER_TYPES_QUERY = """
SELECT c.oid::bigint, namesend(a.attname), namesend(n.nspname), namesend(c.relname), s.seqtypid::regtype::text,
       s.seqstart, s.seqmin, s.seqmax
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0 AND d.deptype = 'i'
       AND d.refclassid = 'pg_class'::regclass
  JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
 WHERE a.atttypid <> s.seqtypid
 ORDER BY c.oid
"""
BEGIN = "\n    CONSTRAINT "
# What a scan of a CREATE TABLE skips, and where such a name may stand. A doubled quote is read as two adjacent strings.
QUOTED_OR_BEGIN = re.compile(
    rf"""[eE]'(?:[^'\\]|\\.)*(?:'|\Z)|'[^']*(?:'|\Z)|"[^"]*(?:"|\Z)|(?P<begin>{BEGIN})""", re.DOTALL
)
ENDS = re.compile(r"(?: NO INHERIT)?(?:,?\n)")
TYPE_OPTIONS = ("    START WITH ", "    MINVALUE ", "    MAXVALUE ", "    NO MINVALUE", "    NO MAXVALUE")


@dataclass(frozen=True, slots=True)
class UnquotedName:
    """A NOT NULL constraint whose name needs quotes, and its column."""

    constraint: str
    column: str


@dataclass(frozen=True, slots=True)
class OtherType:
    """The sequence of an identity column whose type differs from the column's."""

    column: str
    schema: str
    name: str
    type: str
    start: int
    smallest: int
    largest: int


@dataclass(frozen=True, slots=True)
class DumpFaults:
    """The relations whose entries pg_dump writes wrong, by oid: tables with such names, and such sequences."""

    names: Mapping[int, list[UnquotedName]] = field(default_factory=dict)
    types: Mapping[int, OtherType] = field(default_factory=dict)

    def has(self, oid: int) -> bool:
        """Whether the entry of this relation has to be corrected."""
        return oid in self.names or oid in self.types

    def correct(self, oid: int, text: str) -> str:
        """The text of the relation's entry without the fault."""
        if oid in self.types:
            text = restore_type(text, self.types[oid])
        return quote_names(text, self.names.get(oid, ()))


def read_dump_faults(connection: psycopg.Connection[Any]) -> DumpFaults:
    """The database's relations whose entries pg_dump writes wrong. No transaction may be open."""
    with connection.transaction():
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        unquoted = connection.execute(UNQUOTED_QUERY).fetchall()
        others = connection.execute(OTHER_TYPES_QUERY).fetchall()
    names: dict[int, list[UnquotedName]] = {}
    for oid, constraint, column in unquoted:
        names.setdefault(oid, []).append(UnquotedName(raw_text(constraint), raw_text(column)))
    types = {
        oid: OtherType(raw_text(column), raw_text(schema), raw_text(name), *of)
        for oid, column, schema, name, *of in others
    }
    return DumpFaults(names, types)


def quote_names(text: str, names: Iterable[UnquotedName]) -> str:
    """The entry of a table with the names of these constraints quoted, where they stand outside of quotes."""
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


def restore_type(text: str, one: OtherType) -> str:
    """The entry of an identity column's sequence, with the sequence's type and bounds."""
    name = f"{quote_identifier(one.schema)}.{quote_identifier(one.name)}"
    begins = (
        f" ALTER COLUMN {quote_identifier(one.column)} ADD GENERATED {kind} AS IDENTITY (\n    SEQUENCE NAME {name}\n"
        for kind in ("ALWAYS", "BY DEFAULT")
    )
    begin = next((written for written in begins if text.count(written) == 1), None)
    if begin is None:
        return text
    before, after = text.split(begin)
    # From here to the parenthesis there are only numbers and keywords.
    options, end, rest = after.partition("\n);\n")
    other_options = "\n".join(line for line in options.split("\n") if not line.startswith(TYPE_OPTIONS))
    altered = (
        f"ALTER SEQUENCE {name} AS {one.type} MINVALUE {one.smallest} MAXVALUE {one.largest}"
        f" START WITH {one.start} RESTART;\n"
    )
    return f"{before}{begin}{other_options}{end}{altered}{rest}"
