"""Table names: for reports and patterns, and quoted for SQL."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection

from cutline.fleet.config import GroupRules

# SQL for the text that `table_name` returns for n.nspname and c.relname.
TABLE_NAME = """
(SELECT string_agg(CASE WHEN part ~ '[."]' THEN '"' || replace(part, '"', '""') || '"' ELSE part END, '.'
                   ORDER BY place)
   FROM unnest(ARRAY[n.nspname, c.relname]::text[]) WITH ORDINALITY AS parts (part, place))
"""
# The pattern that matches every table.
ANY = "*"
QUOTED_PART = re.compile(r'"((?:[^"]|"")*)"')


def table_name(schema: str, table: str) -> str:
    """Return `schema.table`, quoting parts that contain a dot or a quote, so that every table has a different name."""
    name = f"{schema}.{table}"
    if name.count(".") == 1 and '"' not in name:
        return name
    return ".".join(quote_identifier(part) if "." in part or '"' in part else part for part in (schema, table))


def is_matching(name: str, patterns: Collection[str]) -> bool:
    """Whether a table's name, with or without its quotes, matches one of the patterns."""
    if not patterns or ANY in patterns:
        return bool(patterns)
    plain = QUOTED_PART.sub(lambda part: part[1].replace('""', '"'), name)
    return any(fnmatch.fnmatchcase(form, pattern) for pattern in patterns for form in (name, plain))


def is_included(name: str, rules: GroupRules) -> bool:
    """Whether the rules make `schema.table` a group."""
    return is_matching(name, rules.include) and not is_matching(name, rules.exclude)


def unquote_identifier(name: str) -> str:
    """Remove an identifier's quotes, if it has any."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def quote_identifier(name: str) -> str:
    """Quote the name as an identifier (PostgreSQL manual, "Identifiers and Key Words")."""
    return '"' + name.replace('"', '""') + '"'
