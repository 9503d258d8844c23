"""Find prepared transactions that were rolled back and that PostgreSQL can no longer decode, to skip them.

A transaction sees its own catalog changes, so decoding it needs them too. After its rollback, pruning and VACUUM remove
the catalog rows that it wrote. PostgreSQL handles this: it stops decoding a prepared transaction at the first catalog
access after the rollback. But for changes within a savepoint or an EXCEPTION block it checks the wrong transaction
(PostgreSQL 18, reorderbuffer.c: RBTXN_IS_PREPARED is a flag of the top-level transaction, and ReorderBufferProcessTXN
tests it on the subtransaction). If a table was truncated, rewritten or created there, reading the slot fails with
"could not open relation" or "could not map filenumber"; this may happen on one node but not on its standby, and usually
happens every time. If columns or replica identity of a table were changed there, its rows are decoded with the wrong
table description: the result does not match the description, or is wrong.

Such a transaction belongs to no state. It is skipped as if PostgreSQL had noticed the rollback before its first change;
then PostgreSQL sends its PREPARE and no changes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from cutline.fleet.config import Node
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.nodes.connections import connect, connect_replication
from cutline.fleet.nodes.encodings import RAW
from cutline.wal.drain.message_stream import stream_messages

XIDS = 1 << 32
# How many bytes of a message are used here, by kind.
USED_BYTES = {b"b": 29, b"C": 18, b"P": 18, b"K": 18, b"r": 18, b"M": 10}
STATUS_QUERY = "SELECT pg_xact_status(%s::xid8)"
NEXT_XID_QUERY = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A transaction that was prepared and rolled back, as pgoutput messages BEGIN PREPARE and PREPARE.

    `before` is the end of the last record that the slot yields before it, ORIGIN if there is none.
    """

    messages: tuple[bytes, bytes]
    before: Lsn


def find_undecodable(
    node: Node, slot: str, publications: tuple[str, ...], finish: Lsn, lsn: Lsn = ORIGIN
) -> RolledBack | None:
    """Find the transaction at which reading the slot up to `finish` fails; return None unless it was rolled back.

    With `lsn`, check the transaction prepared there instead, because its messages are invalid. Reads the slot message
    by message, as a standby does, because a query that fails returns nothing of what it read. Does not advance the
    slot. Raises NodeUnreachableError.
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
    """Whether `node` knows that the transaction with this xid was rolled back. pgoutput sends 32-bit xids."""
    with connect(node) as connection:
        (text,) = connection.execute(NEXT_XID_QUERY).fetchone() or ("0",)
        # Restore the upper half of the xid: the transaction has ended, so its full xid is before the next one.
        full_xid = int(text) - (int(text) - xid) % XIDS
        return full_xid > 0 and connection.execute(STATUS_QUERY, [str(full_xid)]).fetchone() == ("aborted",)
