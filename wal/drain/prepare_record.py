"""Read a transaction's PREPARE record from WAL, which counts what decoded WAL does not have: changes of catalogs.

A prepared transaction keeps the invalidation messages of its catalog changes in this record, for its COMMIT PREPARED to
send them (twophase.c, xl_xact_prepare). Rows have none. So the count tells DDL from rows exactly, of every kind of
object, and what was rolled back to a savepoint does not count. Physical replication sends the record's bytes; a session
for logical replication may ask for it, too.
"""

from __future__ import annotations

import struct
from contextlib import closing
from typing import Any

import psycopg
from psycopg.pq import ExecStatus

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.nodes.connections import connect_replication
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.message_stream import await_input

SILENCE_SECONDS_MAX = 10.0
# A message with WAL begins with 'w' and three numbers.
MESSAGE_HEADER_BYTES = 25
PAGE_HEADER_BYTES, LONG_PAGE_HEADER_BYTES = 24, 40
# XLogRecord.
RECORD = struct.Struct("<IIQBBxxI")
XACT_RESOURCE_MANAGER, XACT_PREPARE, XACT_OPERATION_MASK = 1, 0x10, 0x70
# Each part of a record's data has a header that begins with one of these.
DATA_SHORT, DATA_LONG, ORIGIN, TOP_XID = 255, 254, 253, 252
HEADER_BYTES = {DATA_SHORT: 2, DATA_LONG: 5, ORIGIN: 3, TOP_XID: 5}
PREPARE_MAGIC = 0x57F94534
# The beginning of xl_xact_prepare: magic, and after 44 bytes the number of invalidation messages.
PREPARE = struct.Struct("<I44xi")
RECORD_BYTES_MAX = RECORD.size + sum(HEADER_BYTES.values()) + PREPARE.size
SIZES_QUERY = """
SELECT current_setting('wal_block_size')::int, setting::int FROM pg_settings WHERE name = 'wal_segment_size'
"""


def changes_catalogs(node: Node, lsn: Lsn, xid: int) -> bool | None:
    """Whether the transaction whose PREPARE begins at `lsn` has changed catalogs.

    None if the record can't be read: its WAL is gone, or the server lets nobody read WAL, or has it in another form.
    """
    try:
        with closing(connect_replication(node)) as connection:
            block_bytes, segment_bytes = connection.execute(SIZES_QUERY).fetchone() or (0, 0)
            record = _read(connection.pgconn, lsn, block_bytes, segment_bytes)
    except (SnapshotError, psycopg.Error):
        return None
    return parse_prepare(record, xid)


def parse_prepare(record: bytes, xid: int) -> bool | None:
    """Whether the PREPARE record, of which the first RECORD_BYTES_MAX are given, counts changes of catalogs."""
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
    """The first bytes of the record at `lsn`, without the header of the page that it continues on.

    Some other record must have been written after it: the server sends only what there is.
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
