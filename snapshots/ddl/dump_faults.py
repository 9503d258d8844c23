"""Correct faults of pg_dump before its script is stored: it would not load, or would create something else.

Scripts are raw text (fleet.nodes.encodings), with all identifiers quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.nodes.encodings import RAW, raw_text
from fleet.tables.names import quote_identifier

TABLE = re.compile(r'^CREATE (?:\w+ )?TABLE ".*?;$', re.MULTILINE | re.DOTALL)
UNQUOTED = re.compile(r'^    CONSTRAINT (?!")(?P<name>.+?) NOT NULL (?="(?:[^"]|"")+",?$)', re.MULTILINE | re.DOTALL)
# CREATE TABLE … (LIKE … INCLUDING IDENTITY) and ALTER SEQUENCE … AS make such sequences.
OTHER_TYPES_QUERY = """
SELECT namesend(a.attname), namesend(n.nspname), namesend(c.relname), s.seqtypid::regtype::text,
       s.seqstart, s.seqmin, s.seqmax
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0 AND d.deptype = 'i'
       AND d.refclassid = 'pg_class'::regclass
  JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
 WHERE a.atttypid <> s.seqtypid
 ORDER BY c.oid
"""
TYPE_OPTION = re.compile(r"    (?:START WITH|MINVALUE|MAXVALUE|NO MINVALUE|NO MAXVALUE)\b")


@dataclass(frozen=True, slots=True)
class OtherType:
    """The sequence of an identity column whose type differs from the column's; names are raw text."""

    column: str
    schema: str
    name: str
    type: str
    start: int
    smallest: int
    largest: int


def correct_script(script: str) -> str:
    """The script with the names of inherited NOT NULL constraints quoted, as all other identifiers are.

    From version 18 on pg_dump writes these names unquoted (dumpTableSchema, for inherited columns): a syntax error if
    the name has a space, and another name if it has a capital letter.
    """
    return TABLE.sub(lambda table: UNQUOTED.sub(_quote, table[0]), script)


def _quote(match: re.Match[str]) -> str:
    name = match["name"].replace('"', '""')
    return f'    CONSTRAINT "{name}" NOT NULL '


def read_other_types(connection: psycopg.Connection[Any]) -> list[OtherType]:
    """The database's identity columns whose sequences have another type. No transaction may be open."""
    with connection.transaction():
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        rows = connection.execute(OTHER_TYPES_QUERY).fetchall()
    return [OtherType(raw_text(column), raw_text(schema), raw_text(name), *of) for column, schema, name, *of in rows]


def restore_types(script: str, sequences: Iterable[OtherType]) -> str:
    """The script with the types and bounds of these sequences.

    pg_dump does not write their type (dumpSequence), so they would get the type of their column, which is an error if
    that type is too small for their bounds.
    """
    for one in sequences:
        script = _restore_type(script, one)
    return script


def _restore_type(script: str, one: OtherType) -> str:
    name = f"{quote_identifier(one.schema)}.{quote_identifier(one.name)}"
    begins = (
        f" ALTER COLUMN {quote_identifier(one.column)} ADD GENERATED {kind} AS IDENTITY (\n    SEQUENCE NAME {name}\n"
        for kind in ("ALWAYS", "BY DEFAULT")
    )
    begin = next((text for text in begins if script.count(text) == 1), None)
    if begin is None:
        return script
    before, after = script.split(begin)
    options, end, rest = after.partition("\n);\n")
    other_options = "\n".join(line for line in options.split("\n") if not TYPE_OPTION.match(line))
    altered = (
        f"ALTER SEQUENCE {name} AS {one.type} MINVALUE {one.smallest} MAXVALUE {one.largest}"
        f" START WITH {one.start} RESTART;\n"
    )
    return f"{before}{begin}{other_options}{end}{altered}{rest}"
