"""Tables whose shape or names are at the limits of PostgreSQL, and their changes before two increments."""

from __future__ import annotations

from collections.abc import Iterator

NAMES = (
    "select", "Ünï cödé 𝄞", "a.b", 'q"uo""te', "it's", "%s", "%", "{}", "tab\there", "new\nline", "x" * 63, "é" * 31,
    " lead and trail ", "UPPER", "[a-z]*?", "\\", "\\N", "$1", "a;--", "/*", "user", "1", "NULL", "a,b", '"', "(", ":a",
)  # fmt: skip
# Pairs whose `schema.table` is the same text.
SAME_NAMES = (("a.b", "c"), ("a", "b.c"), ("a.b.c", "d"), ("a.b", "c.d"), ("a", "b.c.d"), ('a"', "b"), ("a", '"b'))
COLUMNS_MAX = 1600


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def names() -> dict[int, list[str]]:
    """The statements by increment: schemas, tables, columns, constraints and sequences of every name."""
    script: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for number, name in enumerate(NAMES):
        # Tables and indexes share a namespace, so the table takes the next name.
        schema, table, column = quoted(name), quoted(NAMES[(number + 1) % len(NAMES)]), quoted(NAMES[number - 1])
        where = f"{schema}.{table}"
        script[0] += [
            f"CREATE SCHEMA {schema}",
            f"CREATE SEQUENCE {schema}.{column} START {number + 5}",
            f"CREATE TABLE {where} ({column} int DEFAULT nextval({literal(f'{schema}.{column}')}), {schema} text,"
            f" CONSTRAINT {schema} PRIMARY KEY ({column}), CONSTRAINT {table} CHECK ({schema} <> 'no'))",
            f"INSERT INTO {where} ({schema}) VALUES ('a'), ('b'), ('c')",
        ]
        script[1] += [
            f"UPDATE {where} SET {schema} = {schema} || 'x' WHERE {schema} = 'a'",
            f"UPDATE {where} SET {column} = {column} + 100 WHERE {schema} = 'b'",
        ]
        script[2] += [f"DELETE FROM {where} WHERE {schema} = 'c'", f"INSERT INTO {where} ({schema}) VALUES ('d')"]
    return script


def same_names() -> dict[int, list[str]]:
    """Tables that `schema.table` does not distinguish: their columns, keys and changes differ."""
    script: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for number, (schema, table) in enumerate(SAME_NAMES):
        where = f"{quoted(schema)}.{quoted(table)}"
        identity = "PRIMARY KEY" if number % 3 else ""
        script[0] += [f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}"]
        script[0] += [f"CREATE TABLE {where} (v{number} text, id int {identity}, w{number} int DEFAULT {number})"]
        script[0] += [] if identity else [f"ALTER TABLE {where} REPLICA IDENTITY FULL"]
        script[0] += [f"INSERT INTO {where} SELECT 'of {number}', g FROM generate_series(1, {number + 3}) g"]
        script[1] += [
            f"UPDATE {where} SET id = id + {number + 1} * 100 WHERE id < 3",
            f"DELETE FROM {where} WHERE id = 3",
        ]
        script[2] += (
            [f"TRUNCATE {where}"] if number == 1 else [f"UPDATE {where} SET v{number} = 'again' WHERE id > 100"]
        )
    return script


def literal(text: str) -> str:
    """The text as an SQL literal, with its backslashes escaped."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def widest() -> dict[int, list[str]]:
    """A table with as many columns as possible, keyed by two in the middle; one without a key, almost all NULL."""
    columns = ", ".join(f"c{number} int" for number in range(1, COLUMNS_MAX + 1))
    values = ", ".join(
        f"CASE WHEN (g + {number}) % 5 > 0 THEN g * {number} END" for number in range(1, COLUMNS_MAX + 1)
    )
    values = values.replace("CASE WHEN (g + 800) % 5 > 0 THEN g * 800 END", "g")
    values = values.replace("CASE WHEN (g + 9) % 5 > 0 THEN g * 9 END", "-g")
    texts = ", ".join(f"t{number} text" for number in range(1, COLUMNS_MAX + 1))
    return {
        0: [
            "CREATE SCHEMA widest",
            f"CREATE TABLE widest.numbers ({columns}, PRIMARY KEY (c800, c9))",
            f"INSERT INTO widest.numbers SELECT {values} FROM generate_series(1, 20) g",
            f"CREATE TABLE widest.texts ({texts})",
            "ALTER TABLE widest.texts REPLICA IDENTITY FULL",
            "INSERT INTO widest.texts (t1600, t7) VALUES (repeat(E'\\t', 3000), ''), ('last', NULL), ('last', NULL)",
        ],
        1: [
            "UPDATE widest.numbers SET c1600 = 7, c1 = NULL WHERE c800 < 5",
            "UPDATE widest.numbers SET c9 = 1000 WHERE c800 = 6",
            "DELETE FROM widest.numbers WHERE c800 = 7",
            "UPDATE widest.texts SET t800 = 'middle' WHERE t7 IS NULL",
        ],
        2: [
            f"INSERT INTO widest.numbers SELECT {values} FROM generate_series(21, 25) g",
            "DELETE FROM widest.texts WHERE ctid = (SELECT min(ctid) FROM widest.texts)",
        ],
    }


def steps() -> Iterator[dict[int, list[str]]]:
    """The statements by increment of every kind."""
    yield names()
    yield same_names()
    yield widest()
