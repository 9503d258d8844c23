"""What pg_dump writes wrong, put right before it is stored: its script would not load."""

from __future__ import annotations

import re

TABLE = re.compile(r'^CREATE (?:\w+ )?TABLE ".*?;$', re.MULTILINE | re.DOTALL)
UNQUOTED = re.compile(r'^    CONSTRAINT (?!")(?P<name>.+?) NOT NULL (?="(?:[^"]|"")+",?$)', re.MULTILINE | re.DOTALL)


def corrected(script: str) -> str:
    """The script, in which all identifiers are quoted, but for this: the name of an inherited NOT NULL constraint.

    From 18 on pg_dump writes it as it is (dumpTableSchema, for columns that are not the table's own), which is a
    syntax error if it has a space, and another name if it has a capital.
    """
    return TABLE.sub(lambda table: UNQUOTED.sub(_quoted, table[0]), script)


def _quoted(found: re.Match[str]) -> str:
    name = found["name"].replace('"', '""')
    return f'    CONSTRAINT "{name}" NOT NULL '
