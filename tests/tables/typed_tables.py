"""A table for every type that a server's columns can have, with the values known for it, and their changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.nodes.groups import read_special_columns
from tests.tables.values_of_types import BUILT_IN, DECLARED, EXTENSIONS, OWN_TYPES

# The types that get a table here: arrays come with their element type, composites with DECLARED.
TYPES_QUERY = """
SELECT format_type(t.oid, NULL), t.typdelim::text
  FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
 WHERE t.typtype IN ('b', 'd', 'e', 'r', 'm') AND n.nspname <> 'pg_toast'
   AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)
 ORDER BY 1
"""
# A btree entry may not be longer than a third of a page.
KEY_BYTES_MAX = 2000
# Older versions accept fewer values.
NEWEST_VERSION = 180000


@dataclass(frozen=True, slots=True)
class Typed:
    """A table `types."N type"`: id, k (the key, if the type can be one), v, and the array a."""

    name: str
    type: str
    values: tuple[str, ...]
    delimiter: str
    has_key: bool

    def array(self, values: tuple[str, ...]) -> str:
        """These values and NULL as an array whose lower bound is not 1."""
        quoted = ['"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values]
        return f"[-1:{len(quoted) - 1}]={{{self.delimiter.join(['NULL', *quoted])}}}"

    @property
    def keys(self) -> tuple[str, ...]:
        """The values that fit into an index."""
        return tuple(value for value in self.values if len(value.encode()) < KEY_BYTES_MAX)


def create_typed(connection: psycopg.Connection[Any]) -> list[Typed]:
    """Create all available extensions, user-defined types, and a table for every type; fill the tables.

    Fails if the server has a type for which no values are known.
    """
    connection.execute(OWN_TYPES.encode())
    connection.execute("CREATE SCHEMA ext")
    connection.execute("CREATE SCHEMA types")
    for (name,) in connection.execute("SELECT name FROM pg_available_extensions WHERE installed_version IS NULL"):
        # An extension or a library that it requires may be missing.
        with suppress(psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile):
            connection.execute(f'CREATE EXTENSION IF NOT EXISTS "{name}" SCHEMA ext CASCADE'.encode())
    connection.execute("SET search_path = pg_catalog")
    known = BUILT_IN | DECLARED | {f"ext.{name}": values for name, values in EXTENSIONS.items()}
    types = connection.execute(TYPES_QUERY).fetchall()
    found = [row for row in types if takes_values(connection, row[0])]
    refusing = {name for name, _ in types} - {name for name, _ in found}
    # A server may be built without XML: its xml columns are then empty, and can be restored.
    assert unloadable_types(connection, [name for name, _ in types]) == refusing - {"xml"}
    lacking = sorted({name for name, _ in found} - known.keys())
    assert not lacking, f"no known values of these types: {lacking}"
    declared = [(name, ",") for name in DECLARED if name not in {name for name, _ in found}]
    connection.execute("SET search_path = pg_catalog, ext")
    tables = [
        _create(connection, number, name, delimiter, valid_values(connection, name, known[name]))
        for number, (name, delimiter) in enumerate([*found, *declared])
    ]
    for table in tables:
        run(connection, _inserts(table))
    return tables


def unloadable_types(connection: psycopg.Connection[Any], names: list[str]) -> set[str]:
    """Those of the types for which Cutline refuses a table that has a column of each."""
    columns = ", ".join(f"c{number} {name}" for number, name in enumerate(names))
    with connection.transaction(force_rollback=True):
        connection.execute(f"CREATE TABLE types.told ({columns})".encode())
        oid = connection.execute("SELECT 'types.told'::regclass::oid").fetchone()
        assert oid
        return {name for one in read_special_columns(connection, oid).values() for _, name in one.unloadable}


def takes_values(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether PostgreSQL can read a value of the type back from its text at all."""
    try:
        connection.execute(f"SELECT ''::{name}".encode())
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.InternalError_):
        # Before 16 the types of an extension's indexes raise the second one.
        return False
    except psycopg.Error:
        pass  # this text is not a value of the type
    return True


def valid_values(connection: psycopg.Connection[Any], name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """The values that this server's version accepts: the wheel's accepts all; infinite intervals need 17."""
    if connection.info.server_version >= NEWEST_VERSION:
        return values
    found = tuple(value for value in values if _round_trips(connection, name, value))
    assert found, f"no value of {name} round-trips through its text"
    return found


def _round_trips(connection: psycopg.Connection[Any], name: str, value: str) -> bool:
    """Whether the server reads the value, and its own output as the same value: 15 prints only a part of some segs."""
    query = f"SELECT v::text::{name}::text = v::text FROM (SELECT %s::{name}) AS given (v)"
    try:
        return connection.execute(query.encode(), (value,)).fetchone() == (True,)
    except psycopg.Error:
        return False


def _create(connection: psycopg.Connection[Any], number: int, name: str, delimiter: str, values: Any) -> Typed:
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
    """Insert rows with every value as key, as value and in an array, unless their key is there."""
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
    """The changes before the first or the second increment; a row is found by its key if it has one."""
    rows, values = table.keys, table.values
    if increment == 1:
        for number, value in enumerate(rows):
            # Every row gets another row's value; the last rows get those too long for an index.
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
        # To an equal key whose text may differ: -0 and 0, 1.0 and 1.00, a month and 30 days.
        yield f"UPDATE {table.name} SET k = %s, id = id + 100 {_where(table)}", (value, *_which(table, number, value))


def _where(table: Typed) -> str:
    return f"WHERE k = %s::{table.type}" if table.has_key else "WHERE id = %s"


def _which(table: Typed, number: int, value: str) -> tuple[object, ...]:
    return (value,) if table.has_key else (number,)


def run(connection: psycopg.Connection[Any], statements: Iterator[Statement]) -> None:
    """Run the statements in one transaction."""
    with connection.transaction(), connection.pipeline():
        for query, values in statements:
            connection.execute(query.encode(), values)
