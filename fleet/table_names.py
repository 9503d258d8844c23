"""Table names: for reports and patterns, and quoted for SQL."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Collection, Iterable

from cutline.fleet.config import GroupRules
from cutline.fleet.messages import list_some

# SQL for the text that `table_name` returns for n.nspname and c.relname.
TABLE_NAME = """
(SELECT string_agg(CASE WHEN part ~ '[."]' THEN '"' || replace(part, '"', '""') || '"' ELSE part END, '.'
                   ORDER BY place)
   FROM unnest(ARRAY[n.nspname, c.relname]::text[]) WITH ORDINALITY AS parts (part, place))
"""
# The pattern that matches every table.
ANY = "*"
QUOTED_PART = re.compile(r'"((?:[^"]|"")*)"')
PART = r'("(?:[^"]|"")*"|[^".]*)'
TWO_PARTS = re.compile(rf"{PART}\.{PART}", re.DOTALL)


def table_name(schema: str, table: str) -> str:
    """Return `schema.table`, quoting parts that contain a dot or a quote, so that every table has a different name."""
    return f"{quote_if_needed(schema)}.{quote_if_needed(table)}"


def quote_if_needed(part: str) -> str:
    """Quote a part of a name for reports if it contains a dot or a quote."""
    return quote_identifier(part) if "." in part or '"' in part else part


def is_matching(name: str, patterns: Collection[str]) -> bool:
    """Whether a table's name, as `table_name` writes it, matches one of the patterns.

    A pattern may quote both parts of the name as in SQL, either, or none; `*`, `?` and `[…]` mean the same in quotes.
    """
    if not patterns or ANY in patterns:
        return bool(patterns)
    plain = QUOTED_PART.sub(lambda part: part[1].replace('""', '"'), name)
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(form, pattern) for form in (name, plain)):
            return True
        if (parts := _quoted_parts(pattern)) and (of_name := _parts(name)):
            pairs = zip(of_name, parts, strict=True)
            if all(fnmatch.fnmatchcase(part, part_pattern) for part, part_pattern in pairs):
                return True
    return False


@functools.lru_cache
def _quoted_parts(pattern: str) -> tuple[str, str] | None:
    """Return the pattern's patterns for schema and table, without quotes; None if neither is quoted."""
    return _parts(pattern) if '"' in pattern else None


def _parts(name: str) -> tuple[str, str] | None:
    """Return the schema and table of `schema.table`, without quotes; None if it has another form."""
    match = TWO_PARTS.fullmatch(name)
    return (unquote_identifier(match[1]), unquote_identifier(match[2])) if match else None


def is_schema_named(schema: str, given: Collection[str]) -> bool:
    """Whether one of the given names, which may be quoted as in SQL, is the schema's."""
    return schema in given or quote_identifier(schema) in given


def similar_names(pattern: str, names: Iterable[str], most: int) -> str:
    """Describe the tables that a pattern without a match may have meant, at most so many of them; "" if none.

    Their names differ in case, or begin like it, or it lacks the schema, or has a typing mistake.
    """
    lower = {name.lower(): name for name in names}
    small = pattern.lower()
    if similar := [name for other, name in lower.items() if is_matching(other, (small,))]:
        return f"same name in other case: {list_some(similar, most)}   (patterns are case-sensitive)"
    if "." not in pattern and (
        similar := [name for other, name in lower.items() if is_matching(other, (f"*.{small}",))]
    ):
        return f"a pattern is schema.table: {list_some(similar, most)}"
    plain = _parts(small)
    begin = table_name(*plain) if plain else small
    if similar := [name for other, name in lower.items() if other.startswith(begin)]:
        return (
            f"the rows of a partitioned table are in its partitions; tables that begin with {pattern}:"
            f" {list_some(similar, most)}"
        )
    # Imported here, because it is only needed for a mistake.
    from difflib import get_close_matches

    if similar := [lower[other] for other in get_close_matches(small, lower, most)]:
        return f"did you mean: {list_some(similar, most)}"
    return ""


def is_included(name: str, rules: GroupRules) -> bool:
    """Whether the rules make `schema.table` a group."""
    return is_matching(name, rules.include) and not is_matching(name, rules.exclude)


def unquote_identifier(name: str) -> str:
    """Remove an identifier's quotes, if it has any."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def quote_identifier(name: str) -> str:
    """Quote the name as an identifier (PostgreSQL manual, "Identifiers and Key Words")."""
    return '"' + name.replace('"', '""') + '"'
