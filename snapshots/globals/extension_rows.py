"""Read the rows of extensions' configuration tables, store them, and read them back.

An extension marks the tables whose rows CREATE EXTENSION does not make (pg_extension_config_dump; PostgreSQL manual,
"Extension Configuration Tables"), most with a condition that leaves out its own. A publication can't have them where
their owner is somebody else, so they are read by SELECT after each cut, and stored whole with each commit. They are
small: a table with more than ROWS_MAX rows or BYTES_MAX of statements is left out, by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

import msgspec
import psycopg
import zstandard

from fleet.config import GroupRules, Node
from fleet.nodes.connections import disrupted_error, refuse_views
from fleet.nodes.disruptions import remedy_of
from fleet.nodes.encodings import RAW, fetch_texts
from fleet.nodes.relation_locks import bound_lock_waits, raising_locked
from fleet.nodes.server_messages import shorten_message
from fleet.nodes.sessions import Sessions, in_parallel
from fleet.record import from_json, to_builtins
from fleet.tables.left_out import WHY, LeftOut, LeftOutKind
from fleet.tables.names import TABLE_NAME, is_included
from snapshots.operations.operation import Operation
from snapshots.records.extension_rows import ExtensionRows, ExtensionTable
from snapshots.records.keys import ddl_prefix
from snapshots.records.stored_object import EXTENSION_ROWS, StoredObject
from storage.store import ObjectStore
from storage.storing import create_or_find
from wal.segments.damage import ObjectDamagedError, read_listed

ROWS_MAX, BYTES_MAX = 1_000_000, 64 << 20
# Of all tables of a shard, as they are read back.
SCRIPT_BYTES_MAX, WINDOW_BYTES_MAX = 1 << 30, 128 << 20
ROWS_AT_ONCE = 500
COMMENT = b"-- "
# As pg_dump does, tables of foreign keys among them in the order in which they can be filled.
TABLES_QUERY = f"""
SELECT c.oid::bigint, e.extname, n.nspname, c.relname, {TABLE_NAME},
       ARRAY(SELECT k.confrelid::bigint FROM pg_constraint k
              WHERE k.conrelid = c.oid AND k.contype = 'f' AND k.confrelid <> c.oid)
  FROM pg_extension e CROSS JOIN unnest(e.extconfig) WITH ORDINALITY AS m (relation, place)
  JOIN pg_class c ON c.oid = m.relation JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') ORDER BY e.extname, m.place
"""
# For one table: the beginning and the end of its INSERT statements, and the query for the lines between, which reads
# one row more than are stored, to see that there are more. format() writes a value as COPY does, by its type's output
# function. A row of the snapshot replaces one that has its key.
STATEMENTS_QUERY = f"""
WITH attribute AS (
  SELECT a.attnum, a.attidentity, quote_ident(a.attname) AS name, a.attnum = ANY (i.indkey) IS TRUE AS is_key
    FROM pg_attribute a
    LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary AND i.indimmediate AND i.indisvalid
   WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
), listed AS (
  SELECT string_agg(name, ', ' ORDER BY attnum) AS names,
         string_agg(format('format(''%%%%L'', %%s)', name), ' || '', '' || ' ORDER BY attnum) AS line,
         string_agg(name, ', ' ORDER BY attnum) FILTER (WHERE is_key) AS key,
         string_agg(format('%%1$s = EXCLUDED.%%1$s', name), ', ' ORDER BY attnum)
           FILTER (WHERE NOT is_key AND attidentity <> 'a') AS others
    FROM attribute
), marked AS (
  SELECT format('%%I.%%I', n.nspname, c.relname) AS name, m.condition
    FROM pg_extension e CROSS JOIN unnest(e.extconfig, e.extcondition) AS m (relation, condition)
    JOIN pg_class c ON c.oid = m.relation JOIN pg_namespace n ON n.oid = c.relnamespace
   WHERE c.oid = %(table)s
)
SELECT textsend(format(E'INSERT INTO %%s (%%s) OVERRIDING SYSTEM VALUE VALUES\\n', name, names)),
       textsend(E'\\nON CONFLICT ' || CASE WHEN key IS NULL THEN 'DO NOTHING'
                WHEN others IS NULL THEN format('(%%s) DO NOTHING', key)
                ELSE format('(%%s) DO UPDATE SET %%s', key, others) END || E';\\n'),
       textsend(format('SELECT count(*), textsend(string_agg(line, E'',\\n'')) FROM (SELECT (row_number() OVER () - 1)'
                ' / {ROWS_AT_ONCE} AS part, %%L || %%s || %%L AS line FROM %%s %%s LIMIT {ROWS_MAX + 1}) AS lines'
                ' GROUP BY part ORDER BY part', '(', line, ')', name, condition))
  FROM listed CROSS JOIN marked WHERE names IS NOT NULL
"""


class _TooManyError(Exception):
    """A table has more rows, or longer ones, than are stored."""


@dataclass(frozen=True, slots=True)
class MarkedTable:
    """A configuration table as the catalogs have it; `label` is its name as rules and outputs have it."""

    oid: int
    extension: str
    schema: str
    name: str
    label: str


@dataclass(frozen=True, slots=True)
class _CompressedRows:
    """The number of a table's rows, and their statements, compressed, with the size that these have uncompressed."""

    count: int
    size: int
    body: bytes


@dataclass(frozen=True, slots=True)
class FilledTable:
    """A configuration table and its statements, in the encoding of its database."""

    table: ExtensionTable
    statements: bytes


