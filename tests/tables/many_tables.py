"""A database of thousands of small tables, and their changes."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from cutline.fleet.table_names import quote_identifier

TABLES_PER_SCHEMA = 1000
TABLES_AT_ONCE = 200
# Every fourth table is empty.
KINDS = (
    (
        "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, at timestamptz DEFAULT now()",
        "INSERT INTO {table} (name) SELECT 'row ' || n FROM generate_series(1, 20) AS n",
        "UPDATE {table} SET name = name || ' again' WHERE id % 2 = 0; DELETE FROM {table} WHERE id = 1",
    ),
    (
        "a integer, b text, v numeric, PRIMARY KEY (a, b)",
        "INSERT INTO {table} SELECT n, 'key ' || n, n / 7.0 FROM generate_series(1, 50) AS n",
        "UPDATE {table} SET v = -v WHERE a < 10; INSERT INTO {table} VALUES (0, 'new', NULL)",
    ),
    (
        "id uuid PRIMARY KEY, doc jsonb",
        "INSERT INTO {table} SELECT md5(n::text)::uuid, jsonb_build_object('n', n) FROM generate_series(1, 5) AS n",
        "UPDATE {table} SET doc = doc || '{{\"changed\": true}}'",
    ),
    ("id integer PRIMARY KEY, note text", "", "INSERT INTO {table} VALUES (1, 'no longer empty')"),
)


def table_name(number: int) -> str:
    """The quoted name of table `number`."""
    return f"{quote_identifier(f's{number // TABLES_PER_SCHEMA:03d}')}.{quote_identifier(f't{number:06d}')}"


def make_tables(dsn: str, count: int) -> None:
    """Create `count` small tables, each with a key."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for number in range(-(-count // TABLES_PER_SCHEMA)):
            connection.execute(f"CREATE SCHEMA {quote_identifier(f's{number:03d}')}")
        for numbers in _batches(range(count)):
            created = [_table_statements(number) for number in numbers]
            connection.execute(";\n".join(statement for one in created for statement in one))
        connection.execute("ANALYZE")


def _table_statements(number: int) -> Iterator[str]:
    columns, rows, _ = KINDS[number % len(KINDS)]
    yield f"CREATE TABLE {table_name(number)} ({columns})"
    if number % 8 == 1:
        yield f"CREATE INDEX ON {table_name(number)} (v)"
    if rows:
        yield rows.format(table=table_name(number))


def change_tables(dsn: str, count: int, of: int) -> None:
    """Change rows of `count` tables among `of`."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        # An odd step: it shares no divisor with the number of kinds, so that tables of every kind change.
        step = max(1, of // count) | 1
        for numbers in _batches(range(0, min(of, count * step), step)):
            changes = [KINDS[number % len(KINDS)][2].format(table=table_name(number)) for number in numbers]
            connection.execute(";\n".join(changes))


def _batches(numbers: range) -> Iterator[range]:
    for start in range(0, len(numbers), TABLES_AT_ONCE):
        yield numbers[start : start + TABLES_AT_ONCE]
