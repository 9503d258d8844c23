"""Read a slot's messages one by one, as a standby does: a query that fails returns nothing of what it read."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus

from cutline.fleet.lsn import ORIGIN, Lsn

# A walsender sends a keepalive at least this often: every half wal_sender_timeout, which is a minute by default. Unless
# it is answered, the server ends the session after that time.
SILENCE_SECONDS_MAX = 60.0
STREAM_SECONDS_MAX = 900.0
# The answer, with no position: nothing was received that the slot could be advanced to.
STATUS = b"r" + bytes(33)


def stream_messages(
    pgconn: Any,
    slot: str,
    publications: tuple[str, ...],
    finish: Lsn,
    *,
    binary: bool = False,
    refused: Callable[[str, str], object] | None = None,
) -> Iterator[bytes]:
    """Yield the slot's messages (pgoutput, protocol 3) up to `finish`, or until reading ends for any reason.

    Does not advance the slot. Values are text, or `binary` where their types have that form. If the server ends it by
    an error, `refused` is given its SQLSTATE and text.
    """
    names = ",".join(f'"{name}"' for name in publications)
    options = f"proto_version '3', publication_names '{names}', messages 'true', binary '{str(binary).lower()}'"
    command = f'START_REPLICATION SLOT "{slot}" LOGICAL {ORIGIN} ({options})'
    if pgconn.exec_(command.encode()).status != ExecStatus.COPY_BOTH:
        return
    deadline = time.monotonic() + STREAM_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            count, data = pgconn.get_copy_data(1)
        except psycopg.Error:
            return
        if count < 0:
            if refused:
                ended = pgconn.get_result()
                state, text = (
                    (ended.error_field(field) or b"").decode(errors="replace")
                    for field in (DiagnosticField.SQLSTATE, DiagnosticField.MESSAGE_PRIMARY)
                )
                refused(state, text)
            return
        if count == 0:
            if not await_input(pgconn, SILENCE_SECONDS_MAX):
                return
            try:
                pgconn.consume_input()
            except psycopg.Error:
                return
            continue
        message = bytes(data)
        # 'w': start, end and time, then the plugin's message. 'k' (keepalive): the server's position and time, and
        # whether it asks for an answer.
        if int.from_bytes(message[1:9], "big") >= finish:
            return
        if message[:1] == b"w":
            yield message[25:]
        elif message[:1] == b"k" and message[17]:
            pgconn.put_copy_data(STATUS)
            pgconn.flush()


def await_input(pgconn: Any, seconds_max: float) -> bool:
    """Wait until the server has sent something; whether it did, in this time."""
    # select() refuses descriptors above 1,023.
    with selectors.DefaultSelector() as selector:
        selector.register(pgconn.socket, selectors.EVENT_READ)
        return bool(selector.select(seconds_max))
