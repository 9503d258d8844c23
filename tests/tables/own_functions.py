"""Rows that user-defined functions check and compute, which call other functions without naming a schema.

The script of pg_dump can't load such rows.
"""

from __future__ import annotations

STEPS = (
    (
        "CREATE SCHEMA IF NOT EXISTS {0}",
        "SET search_path = {0}; CREATE FUNCTION plain(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT lower($1)'",
        "CREATE FUNCTION {0}.named(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN plain($1); END'",
        "CREATE DOMAIN {0}.small AS text CHECK ({0}.named(VALUE) = VALUE)",
        "CREATE TABLE {0}.admitted (id int PRIMARY KEY, v {0}.small, w text CHECK ({0}.named(w) <> 'never'),"
        " g text GENERATED ALWAYS AS ({0}.named(w)) STORED)",
        "INSERT INTO {0}.admitted VALUES (1, 'one', 'One'), (2, 'two', 'Two'), (3, NULL, NULL)",
    ),
    ("UPDATE {0}.admitted SET w = 'New' WHERE id = 2", "INSERT INTO {0}.admitted VALUES (4, 'four', 'Four')"),
)


def own_functions(schema: str, increment: int) -> list[str]:
    """The statements of an increment: 0 creates the table, 1 changes it, later ones do nothing."""
    return [statement.format(schema) for statement in STEPS[increment]] if increment < len(STEPS) else []
