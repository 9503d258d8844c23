"""Find a row that a server can't print while decoding: it is too large, or its type's output function refuses it.

Reading the slot fails at this row every time, so no later WAL can be archived. To find the row, the messages before the
error are counted. Then the slot is read in binary form, which takes half the space of a bytea and needs no output
function: the next message is the row.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, TypeAlias

import psycopg
from msgspec import Struct
from psycopg.pq import Format

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect, connect_replication
from cutline.nodes.encodings import RAW
from cutline.nodes.server_errors import KEY_CHARACTERS_MAX, is_row_error
from cutline.storage.errors import SnapshotError
from cutline.wal.decoding.decoder import RowUndecodableError
from cutline.wal.drain.message_stream import stream_messages

# Printing a value of any other type may run a user's code.
BUILTIN_OID_MAX = 16383
OUT_OF_MEMORY = "53200"

_Found: TypeAlias = tuple[str, str]


class _Column(Struct, frozen=True):
    name: str
    oid: int
    is_key: bool


class _Relation(Struct, frozen=True):
    """A table as pgoutput describes it."""

    name: str
    columns: tuple[_Column, ...]


def find_unprintable(node: Node, slot: str, publications: tuple[str, ...], finish: Lsn) -> RowUndecodableError | None:
    """Return an error naming the row at which reading the slot up to `finish` fails; None if no row is the cause."""
    problems: list[tuple[str, str]] = []
    with closing(connect_replication(node, client_encoding=RAW)) as connection:
        read = sum(
            1
            for _ in stream_messages(
                connection.pgconn, slot, publications, finish, refused=lambda *problem: problems.append(problem)
            )
        )
    # On the next attempt the server may have more memory.
    if not problems or not is_row_error(problems[0][0]) or problems[0][0] == OUT_OF_MEMORY:
        return None
    sqlstate, text = problems[0]
    found = _find_row(node, slot, publications, finish, read)
    if found is None:
        return None
    table, row = found
    what = f"PostgreSQL can't print a row that was written, so WAL can't be decoded: {text}"
    return RowUndecodableError(node=node.id, table=table, what=what, row=row, sqlstate=sqlstate, slot=slot)


def _find_row(node: Node, slot: str, publications: tuple[str, ...], finish: Lsn, number: int) -> _Found | None:
    """Return the table and key, as text, of the row in the slot's message `number`; None if that is not a row."""
    relations: dict[int, _Relation] = {}
    with closing(connect_replication(node, client_encoding=RAW)) as connection:
        messages = stream_messages(connection.pgconn, slot, publications, finish, binary=True)
        for place, message in enumerate(messages):
            if message[:1] == b"R":
                relations[int.from_bytes(message[1:5], "big")] = _relation(message)
            if place == number:
                found = relations.get(int.from_bytes(message[1:5], "big")) if message[:1] in b"IUD" else None
                return (found.name, _key_text(node, found, message)) if found else None
    return None


def _relation(message: bytes) -> _Relation:
    schema, name, rest = message[5:].split(b"\0", 2)
    columns, rest = [], rest[3:]
    while rest:
        is_key, (column, tail) = bool(rest[0] & 1), rest[1:].split(b"\0", 1)
        columns.append(_Column(column.decode(errors="replace"), int.from_bytes(tail[:4], "big"), is_key))
        rest = tail[8:]
    return _Relation(f"{schema.decode(errors='replace')}.{name.decode(errors='replace')}", tuple(columns))


def _key_text(node: Node, table: _Relation, message: bytes) -> str:
    """Return the row's key as `id = 7`, or "" if unknown. If an UPDATE changed the key, return the old key."""
    at, parts = 8, []
    try:
        with connect(node) as connection:
            for column in table.columns:
                kind = message[at : at + 1]
                size = int.from_bytes(message[at + 1 : at + 5], "big") if kind in (b"b", b"t") else -4
                if column.is_key and size >= 0 and column.oid <= BUILTIN_OID_MAX:
                    value = _print(connection, column.oid, kind, message[at + 5 : at + 5 + size])
                    parts.append(f"{column.name} = {value}")
                at += 5 + size
    except (SnapshotError, psycopg.Error):
        return ""
    return ", ".join(parts)[:KEY_CHARACTERS_MAX]


def _print(connection: psycopg.Connection[Any], oid: int, kind: bytes, value: bytes) -> str:
    """Return the text of a value; PostgreSQL prints binary values."""
    if kind == b"t":
        return value.decode(errors="replace")
    result = connection.pgconn.exec_params(b"SELECT $1::text", [value], [oid], [Format.BINARY])
    return (result.get_value(0, 0) or b"?").decode(errors="replace")
