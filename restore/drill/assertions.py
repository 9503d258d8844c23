"""Assertions: ask a restored database one query, read-only, and compare what it answers with what is expected.

Values are compared as PostgreSQL prints them: numbers as numbers, booleans as booleans, everything else as text. NULL
equals nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from secrets import token_hex

import psycopg
from msgspec import UNSET
from psycopg.conninfo import make_conninfo

from fleet.config import Node
from fleet.fleet_file import DrillTable, Expected, Value
from fleet.nodes.connections import connect
from fleet.nodes.server_messages import shorten_message

QUERY_SECONDS_MAX = 600
BOOLEAN_OID = 16
ROWS_SHOWN_MAX = 5

Rows = Sequence[Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class AssertionResult:
    """What became of an assertion: whether it holds, None if it was not asked, and why it does not.

    `found` are the first rows of the answer, as PostgreSQL prints them.
    """

    assertion: DrillTable
    holds: bool | None
    why: str = ""
    found: Rows = ()
    seconds: float = 0.0


def make_reader(maintenance: Node, node: Node) -> Node:
    """Make a role that may read everything, and no more, on the drill's server; return the database as it sees it.

    What an owner of tables has put into views and functions must not run as a superuser.
    """
    role = f"cutline_drill_{token_hex(4)}"
    with connect(maintenance) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN BYPASSRLS IN ROLE pg_read_all_data".encode())
    return replace(node, dsn=make_conninfo(node.dsn, user=role))


def ask(assertion: DrillTable, node: Node) -> AssertionResult:
    """Ask the database; an error of the query is an assertion that does not hold. Raises NodeUnreachableError."""
    began = time.monotonic()
    rows_max = len(assertion.expected) if isinstance(assertion.expected, tuple) else 1
    try:
        with connect(node) as connection, connection.transaction():
            connection.execute("SET TRANSACTION READ ONLY")
            # As in a session of the application; Cutline's own have an empty one.
            connection.execute('SET LOCAL search_path = "$user", public')
            connection.execute(f"SET LOCAL statement_timeout = '{QUERY_SECONDS_MAX}s'".encode())
            # A cursor is of one query, and reads no more rows than it is asked for. Prepared, it can't be two commands.
            query = f"DECLARE asked NO SCROLL CURSOR FOR {assertion.sql.strip().removesuffix(';')}"
            connection.execute(query.encode(), prepare=True)
            cursor = connection.execute(f"FETCH {max(rows_max, ROWS_SHOWN_MAX) + 1} FROM asked".encode())
            rows, booleans = _texts(cursor), _boolean_columns(cursor)
    except psycopg.OperationalError as error:
        if error.diag.sqlstate is None:
            raise
        return AssertionResult(assertion, holds=False, why=shorten_message(error), seconds=time.monotonic() - began)
    except psycopg.Error as error:
        return AssertionResult(assertion, holds=False, why=shorten_message(error), seconds=time.monotonic() - began)
    holds = is_as_expected(assertion.expected, rows, booleans)
    why = "" if holds else f"expected {expected_text(assertion.expected)}, found {rows_text(rows)}"
    return AssertionResult(assertion, holds, why, rows[:ROWS_SHOWN_MAX], time.monotonic() - began)


def _texts(cursor: psycopg.Cursor[tuple[object, ...]]) -> list[list[str | None]]:
    """The rows as PostgreSQL prints them."""
    found = cursor.pgresult
    if found is None:
        return []
    cells = [[found.get_value(row, column) for column in range(found.nfields)] for row in range(found.ntuples)]
    return [[None if cell is None else cell.decode(errors="replace") for cell in row] for row in cells]


def _boolean_columns(cursor: psycopg.Cursor[tuple[object, ...]]) -> list[bool]:
    return [column.type_code == BOOLEAN_OID for column in cursor.description or ()]


def is_as_expected(expected: Expected, rows: Rows, booleans: Sequence[bool]) -> bool:
    """Whether the rows are those expected; `booleans` tells which columns are boolean."""
    if expected is UNSET:
        return not rows
    wanted = expected if isinstance(expected, tuple) else (expected,)
    lists = [one if isinstance(one, tuple) else (one,) for one in wanted]
    return len(lists) == len(rows) and all(
        len(values) == len(row) and all(map(_equals, values, row, booleans))
        for values, row in zip(lists, rows, strict=True)
    )


def _equals(expected: Value, found: str | None, is_boolean: bool) -> bool:  # noqa: FBT001  # called by map
    if found is None:
        return False
    if isinstance(expected, bool):
        return is_boolean and found == ("t" if expected else "f")
    if isinstance(expected, str):
        return expected == found
    try:
        return not is_boolean and Decimal(found) == Decimal(str(expected))
    except InvalidOperation:
        return False


def expected_text(expected: Expected) -> str:
    """What is expected, for people."""
    if expected is UNSET:
        return "no rows"
    lists = expected if isinstance(expected, tuple) else (expected,)
    rows = [one if isinstance(one, tuple) else (one,) for one in lists]
    # Quoted, a text "NULL" is no NULL.
    return rows_text([[f'"{value}"' if isinstance(value, str) else value for value in row] for row in rows])


def rows_text(rows: Sequence[Sequence[Value | None]]) -> str:
    """Rows for people; one value alone without brackets."""
    if not rows:
        return "no rows"
    if len(rows) == 1 and len(rows[0]) == 1:
        return _value_text(rows[0][0])
    shown = ["(" + ", ".join(map(_value_text, row)) + ")" for row in rows[:ROWS_SHOWN_MAX]]
    return ", ".join(shown) + (", …" if len(rows) > ROWS_SHOWN_MAX else "")


def _value_text(value: Value | None) -> str:
    if value is None:
        return "NULL"
    return str(value).lower() if isinstance(value, bool) else str(value)
