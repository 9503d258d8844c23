"""A table for every type that a server's columns can have, with the values that there are of it, and their changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.tables.column_types import read_contained
from tests.tables.values_of_types import BUILT_IN, DECLARED, EXTENSIONS, OWN_TYPES

# What a column may be of by itself: arrays come with their elements' type, composites with whoever made them.
TYPES_QUERY = """
SELECT format_type(t.oid, NULL), t.typdelim::text
  FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
 WHERE t.typtype IN ('b', 'd', 'e', 'r', 'm') AND n.nspname <> 'pg_toast'
   AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)
 ORDER BY 1
"""
# A btree entry may not be longer than a third of a page.
KEY_BYTES_MAX = 2000
# Of older ones less is asked.
NEWEST_VERSION = 180000


@dataclass(frozen=True, slots=True)
class Typed:
    """A table `types."N type"`: id, k (its key, where the type can be one), v and a, an array."""

    name: str
    type: str
    values: tuple[str, ...]
    delimiter: str
    has_key: bool

    def array(self, values: tuple[str, ...]) -> str:
        """These values and NULL as an array that does not begin at 1."""
        quoted = ['"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values]
        return f"[-1:{len(quoted) - 1}]={{{self.delimiter.join(['NULL', *quoted])}}}"

    @property
    def keys(self) -> tuple[str, ...]:
        """The values that can be in an index."""
        return tuple(value for value in self.values if len(value.encode()) < KEY_BYTES_MAX)


def create_typed(connection: psycopg.Connection[Any]) -> list[Typed]:
    """Create all extensions that there are, types of one's own, and a table for every type; fill the tables.

    Fails if the server has a type of which there are no values.
    """
    connection.execute(OWN_TYPES.encode())
    connection.execute("CREATE SCHEMA ext")
    connection.execute("CREATE SCHEMA types")
    for (name,) in connection.execute("SELECT name FROM pg_available_extensions WHERE installed_version IS NULL"):
        # What it needs itself may not be there.
        with suppress(psycopg.errors.FeatureNotSupported):
            connection.execute(f'CREATE EXTENSION IF NOT EXISTS "{name}" SCHEMA ext CASCADE'.encode())
    connection.execute("SET search_path = pg_catalog")
    known = BUILT_IN | DECLARED | {f"ext.{name}": values for name, values in EXTENSIONS.items()}
    types = connection.execute(TYPES_QUERY).fetchall()
    found = [row for row in types if takes_values(connection, row[0])]
    refusing = {name for name, _ in types} - {name for name, _ in found}
    # A server may be built without XML: then its columns are empty, and come back.
    assert told_unloadable(connection, [name for name, _ in types]) == refusing - {"xml"}
    lacking = sorted({name for name, _ in found} - known.keys())
    assert not lacking, f"no values of these types: {lacking}"
    declared = [(name, ",") for name in DECLARED if name not in {name for name, _ in found}]
    connection.execute("SET search_path = pg_catalog, ext")
    tables = [
        _created(connection, number, name, delimiter, valid(connection, name, known[name]))
        for number, (name, delimiter) in enumerate([*found, *declared])
    ]
    for table in tables:
        run(connection, _inserts(table))
    return tables


def told_unloadable(connection: psycopg.Connection[Any], names: list[str]) -> set[str]:
    """Of these types, those that a table with a column of each of them would be refused for."""
    columns = ", ".join(f"c{number} {name}" for number, name in enumerate(names))
    with connection.transaction(force_rollback=True):
        connection.execute(f"CREATE TABLE types.told ({columns})".encode())
        oid = connection.execute("SELECT 'types.told'::regclass::oid").fetchone()
        assert oid
        return {name for one in read_contained(connection, oid).values() for _, name in one.unloadable}


def takes_values(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether PostgreSQL can read a value of the type back from its text at all."""
    try:
        connection.execute(f"SELECT ''::{name}".encode())
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.InternalError_):
        # Before 16 the types of an extension's indexes say so by the second one.
        return False
    except psycopg.Error:
        pass  # this text is none of its values
    return True


