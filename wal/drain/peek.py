"""Peek: read a chunk of a slot's decoded messages as Arrow arrays, without advancing the slot.

ADBC creates no Python object for each message. But for every session it first reads all types and columns of the
database, which takes seconds with thousands of tables. So psycopg reads small amounts of WAL (`reads_with_psycopg`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import secrets
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import numpy as np
import psycopg
import pyarrow as pa
from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import DiagnosticField

from cutline.columns.bytes_column import BytesColumn, from_list, offsets_of
from cutline.fleet.config import Node
from cutline.fleet.libpq_environment import missing_files
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import FREE_SLOTS, NEXT_COPIES
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import check_server, connect, conninfo, lacking_error, no_connection_hint
from cutline.nodes.encodings import RAW
from cutline.nodes.pinned_settings import SessionState, read_state, set_query, state_query, wanted_settings
from cutline.nodes.poolers import refuses_options
from cutline.nodes.server_errors import stopped_hint
from cutline.storage.errors import BusyError, SnapshotError, UnreachableError

_lock = threading.Lock()
# The number of sessions being opened, and the value of `stderr` before the first of them.
_opening = 0
_before: int | None = None
_stream: int | None = None


@contextmanager
def quiet_connecting() -> Iterator[None]:
    """While the block runs in one or more threads, keep C code from writing to stderr.

    While libpq opens a session, the server may warn, for example about a database whose collation version differs. The
    server ignores the session's client_min_messages at that point, because it reads the setting later (PostgreSQL's
    postinit.c). libpq writes such a warning to C's `stderr`, because the driver sets a function for warnings only after
    the session is open. Between lines of progress or JSON the warning has no context; Cutline reports it itself
    (nodes/collation_versions.py).

    The file descriptor does not change: Python and child processes write as before.
    """
    global _opening, _before  # C has one such variable per process
    variable = _stderr_variable()
    if variable is None:
        yield
        return
    with _lock:
        if not _opening:
            _before, variable.value = variable.value, _null_stream() or variable.value
        _opening += 1
    try:
        yield
    finally:
        with _lock:
            _opening -= 1
            if not _opening:
                variable.value = _before


@cache
def _stderr_variable() -> ctypes.c_void_p | None:
    """Return glibc's `stderr`; None with other C libraries, where it has a different name or can't be changed."""
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stderr")


def _null_stream() -> int | None:
    """Return a C stream to the null device; None if no more files, and therefore no sessions, can be opened."""
    global _stream  # one per process
    if _stream is None:
        fopen = ctypes.CDLL(None).fopen
        fopen.restype, fopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p)
        _stream = fopen(os.fsencode(os.devnull), b"we")
    return _stream


OBJECT_IN_USE, LIMIT_EXCEEDED, UNDEFINED_OBJECT = "55006", "53400", "42704"
SEE_LOG, NO_SLOT = "see the server's log", FREE_SLOTS
# A server holds the messages of a transaction until they have all been read: those above work_mem in a temporary file.
# A limit on such files would end each read of a transaction that is larger, so that its chain could never continue.
LIMIT = "temp_file_limit"
UNLIMITED = f"""
CASE WHEN pg_catalog.has_parameter_privilege('{LIMIT}', 'SET') THEN pg_catalog.set_config('{LIMIT}', '-1', false) END
"""
RAISE_LIMIT = (
    f"raise {LIMIT} on this server, or let Cutline's role do without it, as a superuser (on the primary, if this is a"
    f" standby): GRANT SET ON PARAMETER {LIMIT}"
    " TO {role};"
)
CONTINUE, REPEAT = "repeat the command: it continues where the archive ends", "repeat the check"
# Several batches fit into AHEAD_BYTES (message_stream.py).
BATCH_BYTES = 4 << 20
# psycopg takes about 1 µs more for each message than ADBC, and a message takes about 100 bytes of WAL. For each table,
# ADBC takes 0.2 ms to begin.
PSYCOPG_WAL_BYTES, PSYCOPG_WAL_BYTES_PER_TABLE = 16 << 20, 16 << 10
COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
COPY_HEADER_BYTES, COPY_ROW_BYTES, COPY_END = len(COPY_SIGNATURE) + 8, 6, b"\xff\xff"


# The path in the error of a server that lacks a WAL file (xlogutils.c: "requested WAL segment … has already been
# removed"). Not of one that can't read it, which has another SQLSTATE.
MISSING_FILE, WAL_FILE = "58P01", re.compile(r"pg_wal/([0-9A-F]{24})\b")
# A check reads a copy of the slot with ADBC only.
REMOVED = "has already been removed"


class SlotInUseError(BusyError):
    """Another process is reading the slot."""


class WalRemovedError(UnreachableError):
    """The node lacks a WAL file that the slot needs; `details` names the `segment`.

    The slot itself is valid: the server has not removed the file, but pg_resetwal, a lost disk or somebody else.
    """


class PublicationMissingError(UnreachableError):
    """The server can't decode the slot's WAL: a publication did not exist when a part of the WAL was written.

    From version 18 on, servers decode such WAL as if the publication had no tables.
    """


def peek(
    node: Node, slot: str, publications: tuple[str, ...], finish: Lsn, messages_max: int, *, with_psycopg: bool = False
) -> Generator[pa.Array[Any], None, None]:
    """Yield the slot's messages (pgoutput, protocol 3) up to position `finish`, in binary arrays of bounded size.

    Values and names are in the server's encoding. Stops early once `messages_max` is reached, but only at the end of a
    transaction. Set `with_psycopg` for a small amount of WAL (`reads_with_psycopg`). Raises SlotInUseError,
    WalRemovedError, PublicationMissingError, and UnreachableError if the server ends the read.
    """
    query = peek_query(slot, publications, finish, messages_max)
    if with_psycopg:
        yield from _peek_with_psycopg(node, slot, query, publications)
        return
    try:
        with open_reader(node) as connection, adbc.AdbcStatement(connection) as statement:
            statement.set_options(
                **{adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}
            )
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            # Don't keep a reference to a batch, which may be 100 MB.
            yield from map(_messages_of, pa.RecordBatchReader._import_from_c(stream.address))
    except (adbc.Error, pa.ArrowException, OSError) as error:
        # During the transfer, the stream raises the server's errors as Arrow errors, without the SQLSTATE.
        if not WAL_FILE.search(str(error)):
            raise _peek_error(node, slot, str(error), getattr(error, "sqlstate", None), publications) from error
    else:
        return
    # The error's text may be in any language, but psycopg gives the SQLSTATE. No message was sent before the error: the
    # server decodes all of them first.
    yield from _peek_with_psycopg(node, slot, query, publications)


def reads_with_psycopg(wal_bytes: int, tables: int) -> bool:
    """Whether psycopg reads so much WAL of a database with so many tables faster than ADBC.

    A transaction that began before this WAL and ends in it adds messages.
    """
    return wal_bytes <= PSYCOPG_WAL_BYTES + tables * PSYCOPG_WAL_BYTES_PER_TABLE


def _peek_with_psycopg(
    node: Node, slot: str, query: str, publications: tuple[str, ...]
) -> Generator[pa.Array[Any], None, None]:
    with connect(node, client_encoding=RAW) as connection, connection.cursor() as cursor:
        try:
            connection.execute(f"SELECT {UNLIMITED}".encode())
            with cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode()) as copy:
                try:
                    # Don't keep a reference to a batch, which may be 100 MB.
                    while (batch := [_next_batch(copy)])[0] is not None:
                        yield batch.pop()
                except GeneratorExit:
                    # Otherwise psycopg would read the rest of the result.
                    connection.close()
                    raise
        except psycopg.Error as error:
            raise _peek_error(node, slot, _message_of(error), error.sqlstate, publications) from error


def _next_batch(copy: psycopg.Copy) -> pa.Array[Any] | None:
    """Read the next values of COPY's only column; return None at the end.

    The server sends each row in a block of its own (PostgreSQL manual, COPY, "Binary Format"), with the header before
    the first row or before the end.
    """
    values, held_bytes = list[memoryview](), 0
    while held_bytes < BATCH_BYTES and (block := memoryview(copy.read())):
        begin = COPY_HEADER_BYTES if block[: len(COPY_SIGNATURE)] == COPY_SIGNATURE else 0
        if block[begin:] == COPY_END:
            continue
        length = int.from_bytes(block[begin + 2 : begin + COPY_ROW_BYTES], "big")
        if len(block) != begin + COPY_ROW_BYTES + length:
            raise psycopg.DataError(f"it sent {len(block)} bytes that are not a row with one value")
        values.append(block[begin + COPY_ROW_BYTES :])
        held_bytes += length
    if len(values) == 1:
        # It may be large, so it is not copied.
        return BytesColumn(np.frombuffer(values[0], np.uint8), offsets_of(np.array([held_bytes]))).to_arrow()
    return from_list(values).to_arrow() if values else None


def _message_of(error: psycopg.Error) -> str:
    """Return the server's message, or psycopg's; with the encoding RAW, psycopg decodes only ASCII."""
    message = error.pgresult.error_field(DiagnosticField.MESSAGE_PRIMARY) if error.pgresult else None
    return message.decode(errors="backslashreplace") if message else str(error)


@contextmanager
def open_reader(node: Node) -> Iterator[adbc.AdbcConnection]:
    """Open a session on `node` that reads a slot as Arrow arrays, in the server's encoding.

    Raises OtherServerError, SessionUnfitError if the server refuses the session's settings, and errors from ADBC.
    """
    asked = conninfo(node.dsn, client_encoding=RAW)
    wanted = wanted_settings(asked)
    # Don't use the driver's dbapi module: it imports pandas.
    with ExitStack() as stack:
        connection = stack.enter_context(_open(asked))
        state = _ask_state(node, connection, wanted)
        check_server(node, state)
        if state.lacking:
            _ask(connection, set_query(state.lacking))
            if still := _ask_state(node, connection, wanted).lacking:
                raise lacking_error(node, still)
        _ask(connection, f"SELECT {UNLIMITED}")
        yield connection


@contextmanager
def _open(asked: str) -> Iterator[adbc.AdbcConnection]:
    with ExitStack() as stack:
        with quiet_connecting():
            try:
                database = stack.enter_context(adbc_driver_postgresql.connect(asked))
                connection = stack.enter_context(adbc.AdbcConnection(database))
            except adbc.Error as error:
                if not refuses_options(error):
                    raise
                database = stack.enter_context(adbc_driver_postgresql.connect(make_conninfo(asked, options="")))
                connection = stack.enter_context(adbc.AdbcConnection(database))
        yield connection


def _ask_state(node: Node, connection: adbc.AdbcConnection, wanted: Mapping[str, str]) -> SessionState:
    row = _ask(connection, state_query(wanted, asks_server=node.server is not None))
    return read_state(row, wanted)


def _ask(connection: adbc.AdbcConnection, query: str) -> list[Any]:
    """Return the only row of the query."""
    with adbc.AdbcStatement(connection) as statement:
        statement.set_sql_query(query)
        stream, _ = statement.execute_query()
        table = pa.RecordBatchReader._import_from_c(stream.address).read_all()
    return [column[0].as_py() for column in table.columns]


def peek_query(slot: str, publications: tuple[str, ...], finish: Lsn, messages_max: int) -> str:
    """Return the query for `peek`."""
    return (
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', '{finish}', {messages_max},"
        f" {_plugin_options(publications)})"
    )


def _plugin_options(publications: tuple[str, ...]) -> str:
    names = ",".join(f'"{name}"' for name in publications)
    return f"'proto_version', '3', 'publication_names', '{names}', 'messages', 'true'"


class SlotCopy(Struct, frozen=True):
    """A temporary copy of a slot, which its session drops when it ends. The slot itself is not used or moved.

    The copy begins at `confirmed`, and decodes prepared transactions at their COMMIT PREPARED.
    """

    node: Node
    name: str
    confirmed: Lsn
    connection: adbc.AdbcConnection

    def read(
        self, publications: tuple[str, ...], finish: Lsn, messages_max: int
    ) -> Generator[pa.Array[Any], None, int]:
        """Yield the messages of some transactions that end before `finish`, as `peek` does, and move the copy on.

        Returns how many messages there were: fewer than `messages_max` if no more are left.
        """
        query = (
            f"SELECT data FROM pg_logical_slot_get_binary_changes('{self.name}', '{finish}', {messages_max},"
            f" {_plugin_options(publications)})"
        )
        count = 0
        try:
            with adbc.AdbcStatement(self.connection) as statement:
                statement.set_options(
                    **{adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}
                )
                statement.set_sql_query(query)
                stream, _ = statement.execute_query()
                for batch in pa.RecordBatchReader._import_from_c(stream.address):
                    count += batch.num_rows
                    yield _messages_of(batch)
        except (adbc.Error, pa.ArrowException, OSError) as error:
            sqlstate = getattr(error, "sqlstate", None)
            raise _peek_error(self.node, self.name, str(error), sqlstate, publications, REPEAT) from error
        return count


@contextmanager
def copied_slot(node: Node, slot: str) -> Iterator[SlotCopy]:
    """Copy the slot for the block; while the copy exists, it retains WAL like the slot.

    Raises UnreachableError if the slot can't be copied, and the errors of `open_reader`.
    """
    name = f"check_live_{secrets.token_hex(6)}"
    with open_reader(node) as connection:
        try:
            _ask(connection, f"SELECT pg_copy_logical_replication_slot('{slot}', '{name}', true)::text")
            (confirmed,) = _ask(
                connection,
                f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{name}'",
            )
        except (adbc.Error, pa.ArrowException, OSError) as error:
            sqlstate = getattr(error, "sqlstate", None)
            raise _peek_error(node, slot, str(error), sqlstate, then=REPEAT) from error
        yield SlotCopy(node, name, Lsn.parse(str(confirmed)), connection)


def _messages_of(batch: Any) -> pa.Array[Any]:
    return batch.column(0)


def slot_in_use(node: Node, slot: str) -> SlotInUseError:
    """Return the error for a slot that another process is reading."""
    return SlotInUseError(
        f"node {node.id}: another process is reading slot {slot}",
        hint="wait until it has finished; pg_replication_slots.active_pid is the process id of its session",
        details={"node": node.id, "slot": slot},
    )


def _peek_error(
    node: Node,
    slot: str,
    message: str,
    sqlstate: str | None,
    publications: tuple[str, ...] = (),
    then: str = CONTINUE,
) -> SnapshotError:
    # Prefer the SQLSTATE: the server's messages may be in another language.
    if sqlstate == OBJECT_IN_USE or "is active for PID" in message:
        return slot_in_use(node, slot)
    if segment := _missing_segment(message, sqlstate):
        return WalRemovedError(
            f"node {node.id}: WAL that slot {slot} needs is gone: the server lacks pg_wal/{segment}",
            hint=NEXT_COPIES,
            details={"node": node.id, "slot": slot, "segment": segment},
        )
    if sqlstate in (UNDEFINED_OBJECT, None) and (missing := [name for name in publications if name in message]):
        # The name of one begins with that of the other.
        name = max(missing, key=len)
        return PublicationMissingError(
            f"node {node.id}: WAL in slot {slot} was written while publication {name} did not exist",
            hint=NEXT_COPIES,
            details={"node": node.id, "slot": slot, "publication": name},
        )
    remedy = NO_SLOT if sqlstate == LIMIT_EXCEEDED else stopped_hint(sqlstate or "") or no_connection_hint(message)
    if LIMIT in message:
        user = conninfo_to_dict(node.dsn).get("user")
        remedy = RAISE_LIMIT.format(role=quote_identifier(str(user)) if user else "its role")
    lines = [line for line in message.splitlines() if line.strip()]
    return UnreachableError(
        f"node {node.id}: the server aborted the read of slot {slot}: {lines[0] if lines else 'no reason given'}"
        f"{missing_files(node.dsn)}",
        hint=f"{remedy or SEE_LOG}; then {then}",
        details={"node": node.id, "slot": slot},
    )


def _missing_segment(message: str, sqlstate: str | None) -> str:
    """Return the name of the WAL file that the server lacks according to the error; "" if that is not the error."""
    found = WAL_FILE.search(message)
    return found[1] if found and (sqlstate == MISSING_FILE or REMOVED in message) else ""
