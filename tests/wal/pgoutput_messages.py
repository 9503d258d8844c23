"""pgoutput messages built by hand, field by field, as the PostgreSQL manual specifies them.

Source: PostgreSQL manual, "Logical Replication Message Formats". Nothing here uses the product's decoder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

# None is NULL, an empty tuple an unchanged TOASTed value.
Value = bytes | None | tuple[()]
MICROSECONDS = 812_345_678_901_234


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def begin(final_lsn: int, xid: int) -> bytes:
    """Byte1('B'), Int64 final LSN of the transaction, Int64 commit timestamp, Int32 xid."""
    return struct.pack(">cqqi", b"B", final_lsn, MICROSECONDS, xid)


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    """Byte1('C'), Int8 flags, Int64 LSN of the commit, Int64 end LSN, Int64 timestamp."""
    return struct.pack(">cbqqq", b"C", 0, commit_lsn, end_lsn, MICROSECONDS)


def begin_prepare(prepare_lsn: int, end_lsn: int, xid: int, gid: str) -> bytes:
    """Byte1('b'), Int64 LSN of the prepare, Int64 end LSN, Int64 timestamp, Int32 xid, String gid."""
    return struct.pack(">cqqqi", b"b", prepare_lsn, end_lsn, MICROSECONDS, xid) + text(gid)


def prepare(prepare_lsn: int, end_lsn: int, xid: int, gid: str) -> bytes:
    """Byte1('P'), Int8 flags, Int64 LSN of the prepare, Int64 end LSN, Int64 timestamp, Int32 xid, gid."""
    return struct.pack(">cbqqqi", b"P", 0, prepare_lsn, end_lsn, MICROSECONDS, xid) + text(gid)


def commit_prepared(commit_lsn: int, end_lsn: int, xid: int, gid: str) -> bytes:
    """Byte1('K'), Int8 flags, Int64 LSN of the commit, Int64 end LSN, Int64 timestamp, Int32 xid, gid."""
    return struct.pack(">cbqqqi", b"K", 0, commit_lsn, end_lsn, MICROSECONDS, xid) + text(gid)


def rollback_prepared(prepare_end_lsn: int, end_lsn: int, xid: int, gid: str) -> bytes:
    """Byte1('r'), Int8 flags, Int64 end LSN of the prepare, Int64 end LSN of the rollback,
    Int64 prepare timestamp, Int64 rollback timestamp, Int32 xid, gid."""
    head = struct.pack(">cbqqqqi", b"r", 0, prepare_end_lsn, end_lsn, MICROSECONDS, MICROSECONDS, xid)
    return head + text(gid)


def message(lsn: int, prefix: str, content: bytes, *, transactional: bool = False) -> bytes:
    """Byte1('M'), Int8 flags, Int64 LSN, String prefix, Int32 length, Byten content."""
    head = struct.pack(">cbq", b"M", int(transactional), lsn) + text(prefix)
    return head + struct.pack(">i", len(content)) + content


def origin(lsn: int, name: str) -> bytes:
    """Byte1('O'), Int64 LSN of the commit on the origin, String name."""
    return struct.pack(">cq", b"O", lsn) + text(name)


def type_(oid: int, schema: str, name: str) -> bytes:
    """Byte1('Y'), Int32 oid, String namespace, String name."""
    return struct.pack(">ci", b"Y", oid) + text(schema) + text(name)


def relation(oid: int, schema: str, table: str, identity: str, columns: Sequence[tuple[bool, str, int, int]]) -> bytes:
    """Byte1('R'), Int32 oid, String namespace, String name, Int8 replica identity, Int16 columns; each
    Int8 flags (1: part of the key), String name, Int32 type oid, Int32 type modifier."""
    head = struct.pack(">ci", b"R", oid) + text(schema) + text(table)
    body = struct.pack(">ch", identity.encode(), len(columns))
    for is_key, name, type_oid, modifier in columns:
        body += struct.pack(">b", is_key) + text(name) + struct.pack(">ii", type_oid, modifier)
    return head + body


def tuple_data(values: Sequence[Value]) -> bytes:
    """Int16 columns; each Byte1 'n', 'u', or 't' with Int32 length and the text."""
    body = struct.pack(">h", len(values))
    for value in values:
        if value is None:
            body += b"n"
        elif isinstance(value, bytes):
            body += b"t" + struct.pack(">i", len(value)) + value
        else:
            body += b"u"
    return body


def insert(oid: int, new: Sequence[Value]) -> bytes:
    """Byte1('I'), Int32 oid, Byte1('N'), TupleData."""
    return struct.pack(">ci", b"I", oid) + b"N" + tuple_data(new)


def update(
    oid: int, new: Sequence[Value], *, key: Sequence[Value] | None = None, old: Sequence[Value] | None = None
) -> bytes:
    """Byte1('U'), Int32 oid, optionally Byte1('K') or Byte1('O') and TupleData, Byte1('N'), TupleData."""
    head = struct.pack(">ci", b"U", oid)
    if key is not None:
        head += b"K" + tuple_data(key)
    if old is not None:
        head += b"O" + tuple_data(old)
    return head + b"N" + tuple_data(new)


def delete(oid: int, *, key: Sequence[Value] | None = None, old: Sequence[Value] | None = None) -> bytes:
    """Byte1('D'), Int32 oid, Byte1('K') or Byte1('O'), TupleData."""
    letter, values = (b"K", key) if key is not None else (b"O", old)
    return struct.pack(">ci", b"D", oid) + letter + tuple_data(values or ())


def truncate(*oids: int) -> bytes:
    """Byte1('T'), Int32 relations, Int8 options, Int32 oid of each."""
    return struct.pack(">cib", b"T", len(oids), 0) + b"".join(struct.pack(">i", oid) for oid in oids)
