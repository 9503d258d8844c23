"""What pg_dump writes wrong, put right before it is stored: its script would not load, or make something else.

Scripts are raw text (fleet.nodes.encodings), with all identifiers quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.nodes.encodings import RAW, raw_text
from fleet.tables.groups import quote_identifier

TABLE = re.compile(r'^CREATE (?:\w+ )?TABLE ".*?;$', re.MULTILINE | re.DOTALL)
UNQUOTED = re.compile(r'^    CONSTRAINT (?!")(?P<name>.+?) NOT NULL (?="(?:[^"]|"")+",?$)', re.MULTILINE | re.DOTALL)
# CREATE TABLE … (LIKE … INCLUDING IDENTITY) makes them, and ALTER SEQUENCE … AS.
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
OF_TYPE = re.compile(r"    (?:START WITH|MINVALUE|MAXVALUE|NO MINVALUE|NO MAXVALUE)\b")


@dataclass(frozen=True, slots=True)
class OtherType:
    """The sequence of an identity column that is of another type than the column; names are raw text."""

    column: str
    schema: str
    name: str
    type: str
    start: int
    smallest: int
    largest: int


def correct_script(script: str) -> str:
    """The script, in which all identifiers are quoted, but for this: the name of an inherited NOT NULL constraint.

    From 18 on pg_dump writes it as it is (dumpTableSchema, for columns that are not the table's own), which is a
    syntax error if it has a space, and another name if it has a capital.
    """
    return TABLE.sub(lambda table: UNQUOTED.sub(_quote, table[0]), script)


def _quote(found: re.Match[str]) -> str:
    name = found["name"].replace('"', '""')
    return f'    CONSTRAINT "{name}" NOT NULL '


def read_other_types(connection: psycopg.Connection[Any]) -> list[OtherType]:
    """The database's identity columns whose sequences are of other types. No transaction may be open."""
    with connection.transaction():
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        rows = connection.execute(OTHER_TYPES_QUERY).fetchall()
    return [OtherType(raw_text(column), raw_text(schema), raw_text(name), *of) for column, schema, name, *of in rows]


def restore_types(script: str, sequences: Iterable[OtherType]) -> str:
    """The script with these sequences as they are.

    pg_dump does not write their type (dumpSequence), so that they would be of their columns' types: too small for the
    bounds that some of them have, which is an error.
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
    kept = "\n".join(line for line in options.split("\n") if not OF_TYPE.match(line))
    altered = (
        f"ALTER SEQUENCE {name} AS {one.type} MINVALUE {one.smallest} MAXVALUE {one.largest}"
        f" START WITH {one.start} RESTART;\n"
    )
    return f"{before}{begin}{kept}{end}{altered}{rest}"
