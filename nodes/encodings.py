"""Server encodings: rows and DDL keep the server's bytes; names and ids become text.

Converting rows would not be exact: some encodings have bytes that match no UTF-8 character (WIN1251), some have
characters that don't convert back to the same bytes, and SQL_ASCII bytes have no defined characters. So sessions that
carry rows or DDL use the client encoding RAW, under which PostgreSQL converts nothing. The server converts names
itself, so a name decoded from WAL equals the name in its catalogs. In every server encoding the bytes below 128 are
ASCII characters (PostgreSQL manual, "Character Set Support").
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

# A function that converts values from a server to text and never fails. None instead means that the values are UTF-8.
Texts = Callable[[Sequence[bytes]], list[str]]


class _TextLoader(Loader):
    """Loads text. Bytes that are not UTF-8 are escaped, so that a name from another database can't fail a command."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode("utf-8", "backslashreplace")


class _BytesLoader(Loader):
    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    for name in TEXT_TYPES:
        adapters.register_loader(name, _TextLoader)
    return adapters


ADAPTERS = _adapters()


def readable(expression: str) -> str:
    """Return SQL for the text of `expression`, with octal escapes if the server might not convert it to UTF-8.

    The SQL treats the text as bytes: text from a database in a different encoding may be invalid in the encoding of
    this database.
    """
    # quote_literal makes any bytes valid bytea input; the quotes that it adds are removed again.
    escaped = f"encode(quote_literal({expression})::bytea, 'escape')"
    return (
        f"CASE WHEN getdatabaseencoding() = 'UTF8' OR {escaped} !~ '\\\\[23][0-7][0-7]' THEN {expression}"
        f" ELSE replace(regexp_replace({escaped}, '^E?''|''$', '', 'g'), '''''', '''') END"
    )


# The name of the session's database. A dsn may have another: poolers have aliases.
DATABASE_NAME = (
    f"CASE getdatabaseencoding() WHEN '{RAW}' THEN current_database()::text"
    f" ELSE {readable('current_database()::text')} END"
)


def database_of(connection: psycopg.Connection[Any]) -> str:
    """Return the name that the server has for the session's database."""
    (name,) = connection.execute(f"SELECT {DATABASE_NAME}".encode()).fetchone() or ("",)
    return str(name)


def can_name_database(name: str, encoding: str) -> bool:
    """Whether statements in a database of this encoding can contain the name of a database.

    Clients connect with the bytes of the name in UTF-8, whatever the encoding of the database, and a server keeps these
    bytes. Statements are converted to the encoding of their session's database.
    """
    return name.isascii() or encoding in (UTF8, RAW)


def digest_of(expression: str) -> str:
    """Return SQL for the SHA-256 of the text of `expression` in hexadecimal digits, NULL if the text is NULL.

    A server whose OpenSSL is in FIPS mode refuses md5().
    """
    return f"encode(sha256(convert_to({expression}, getdatabaseencoding())), 'hex')"


def raw_text(body: bytes) -> str:
    """Decode any bytes from a server to text that `raw_bytes` converts back to the same bytes."""
    return body.decode("utf-8", "surrogateescape")


def raw_bytes(text: str) -> bytes:
    """Convert text returned by `raw_text` back to the original bytes."""
    return text.encode("utf-8", "surrogateescape")


def texts_of_raw(values: Sequence[bytes]) -> list[str]:
    """Convert values from an SQL_ASCII server to text, escaping bytes that are not UTF-8."""
    return [value.decode("utf-8", "backslashreplace") for value in values]


def encoding_of(connection: psycopg.Connection[Any]) -> str:
    """Return the encoding of the connection's database."""
    return (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()


def texts_of(connection: psycopg.Connection[Any]) -> Texts | None:
    """Return the function that converts bytes from the connection's database to text, or None if they are UTF-8.

    The function asks the server to convert only values that are not ASCII.
    """
    encoding = encoding_of(connection)
    if encoding in (UTF8, RAW):
        return None if encoding == UTF8 else texts_of_raw

    def texts(values: Sequence[bytes]) -> list[str]:
        text_of = {value: value.decode("ascii", "backslashreplace") for value in values}
        text_of |= _convert(connection, [value for value in text_of if not value.isascii()])
        return [text_of[value] for value in values]

    return texts


def fetch_texts(connection: psycopg.Connection[Any], query: str) -> list[tuple[Any, ...]]:
    """Fetch the rows of a query that may return names from other databases, escaping bytes that can't be converted.

    No transaction may be open: its remaining statements would run under the client encoding RAW.
    """
    if texts_of(connection) is None:
        return connection.execute(query.encode()).fetchall()
    (rows,) = fetch_texts_at_once(connection, [query])
    return rows


def fetch_texts_at_once(connection: psycopg.Connection[Any], queries: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    """Do the same for several queries, which all see the same snapshot of the server."""
    texts = texts_of(connection)
    with connection.transaction(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        if texts is not None:
            for name in TEXT_TYPES:
                cursor.adapters.register_loader(name, _BytesLoader)
            cursor.execute(f"SET LOCAL client_encoding = '{RAW}'")
        results = [cursor.execute(query.encode()).fetchall() for query in queries]
    if texts is None:
        return results
    values = list({value for rows in results for row in rows for value in row if isinstance(value, bytes)})
    text_of = dict(zip(values, texts(values), strict=True))
    return [
        [tuple(text_of[value] if isinstance(value, bytes) else value for value in row) for row in rows]
        for rows in results
    ]


def find_inconvertible(connection: psycopg.Connection[Any], values: list[bytes]) -> list[bytes]:
    """Return the values that can't be converted from the database's encoding to UTF-8."""
    if encoding_of(connection) in (RAW, UTF8):
        return [value for value in values if raw_text(value) != texts_of_raw([value])[0]]
    converted = _convert(connection, values)
    return [value for value in values if value not in converted]


def _convert(connection: psycopg.Connection[Any], values: list[bytes]) -> dict[bytes, str]:
    """Return the text of each value that the server can convert."""
    if not values:
        return {}
    try:
        return dict(zip(values, [row[0] for row in connection.execute(CONVERT_QUERY, (values,))], strict=True))
    except psycopg.DataError:
        if len(values) == 1:
            return {}
        # Rare: find the values that can't be converted, by bisection.
        half = len(values) // 2
        return _convert(connection, values[:half]) | _convert(connection, values[half:])
