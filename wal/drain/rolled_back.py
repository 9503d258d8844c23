"""Prepared transactions that were rolled back and that PostgreSQL can't decode any more: finding one, to pass it over.

A transaction sees the catalogs as it changed them itself, and decoding it must too. Once it is rolled back, pruning and
VACUUM take the catalog rows that it wrote. PostgreSQL knows that and ends the decoding of a prepared transaction at
its first look into the catalogs after the rollback, but for what was done within a savepoint or an EXCEPTION block:
there it asks about the wrong transaction (PostgreSQL 18, reorderbuffer.c: RBTXN_IS_PREPARED is a flag of the top-level
transaction, and ReorderBufferProcessTXN looks for it at the subtransaction). If a table was truncated, rewritten or
created there, reading the slot ends with "could not open relation" or "could not map filenumber", on one node and
not on its standby, and mostly for ever. If its columns or its identity were changed there, its rows are read by a
description that is not theirs: what comes is no change of the table as it is described, or a wrong one.

Such a transaction belongs to no state. It is passed over as if PostgreSQL had noticed before its first change, which
is what it sends in the other case: its PREPARE, no changes.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import ExecStatus

from fleet.config import Node
from fleet.lsn import ORIGIN, Lsn
from fleet.nodes.connections import connect, connect_replication
from fleet.nodes.encodings import RAW

# A walsender says at least so often how far it is: every half wal_sender_timeout, a minute by default.
SILENCE_SECONDS_MAX = 60.0
STREAM_SECONDS_MAX = 900.0
XIDS = 1 << 32
# As much of a message as is looked at here.
LOOKED_AT_BYTES = {b"b": 29, b"C": 18, b"P": 18, b"K": 18, b"r": 18, b"M": 10}
STATUS_QUERY = "SELECT pg_xact_status(%s::xid8)"
NEXT_XID_QUERY = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A transaction that was prepared and rolled back, as BEGIN PREPARE and PREPARE messages of pgoutput.

    `before` is where ends what the slot yields last before it, ORIGIN if that is nothing.
    """

    messages: tuple[bytes, bytes]
    before: Lsn


def undecodable_ahead(
    node: Node, slot: str, publications: tuple[str, ...], finish: Lsn, lsn: Lsn = ORIGIN
) -> RolledBack | None:
    """The transaction at which reading the slot up to `finish` ends, if it is one that was rolled back.

    With `lsn` the one that was prepared there, where what the slot gave of it is wrong. Reads the slot as a standby
    does, message by message, because a query gives nothing of what it read before it fails. Moves nothing. Raises
    NodeUnreachableError.
    """
    begun, before = b"", ORIGIN
    with closing(connect_replication(node, client_encoding=RAW)) as connection:
        for message in _stream(connection.pgconn, slot, publications, finish):
            kind = message[:1]
            if len(message) < LOOKED_AT_BYTES.get(kind, 0):
                return None
            if kind == b"b":
                begun = message
                if lsn and int.from_bytes(begun[1:9], "big") == lsn:
                    break
            elif kind in (b"C", b"P", b"K", b"r"):
                begun, before = b"", Lsn.from_bytes(message[10:18], "big")
            elif kind == b"M" and message[1] == 0:
                before = Lsn.from_bytes(message[2:10], "big")
    if lsn and int.from_bytes(begun[1:9], "big") != lsn:
        return None
    if not begun or int.from_bytes(begun[9:17], "big") > finish:
        return None
    if not is_rolled_back(node, int.from_bytes(begun[25:29], "big")):
        return None
    return RolledBack((begun, b"P\0" + begun[1:]), before)


def is_rolled_back(node: Node, xid: int) -> bool:
    """Whether the transaction of that number, as pgoutput has it, is known to be rolled back on `node`."""
    with connect(node) as connection:
        (text,) = connection.execute(NEXT_XID_QUERY).fetchone() or ("0",)
        # pgoutput has the lower half of a transaction's number; one that has ended is before the next.
        whole = int(text) - (int(text) - xid) % XIDS
        return whole > 0 and connection.execute(STATUS_QUERY, [str(whole)]).fetchone() == ("aborted",)


def _stream(pgconn: Any, slot: str, publications: tuple[str, ...], finish: Lsn) -> Iterator[bytes]:
    """The slot's messages (pgoutput, protocol 3) up to `finish`, or until the reading ends for whatever reason."""
    names = ",".join(f'"{name}"' for name in publications)
    options = f"proto_version '3', publication_names '{names}', messages 'true'"
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
            return
        if count == 0:
            if not select.select([pgconn.socket], [], [], SILENCE_SECONDS_MAX)[0]:
                return
            try:
                pgconn.consume_input()
            except psycopg.Error:
                return
            continue
        message = bytes(data)
        # 'w': start, end and time, then what the plugin wrote. 'k': how far the server is.
        if int.from_bytes(message[1:9], "big") >= finish:
            return
        if message[:1] == b"w":
            yield message[25:]