def store_extension_rows(
    store: ObjectStore, sessions: Sessions, operation: Operation, rules: GroupRules
) -> tuple[tuple[StoredObject, ...], tuple[LeftOut, ...]]:
    """Store the rows of each shard's configuration tables, if there are any; also return what could not be read.

    Raises NodeUnreachableError, RelationLockedError.
    """
    read = sessions.ask_named_primaries(partial(_read_rows, rules=rules))

    def store_one(shard: str) -> StoredObject | None:
        body, _ = read[shard]
        if not body:
            return None
        prefix = ddl_prefix(operation.snapshot, shard, operation.id)
        key = f"{prefix}/{EXTENSION_ROWS}-{secrets.token_hex(4)}.sql.zst"
        return StoredObject(key, EXTENSION_ROWS, shard, len(body), create_or_find(store, key, body), {})

    stored = tuple(one for one in in_parallel(store_one, read) if one is not None)
    return stored, tuple(one for _, left_out in read.values() for one in left_out)


def _read_rows(
    node: Node, connection: psycopg.Connection[Any], *, rules: GroupRules
) -> tuple[bytes, tuple[LeftOut, ...]]:
    """The object's body, compressed and empty if there are no rows; and what could not be read."""
    tables = _list_tables(connection, rules)
    if not tables:
        return b"", ()
    filled, parts, left_out = list[ExtensionTable](), list[bytes](), list[LeftOut]()
    kind = LeftOutKind.EXTENSION_ROWS
    with (
        raising_locked(node, "reading rows of extensions' tables", (_quoted(one) for one in tables)),
        connection.transaction(),
    ):
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        refuse_views(connection)
        bound_lock_waits(connection)
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        for one in tables:
            found = connection.execute(STATEMENTS_QUERY, {"table": one.oid}).fetchone()
            if found is None:
                # It has no columns, or was dropped after the cut.
                continue
            try:
                with connection.transaction():
                    rows = _compress_rows(connection, *map(bytes, found))
            except _TooManyError:
                why = f"more than {ROWS_MAX:,} rows or {BYTES_MAX >> 20} MiB"
            except psycopg.errors.LockNotAvailable:
                raise
            except psycopg.Error as error:
                if connection.broken:
                    raise
                if remedy_of(error):
                    raise disrupted_error(node.id, error, f"table {one.label}") from error
                why = shorten_message(error)
            else:
                if rows.count:
                    names = {"extension": one.extension, "schema": one.schema, "name": one.name}
                    filled.append(ExtensionTable(**names, rows=rows.count, size=rows.size))
                    parts.append(rows.body)
                continue
            left_out.append(LeftOut(node.id, kind, one.label, WHY[kind].format(why)))
    if not filled:
        return b"", tuple(left_out)
    header = COMMENT + msgspec.json.encode(to_builtins(ExtensionRows(tables=tuple(filled)))) + b"\n"
    return b"".join((zstandard.compress(header), *parts)), tuple(left_out)


def _list_tables(connection: psycopg.Connection[Any], rules: GroupRules) -> list[MarkedTable]:
    """The configuration tables that the rules do not exclude, those that others reference first."""
    found = {row[0]: (MarkedTable(*row[:5]), row[5]) for row in fetch_texts(connection, TABLES_QUERY)}
    order = TopologicalSorter({oid: [one for one in needed if one in found] for oid, (_, needed) in found.items()})
    try:
        ordered = list(order.static_order())
    except CycleError:
        ordered = list(found)
    return [found[oid][0] for oid in ordered if is_included(found[oid][0].label, rules)]


def _quoted(table: MarkedTable) -> str:
    return psycopg.sql.Identifier(table.schema, table.name).as_string(None)


def _compress_rows(connection: psycopg.Connection[Any], begin: bytes, end: bytes, query: bytes) -> _CompressedRows:
    """The rows that the query gives, each of whose lines stands between the two; raise _TooManyError."""
    rows, size, compressor = 0, 0, zstandard.ZstdCompressor().compressobj()
    pieces: list[bytes] = []
    with connection.cursor(binary=True) as cursor:
        for count, lines in cursor.stream(query):
            statement = begin + lines + end
            rows, size = rows + count, size + len(statement)
            if rows > ROWS_MAX or size > BYTES_MAX:
                raise _TooManyError
            pieces.append(compressor.compress(statement))
    return _CompressedRows(rows, size, b"".join((*pieces, compressor.flush())))


def read_extension_rows(store: ObjectStore, objects: Mapping[str, StoredObject], shard: str) -> tuple[FilledTable, ...]:
    """The rows of the shard's configuration tables, by the objects of a commit; raise ObjectDamagedError."""
    stored = objects.get(shard)
    return () if stored is None else read_extension_rows_object(store, stored)


def read_extension_rows_object(store: ObjectStore, stored: StoredObject) -> tuple[FilledTable, ...]:
    """What the object has; raise ObjectDamagedError."""
    body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        with decompressor.stream_reader(body, read_across_frames=True) as reader:
            script = reader.read(SCRIPT_BYTES_MAX + 1)
        if len(script) > SCRIPT_BYTES_MAX:
            raise ValueError(f"it is larger than {SCRIPT_BYTES_MAX >> 20} MiB")
        return tuple(_divide(script))
    except (zstandard.ZstdError, MemoryError, ValueError, msgspec.DecodeError) as error:
        detail = f"it can't be read: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error


def _divide(script: bytes) -> Iterator[FilledTable]:
    """The tables of a script, each with its statements; raise ValueError if they are not what its first line says."""
    first, _, statements = script.partition(b"\n")
    if not first.startswith(COMMENT):
        raise ValueError("its first line does not say what it has")
    document: ExtensionRows = from_json(first.removeprefix(COMMENT), ExtensionRows)
    if sum(one.size for one in document.tables) != len(statements):
        raise ValueError("its first line says another size")
    begin = 0
    for one in document.tables:
        yield FilledTable(one, statements[begin : begin + one.size])
        begin += one.size
