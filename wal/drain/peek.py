"""Peek: read a chunk of a slot's decoded messages without advancing the slot, as Arrow arrays throughout."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from fleet.config import Node
from fleet.libpq_environment import missing_files
from fleet.lsn import Lsn
from fleet.nodes.connections import conninfo
from fleet.nodes.encodings import RAW
from storage.errors import BusyError, SnapshotError, UnreachableError

OBJECT_IN_USE = "55006"
# So that several batches fit into AHEAD_BYTES (overlap.py).
BATCH_BYTES = 4 << 20
# Works on every version: before 17 there is no such setting, and a connection that sets it would be refused.
UNBOUNDED = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'"


class SlotInUseError(BusyError):
    """Another process is reading the slot."""


def peek(
    node: Node, slot: str, publications: tuple[str, ...], finish: Lsn, messages_max: int
) -> Generator[pa.Array[Any], None, None]:
    """Yield the slot's messages (pgoutput, protocol 3) up to position `finish`, in binary arrays of bounded size.

    Values and names are in the server's encoding. Ends earlier, at the end of the transaction in which `messages_max`
    is reached. Raises SlotInUseError, and UnreachableError if the server ends the read.
    """
    query = peek_query(slot, publications, finish, messages_max)
    try:
        # Don't use the driver's dbapi module: it imports pandas.
        with (
            adbc_driver_postgresql.connect(conninfo(node.dsn, client_encoding=RAW)) as database,
            adbc.AdbcConnection(database) as connection,
            adbc.AdbcStatement(connection) as unbounded,
            adbc.AdbcStatement(connection) as statement,
        ):
            unbounded.set_sql_query(UNBOUNDED)
            unbounded.execute_update()
            statement.set_options(
                **{adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)}
            )
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            # Hold no reference to a batch: one may have 100 MB.
            yield from map(_messages_of, pa.RecordBatchReader._import_from_c(stream.address))
    except (adbc.Error, pa.ArrowException, OSError) as error:
        # Errors of the server during the transfer come through the stream, as Arrow errors.
        raise _peek_error(node, slot, str(error), getattr(error, "sqlstate", None)) from error


def peek_query(slot: str, publications: tuple[str, ...], finish: Lsn, messages_max: int) -> str:
    """The query of `peek`."""
    names = ",".join(f'"{name}"' for name in publications)
    return (
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', '{finish}', {messages_max},"
        f" 'proto_version', '3', 'publication_names', '{names}', 'messages', 'true')"
    )


def _messages_of(batch: Any) -> pa.Array[Any]:
    return batch.column(0)


def slot_in_use(node: Node, slot: str) -> SlotInUseError:
    """The error for a slot that another process is reading."""
    return SlotInUseError(
        f"node {node.id}: another process is reading slot {slot}",
        hint="wait until it has ended; pg_replication_slots.active_pid is the process id of its session",
        details={"node": node.id, "slot": slot},
    )


def _peek_error(node: Node, slot: str, message: str, sqlstate: str | None) -> SnapshotError:
    # Prefer the SQLSTATE: the server's messages may be in another language.
    if sqlstate == OBJECT_IN_USE or "is active for PID" in message:
        return slot_in_use(node, slot)
    lines = [line for line in message.splitlines() if line.strip()]
    return UnreachableError(
        f"node {node.id}: the server ended the read of slot {slot}: {lines[0] if lines else 'no reason given'}"
        f"{missing_files(node.dsn)}",
        hint="see the server's log, then repeat the command: it continues where the archive ends",
        details={"node": node.id, "slot": slot},
    )
