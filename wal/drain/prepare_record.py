"""PREPARE records in WAL: how many catalog changes they count, and prepared transactions that can't be decoded.

A prepared transaction keeps the invalidation messages of its catalog changes in this record, so that COMMIT PREPARED
can send them (twophase.c, xl_xact_prepare). Row changes have no such messages. So the count distinguishes DDL from rows
exactly, for every kind of object, and excludes changes that were rolled back to a savepoint. Physical replication sends
the record's bytes, and a session for logical replication may also start it.

A transaction sees its own catalog changes, so they are also needed to decode it. After its rollback, pruning and VACUUM
remove the catalog rows that it wrote. PostgreSQL handles this: it stops decoding a prepared transaction at the first
catalog access after the rollback. But for changes within a savepoint or an EXCEPTION block it checks the wrong
transaction (PostgreSQL 18, reorderbuffer.c: RBTXN_IS_PREPARED is a flag of the top-level transaction, and
ReorderBufferProcessTXN tests it on the subtransaction). If a table was truncated, rewritten or created there, reading
the slot fails with "could not open relation" or "could not map filenumber". This may happen on one node but not on its
standby, and usually happens every time. If a table's columns or replica identity were changed there, its rows are
decoded with the wrong table description: either a row does not fit the description, or it fits and has wrong values.

Such a transaction is not part of any state. It is skipped as if PostgreSQL had noticed the rollback before its first
change: in that case PostgreSQL sends the PREPARE without changes.
"""

from __future__ import annotations

import struct
from contextlib import closing
from typing import Any

import psycopg
from msgspec import Struct
from psycopg.pq import ExecStatus

from cutline.fleet.config import Node
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.connections import connect, connect_replication
from cutline.nodes.encodings import RAW
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.message_stream import await_input, stream_messages

SILENCE_SECONDS_MAX = 10.0
# A message with WAL begins with 'w' and three numbers.
MESSAGE_HEADER_BYTES = 25
PAGE_HEADER_BYTES, LONG_PAGE_HEADER_BYTES = 24, 40
# XLogRecord.
RECORD = struct.Struct("<IIQBBxxI")
XACT_RESOURCE_MANAGER, XACT_PREPARE, XACT_OPERATION_MASK = 1, 0x10, 0x70
# Each part of a record's data has a header that begins with one of these values.
DATA_SHORT, DATA_LONG, DATA_ORIGIN, TOP_XID = 255, 254, 253, 252
HEADER_BYTES = {DATA_SHORT: 2, DATA_LONG: 5, DATA_ORIGIN: 3, TOP_XID: 5}
PREPARE_MAGIC = 0x57F94534
# The beginning of xl_xact_prepare: the magic number and, after 44 bytes, the number of invalidation messages.
PREPARE = struct.Struct("<I44xi")
RECORD_BYTES_MAX = RECORD.size + sum(HEADER_BYTES.values()) + PREPARE.size
SIZES_QUERY = """
SELECT current_setting('wal_block_size')::int, setting::int FROM pg_settings WHERE name = 'wal_segment_size'
"""


def changes_catalogs(node: Node, lsn: Lsn, xid: int) -> bool | None:
    """Whether the transaction whose PREPARE begins at `lsn` has changed catalogs.

    Returns None if the record can't be read: its WAL was removed, reading WAL is forbidden, or its format is unknown.
    """
    try:
        with closing(connect_replication(node)) as connection:
            block_bytes, segment_bytes = connection.execute(SIZES_QUERY).fetchone() or (0, 0)
            record = _read(connection.pgconn, lsn, block_bytes, segment_bytes)
    except (SnapshotError, psycopg.Error):
        return None
    return parse_prepare(record, xid)


def parse_prepare(record: bytes, xid: int) -> bool | None:
    """Whether the PREPARE record counts catalog changes; `record` is its first RECORD_BYTES_MAX bytes."""
    try:
        _, found_xid, _, info, manager, _ = RECORD.unpack_from(record)
        if (found_xid, manager, info & XACT_OPERATION_MASK) != (xid, XACT_RESOURCE_MANAGER, XACT_PREPARE):
            return None
        at = RECORD.size
        while (kind := record[at]) not in (DATA_SHORT, DATA_LONG):
            at += HEADER_BYTES[kind]
        magic, messages = PREPARE.unpack_from(record, at + HEADER_BYTES[kind])
    except (struct.error, KeyError, IndexError):
        return None
    return messages > 0 if magic == PREPARE_MAGIC else None


