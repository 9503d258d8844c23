"""Names in the statements of pg_dump, which quotes all of them, and how they are shown."""

from __future__ import annotations

from typing import TypeAlias

from cutline.fleet.table_names import table_name
from cutline.nodes.encodings import raw_bytes

# The name of an object: its schema and its own name.
Name: TypeAlias = tuple[str, str]

QUOTED = r'"(?:[^"]|"")*"'


def unquote(quoted: str) -> str:
    """Return an identifier that the DDL has in quotes."""
    return quoted[1:-1].replace('""', '"')


def shown(name: str) -> str:
    """Return a name of the DDL as a commit has it: with escapes for bytes that are not UTF-8."""
    return raw_bytes(name).decode(errors="backslashreplace")


def read_name(quoted: str) -> str:
    """Return an identifier that the DDL has in quotes, as a commit has it."""
    return shown(unquote(quoted))


def shown_label(name: Name) -> str:
    """Return the name of an object as messages show it."""
    return shown(table_name(*name))
