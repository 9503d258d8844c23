"""The encodings of servers: rows and DDL pass through as the server's own bytes, names and ids become text.

A conversion of rows would not be exact: some encodings have bytes without a character in UTF-8 (WIN1251), some have
characters that do not come back as they were, and in SQL_ASCII bytes mean nothing at all. So what carries rows or DDL
has the client encoding RAW, under which PostgreSQL converts nothing. Names are converted by the server itself, so that
one that was decoded from the WAL is the one that its catalogs have. Every server encoding has ASCII's bytes for
ASCII's characters, and for nothing else (PostgreSQL manual, "Character Set Support").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap, Buffer, Loader

RAW = "SQL_ASCII"
UTF8 = "UTF8"
TEXT_TYPES = ("text", "name", "varchar", "bpchar", '"char"', 0)
CONVERT_QUERY = """
SELECT convert_from(given, getdatabaseencoding()) FROM unnest(%s::bytea[]) WITH ORDINALITY AS g (given, n) ORDER BY n
"""

# From a server's bytes to text, value by value; never fails. Where there is none, the bytes are text.
Texts = Callable[[Sequence[bytes]], list[str]]


class _TextLoader(Loader):
    """Text of the server. A name of another database, in that one's encoding, is shown and never ends a command."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode("utf-8", "backslashreplace")


class _BytesLoader(Loader):
    """Text of the server as its bytes."""

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    for name in TEXT_TYPES:
        adapters.register_loader(name, _TextLoader)
    return adapters


ADAPTERS = _adapters()


def readable(expression: str) -> str:
    """SQL: the text of `expression`, as ASCII with octal escapes where a session in UTF-8 might not take it.

    It may be of another database, and no text in the encoding of this one: nothing here looks at its characters.
    """
    # What quote_literal adds is taken off again: it makes any bytes the text of a bytea.
    escaped = f"encode(quote_literal({expression})::bytea, 'escape')"
    return (
        f"CASE WHEN getdatabaseencoding() = 'UTF8' OR {escaped} !~ '\\\\[23][0-7][0-7]' THEN {expression}"
        f" ELSE replace(regexp_replace({escaped}, '^E?''|''$', '', 'g'), '''''', '''') END"
    )


def raw_text(body: bytes) -> str:
    """Bytes of a server as text that `raw_bytes` turns into the same bytes, whatever they are."""
    return body.decode("utf-8", "surrogateescape")


def raw_bytes(text: str) -> bytes:
    """The bytes that `raw_text` was given."""
    return text.encode("utf-8", "surrogateescape")


def texts_of_raw(values: Sequence[bytes]) -> list[str]:
    """The texts of a server that has no encoding: UTF-8, where it is that; other bytes are escaped."""
    return [value.decode("utf-8", "backslashreplace") for value in values]


def encoding_of(connection: psycopg.Connection[Any]) -> str:
    """The encoding of the connection's database."""
    return (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()


def texts_of(connection: psycopg.Connection[Any]) -> Texts | None:
    """How bytes of the connection's database become text; asks the server only for what is not ASCII."""
    encoding = encoding_of(connection)
    if encoding in (UTF8, RAW):
        return None if encoding == UTF8 else texts_of_raw

    def texts(values: Sequence[bytes]) -> list[str]:
        known = {value: value.decode("ascii", "backslashreplace") for value in values}
        foreign = [value for value in known if not value.isascii()]
        known |= _convert(connection, foreign)
        return [known[value] for value in values]

    return texts


def fetch_texts(connection: psycopg.Connection[Any], query: str) -> list[tuple[Any, ...]]:
    """The query's rows, where it may give names of other databases: bytes that are no text in this one are escaped.

    No transaction may be open: what it did next would have the client encoding RAW.
    """
    texts = texts_of(connection)
    if texts is None:
        return connection.execute(query.encode()).fetchall()
    with connection.transaction(), connection.cursor() as cursor:
        for name in TEXT_TYPES:
            cursor.adapters.register_loader(name, _BytesLoader)
        cursor.execute(f"SET LOCAL client_encoding = '{RAW}'")
        rows = cursor.execute(query.encode()).fetchall()
    values = list({value for row in rows for value in row if isinstance(value, bytes)})
    known = dict(zip(values, texts(values), strict=True))
    return [tuple(known[value] if isinstance(value, bytes) else value for value in row) for row in rows]


def without_text(connection: psycopg.Connection[Any], values: list[bytes]) -> list[bytes]:
    """Those of the values, of the connection's database, that have no text in UTF-8."""
    if encoding_of(connection) in (RAW, UTF8):
        return [value for value in values if raw_text(value) != texts_of_raw([value])[0]]
    known = _convert(connection, values)
    return [value for value in values if value not in known]


def _convert(connection: psycopg.Connection[Any], values: list[bytes]) -> dict[bytes, str]:
    """Those of the values that the server can convert."""
    if not values:
        return {}
    try:
        return dict(zip(values, [row[0] for row in connection.execute(CONVERT_QUERY, (values,))], strict=True))
    except psycopg.DataError:
        if len(values) == 1:
            return {}
        # Rare: the one that has no character in UTF-8 is found by halves.
        half = len(values) // 2
        return _convert(connection, values[:half]) | _convert(connection, values[half:])
