"""Reading a slot without moving it: a chunk of its decoded messages, as Arrow from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from fleet.config import Node
from fleet.connections import conninfo
from fleet.lsn import lsn_to_text
from storage.errors import BusyError, SnapshotError, UnreachableError


class SlotInUseError(BusyError):
    """Another process reads the slot."""


def peek(
    node: Node, slot: str, publications: tuple[str, ...], finish: int, messages_max: int
) -> Iterator[pa.Array[Any]]:
    """Yield the slot's messages (pgoutput, protocol 3) up to position `finish` in binary arrays of bounded size.

    Ends earlier at the end of the transaction in which `messages_max` is reached. Raises SlotInUseError, and
    UnreachableError where the server ends the reading.
    """
    names = ",".join(f'"{name}"' for name in publications)
    query = (
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', '{lsn_to_text(finish)}', {messages_max},"
        f" 'proto_version', '3', 'publication_names', '{names}', 'messages', 'true')"
    )
    try:
        # Not by the driver's dbapi module: that imports pandas.
        with (
            adbc_driver_postgresql.connect(conninfo(node.dsn)) as database,
            adbc.AdbcConnection(database) as connection,
            adbc.AdbcStatement(connection) as statement,
        ):
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            for batch in pa.RecordBatchReader._import_from_c(stream.address):
                yield batch.column(0)
    except (adbc.Error, pa.ArrowException, OSError) as error:
        # What the server says while rows are under way comes by the stream, as Arrow's own errors.
        raise _ended(node, slot, str(error)) from error


def slot_in_use(node: Node, slot: str) -> SlotInUseError:
    """The error for a slot that another process reads."""
    return SlotInUseError(
        f"node {node.id}: another process reads slot {slot}",
        hint="wait until it is done; pg_replication_slots.active_pid names its session",
        details={"node": node.id, "slot": slot},
    )


def _ended(node: Node, slot: str, message: str) -> SnapshotError:
    if "is active for PID" in message:
        return slot_in_use(node, slot)
    lines = [line for line in message.splitlines() if line.strip()]
    return UnreachableError(
        f"node {node.id}: reading slot {slot} ended: {lines[0] if lines else 'without a reason'}",
        hint="see the server's log; repeating the command goes on where the archive ends",
        details={"node": node.id, "slot": slot},
    )