def _read(pgconn: Any, lsn: Lsn, block_bytes: int, segment_bytes: int) -> bytes:
    """Return the first bytes of the record at `lsn`, without the header of any page on which it continues.

    More WAL must have been written after the record, because the server sends only WAL that exists.
    """
    if pgconn.exec_(f"START_REPLICATION PHYSICAL {lsn}".encode()).status != ExecStatus.COPY_BOTH:
        return b""
    stream = b""
    while len(stream) < RECORD_BYTES_MAX + LONG_PAGE_HEADER_BYTES:
        count, message = pgconn.get_copy_data(1)
        if count < 0:
            break
        if count == 0:
            if not await_input(pgconn, SILENCE_SECONDS_MAX):
                break
            pgconn.consume_input()
        elif bytes(message[:1]) == b"w":
            stream += bytes(message[MESSAGE_HEADER_BYTES:])
    border = -int(lsn) % block_bytes
    is_first = (int(lsn) + border) % segment_bytes == 0
    header = LONG_PAGE_HEADER_BYTES if is_first else PAGE_HEADER_BYTES
    return (stream[:border] + stream[border + header :])[:RECORD_BYTES_MAX]


XIDS = 1 << 32
# How many bytes in a message are used here, keyed by kind.
USED_BYTES = {b"b": 29, b"C": 18, b"P": 18, b"K": 18, b"r": 18, b"M": 10}
STATUS_QUERY = "SELECT pg_xact_status(%s::xid8)"
NEXT_XID_QUERY = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"


class RolledBack(Struct, frozen=True):
    """A transaction that was prepared and rolled back, as pgoutput messages BEGIN PREPARE and PREPARE.

    `before` is the end of the last record that the slot yields before this transaction, or ORIGIN if there is none.
    """

    messages: tuple[bytes, bytes]
    before: Lsn


def find_undecodable(
    node: Node, slot: str, publications: tuple[str, ...], finish: Lsn, lsn: Lsn = ORIGIN
) -> RolledBack | None:
    """Find the transaction at which reading the slot up to `finish` fails; return None unless it was rolled back.

    With `lsn`, check the transaction prepared there instead, because its messages are invalid. Reads the slot message
    by message, as a standby does, because a query that fails does not return any of the messages that it read. Does not
    advance the slot. Raises NodeUnreachableError.
    """
    begin, before = b"", ORIGIN
    with closing(connect_replication(node, client_encoding=RAW)) as connection:
        for message in stream_messages(connection.pgconn, slot, publications, finish):
            kind = message[:1]
            if len(message) < USED_BYTES.get(kind, 0):
                return None
            if kind == b"b":
                begin = message
                if lsn and int.from_bytes(begin[1:9], "big") == lsn:
                    break
            elif kind in (b"C", b"P", b"K", b"r"):
                begin, before = b"", Lsn.from_bytes(message[10:18], "big")
            elif kind == b"M" and message[1] == 0:
                before = Lsn.from_bytes(message[2:10], "big")
    if lsn and int.from_bytes(begin[1:9], "big") != lsn:
        return None
    if not begin or int.from_bytes(begin[9:17], "big") > finish:
        return None
    if not is_rolled_back(node, int.from_bytes(begin[25:29], "big")):
        return None
    return RolledBack((begin, b"P\0" + begin[1:]), before)


def is_rolled_back(node: Node, xid: int) -> bool:
    """Whether the transaction with this xid was rolled back, according to `node`. pgoutput sends 32-bit xids."""
    with connect(node) as connection:
        (text,) = connection.execute(NEXT_XID_QUERY).fetchone() or ("0",)
        # Restore the upper half of the xid: the transaction has ended, so its full xid is before the next one.
        full_xid = int(text) - (int(text) - xid) % XIDS
        return full_xid > 0 and connection.execute(STATUS_QUERY, [str(full_xid)]).fetchone() == ("aborted",)