def valid(connection: psycopg.Connection[Any], name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """The values that this server's version knows: all, of the wheel's; 17 is the first with infinite intervals."""
    if connection.info.server_version >= NEWEST_VERSION:
        return values
    found = tuple(value for value in values if _comes_back(connection, name, value))
    assert found, f"no value of {name} comes back from its text"
    return found


def _comes_back(connection: psycopg.Connection[Any], name: str, value: str) -> bool:
    """Whether the server reads the value, and its own text of it as the same: 15 prints only a part of some segs."""
    query = f"SELECT v::text::{name}::text = v::text FROM (SELECT %s::{name}) AS given (v)"
    try:
        return connection.execute(query.encode(), (value,)).fetchone() == (True,)
    except psycopg.Error:
        return False


def _created(connection: psycopg.Connection[Any], number: int, name: str, delimiter: str, values: Any) -> Typed:
    table = f'types."{number:03} {name.replace(chr(34), "")}"'
    array = "" if name.endswith("]") else f", a {name}[]"
    columns = f"id integer, k {name} %s, v {name}{array}"
    try:
        connection.execute(f"CREATE TABLE {table} ({columns % 'PRIMARY KEY'})".encode())
        return Typed(table, name, values, delimiter, has_key=True)
    except psycopg.errors.UndefinedObject:
        connection.execute(f"CREATE TABLE {table} ({columns % ''})".encode())
        connection.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL".encode())
        return Typed(table, name, values, delimiter, has_key=False)


Statement = tuple[str, tuple[object, ...]]


def _inserts(table: Typed) -> Iterator[Statement]:
    """Rows with every value as key, as value and in an array, as far as they are not there."""
    keys = table.keys
    for number, value in enumerate(table.values):
        if table.has_key and value not in keys:
            continue
        if table.type.endswith("]"):
            query = f"INSERT INTO {table.name} VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
            yield query, (number, value, value)
        else:
            query = f"INSERT INTO {table.name} VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
            yield query, (number, value, value, table.array(keys[: number + 1]))
    if not table.has_key:
        yield f"INSERT INTO {table.name} (id) VALUES (1), (1)", ()


def changes_of(table: Typed, increment: int) -> Iterator[Statement]:
    """What the first or the second increment does, each row found by its key where there is one."""
    rows, values = table.keys, table.values
    if increment == 1:
        for number, value in enumerate(rows):
            # Every value comes as another row's; the last rows get those that no index takes.
            given = values[(number + 1 + len(values) - len(rows)) % len(values)]
            yield f"UPDATE {table.name} SET v = %s {_where(table)}", (given, *_which(table, number, value))
        if len(rows) > 1:
            yield f"DELETE FROM {table.name} {_where(table)}", _which(table, 0, rows[0])
            yield f"UPDATE {table.name} SET k = %s {_where(table)}", (rows[0], *_which(table, 1, rows[1]))
            yield f"UPDATE {table.name} SET k = %s {_where(table)}", (rows[1], *_which(table, 1, rows[0]))
            yield f"UPDATE {table.name} SET k = %s, v = NULL {_where(table)}", (rows[0], *_which(table, 1, rows[1]))
        return
    yield from _inserts(table)
    for number, value in enumerate(rows):
        # To a key that is equal, though its text may differ: -0 and 0, 1.0 and 1.00, a month and 30 days.
        yield f"UPDATE {table.name} SET k = %s, id = id + 100 {_where(table)}", (value, *_which(table, number, value))


def _where(table: Typed) -> str:
    return f"WHERE k = %s::{table.type}" if table.has_key else "WHERE id = %s"


def _which(table: Typed, number: int, value: str) -> tuple[object, ...]:
    return (value,) if table.has_key else (number,)


def run(connection: psycopg.Connection[Any], statements: Iterator[Statement]) -> None:
    """Run them in one transaction."""
    with connection.transaction(), connection.pipeline():
        for query, values in statements:
            connection.execute(query.encode(), values)
