"""Run an assertion: a read-only query on a restored database, together with the result that it should return.

Values are compared in PostgreSQL's output format: numbers as numbers, booleans as booleans, everything else as text.
NULL equals nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Any

import psycopg
from msgspec import UNSET, Struct

from cutline.fleet.config import AssertionTable, Expected, Node, Value
from cutline.fleet.timers import calling_after
from cutline.nodes.connections import connect, unreachable_error
from cutline.nodes.open_sessions import shut_down
from cutline.nodes.server_errors import shorten_message
from cutline.snapshots.ddl.database_facts import DEFAULT, read_search_path
from cutline.storage.errors import SnapshotError

BOOLEAN_OID = 16
# A function may catch the cancellation of its statement and continue, so its session is terminated this much later.
END_AFTER_SECONDS = 2.0
ROWS_SHOWN_MAX = 5
ANSWER_CHARACTERS_MAX = 1_000_000

Rows = Sequence[Sequence[str | None]]


class AssertionResult(Struct, frozen=True):
    """The result of an assertion.

    `holds` is None if the assertion was not run; `why` is the reason if it does not hold. `found` are the first rows of
    the answer in PostgreSQL's output format. `has_ended_server`: the server had to be stopped to end the session.
    """

    assertion: AssertionTable
    holds: bool | None
    why: str = ""
    found: Rows = ()
    seconds: float = 0.0
    has_ended_server: bool = False


class Reader(Struct, frozen=True):
    """Access to a restored database as the role that runs assertions.

    `end` reliably ends the session with a given process id, and returns whether the server had to be stopped.
    """

    node: Node
    end: Callable[[int], bool]


class _Limit(Struct):
    """Records whether an assertion took too long and whether even the server had to be stopped to end its session."""

    is_over: bool = False
    has_ended_server: bool = False


def ask(assertion: AssertionTable, reader: Reader) -> AssertionResult:
    """Run the assertion's query; if it fails or times out, the assertion does not hold.

    Raises NodeUnreachableError.
    """
    began = time.monotonic()
    rows_max = len(assertion.expected) if isinstance(assertion.expected, tuple) else 1
    limit = _Limit()
    try:
        with (
            connect(reader.node) as connection,
            _ending(connection, reader, assertion.timeout, limit),
            connection.transaction(),
        ):
            connection.execute("SET TRANSACTION READ ONLY")
            # Use the application's search_path, which is empty in Cutline's sessions.
            path = read_search_path(connection)
            set_path = "SELECT pg_catalog.set_config('search_path', %s, true)"
            connection.execute(set_path, (DEFAULT if path is None else path,))
            connection.execute(f"SET LOCAL statement_timeout = {math.ceil(assertion.timeout * 1000)}".encode())
            # A cursor reads only the rows that are fetched. A prepared statement can't consist of two commands.
            query = f"DECLARE asked NO SCROLL CURSOR FOR {assertion.sql.strip().removesuffix(';')}"
            connection.execute(query.encode(), prepare=True)
            rows, booleans = _fetch(connection, max(rows_max, ROWS_SHOWN_MAX) + 1)
    except _TooLargeError as error:
        return AssertionResult(assertion, holds=False, why=str(error), seconds=time.monotonic() - began)
    except psycopg.Error as error:
        why = shorten_message(error)
        if limit.is_over:
            why = f"no answer after {assertion.timeout:g} s, so its session was terminated"
        elif isinstance(error, psycopg.OperationalError) and error.diag.sqlstate is None:
            raise unreachable_error(reader.node, error) from error
        seconds, has_ended_server = time.monotonic() - began, limit.has_ended_server
        return AssertionResult(assertion, holds=False, why=why, seconds=seconds, has_ended_server=has_ended_server)
    holds = is_as_expected(assertion.expected, rows, booleans)
    why = "" if holds else f"expected {expected_text(assertion.expected)}, found {rows_text(rows)}"
    return AssertionResult(assertion, holds, why, rows[:ROWS_SHOWN_MAX], time.monotonic() - began)


@contextmanager
def _ending(connection: psycopg.Connection[Any], reader: Reader, seconds_max: float, limit: _Limit) -> Iterator[None]:
    """Terminate the session from a thread if the block exceeds the limit, regardless of which statement is running."""
    process = connection.info.backend_pid

    def end() -> None:
        limit.is_over = True
        try:
            limit.has_ended_server = reader.end(process)
        except (SnapshotError, psycopg.Error):
            limit.has_ended_server = False
        finally:
            # Cause an error in the thread that waits for the answer, even if the server doesn't end the session.
            shut_down(connection)

    # The end of this session must not meet the next query.
    with calling_after(seconds_max + END_AFTER_SECONDS, end, waits=True):
        yield


class _TooLargeError(Exception):
    """An answer is too large to compare and show."""


def _fetch(connection: psycopg.Connection[Any], rows_max: int) -> tuple[list[list[str | None]], list[bool]]:
    """Fetch the cursor's first rows in PostgreSQL's output format, and determine which columns are boolean."""
    rows: list[list[str | None]] = []
    size = 0
    while True:
        # Fetch rows one at a time, because a view may return any number of large values.
        cursor = connection.execute("FETCH 1 FROM asked")
        found, booleans = _texts(cursor), _boolean_columns(cursor)
        size += sum(len(cell or "") for row in found for cell in row)
        if size > ANSWER_CHARACTERS_MAX:
            raise _TooLargeError(f"its answer is longer than {ANSWER_CHARACTERS_MAX:,} characters")
        rows += found
        if not found or len(rows) == rows_max:
            return rows, booleans


def _texts(cursor: psycopg.Cursor[tuple[object, ...]]) -> list[list[str | None]]:
    gresult = cursor.pgresult
    if gresult is None:
        return []
    cells = [[gresult.get_value(row, column) for column in range(gresult.nfields)] for row in range(gresult.ntuples)]
    return [[None if cell is None else cell.decode(errors="replace") for cell in row] for row in cells]


def _boolean_columns(cursor: psycopg.Cursor[tuple[object, ...]]) -> list[bool]:
    return [column.type_code == BOOLEAN_OID for column in cursor.description or ()]


def is_as_expected(expected: Expected, rows: Rows, booleans: Sequence[bool]) -> bool:
    """Whether the rows are as expected; `booleans` marks the boolean columns."""
    if expected is UNSET:
        return not rows
    wanted = expected if isinstance(expected, tuple) else (expected,)
    lists = [one if isinstance(one, tuple) else (one,) for one in wanted]
    return len(lists) == len(rows) and all(
        len(values) == len(row) and all(map(_equals, values, row, booleans))
        for values, row in zip(lists, rows, strict=True)
    )


def _equals(expected: Value, answer: str | None, is_boolean: bool) -> bool:  # noqa: FBT001  # called by map
    if answer is None:
        return False
    if isinstance(expected, bool):
        return is_boolean and answer == ("t" if expected else "f")
    if isinstance(expected, str):
        return expected == answer
    try:
        return not is_boolean and Decimal(answer) == Decimal(str(expected))
    except InvalidOperation:
        return False


def expected_text(expected: Expected) -> str:
    """Format the expected result for display."""
    if expected is UNSET:
        return "no rows"
    lists = expected if isinstance(expected, tuple) else (expected,)
    rows = [one if isinstance(one, tuple) else (one,) for one in lists]
    # Quote strings to distinguish the text "NULL" from NULL.
    return rows_text([[f'"{value}"' if isinstance(value, str) else value for value in row] for row in rows])


def rows_text(rows: Sequence[Sequence[Value | None]]) -> str:
    """Format rows for display; a single value has no brackets."""
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
