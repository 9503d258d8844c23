"""A reader of pgoutput's messages, message by message and value by value, as the manual describes them.

Slow on purpose: it shares no code with the decoder of whole columns, whose result must equal its own.
Source: PostgreSQL manual, "Logical Replication Message Formats" (protocol 3 without streaming); COPY, "Text Format".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from cutline.nodes.groups import Group
from tests.fuzz.reference_cursor import UNCHANGED, Cursor, RefusedError, copy_text, decode_or
from tests.fuzz.reference_result import OpenTransaction, ReadResult
from tests.fuzz.reference_tables import Tables


@dataclass(slots=True)
class Reader:
    """Reads the messages of a node."""

    tables: Tables
    found: ReadResult = field(default_factory=ReadResult)
    transaction: OpenTransaction | None = None
    last_end: int = 0

    def read(self, messages: Sequence[bytes]) -> ReadResult:
        for message in messages:
            if not message:
                raise RefusedError("an empty message")
            cursor = Cursor(message, 1)
            reader = READERS.get(chr(message[0]))
            if reader is None:
                raise RefusedError("unknown message")
            reader(self, cursor)
            cursor.end()
        return self.found

    # The messages that begin and end transactions.

    def begin(self, cursor: Cursor) -> None:
        self.open(OpenTransaction(b"", cursor.position(), 0, None))
        cursor.number(8)
        self.current().xid = cursor.number(4)

    def begin_prepare(self, cursor: Cursor) -> None:
        lsn, end = cursor.position(), cursor.position()
        self.expect_order(lsn, end)
        cursor.number(8)
        xid, gid = cursor.number(4), cursor.name()
        self.open(OpenTransaction(cursor.message[1:], lsn, xid, gid))

    def open(self, transaction: OpenTransaction) -> None:
        if self.transaction:
            raise RefusedError("a transaction within another")
        self.transaction = transaction

    def commit(self, cursor: Cursor) -> None:
        transaction = self.current()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        ended_at = cursor.number(8, signed=True)
        self.expect_order(lsn, end)
        self.advance_end(end)
        if transaction.gid is not None or lsn != transaction.lsn:
            raise RefusedError("the end of another transaction")
        key = transaction.participants if transaction.tag is not None else b""
        ended_at = 0 if transaction.has_origin else ended_at
        self.event("C", (lsn, end, ended_at), transaction.xid, transaction.tag, key=key)
        self.transaction = None

    def prepare(self, cursor: Cursor) -> None:
        transaction = self.current()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        ended_at = cursor.number(8, signed=True)
        xid, gid = cursor.number(4), cursor.name()
        if transaction.gid is None or cursor.message[2:] != transaction.head:
            raise RefusedError("the end of another transaction")
        self.event("P", (lsn, end, ended_at), xid, gid, key=transaction.participants)
        self.transaction = None

    def commit_prepared(self, cursor: Cursor) -> None:
        self.expect_none_open()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        ended_at = cursor.number(8, signed=True)
        xid, gid = cursor.number(4), cursor.name()
        self.expect_order(lsn, end)
        self.advance_end(end)
        self.event("K", (lsn, end, ended_at), xid, gid)

    def rollback_prepared(self, cursor: Cursor) -> None:
        self.expect_none_open()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        cursor.number(8)
        ended_at = cursor.number(8, signed=True)
        xid, gid = cursor.number(4), cursor.name()
        self.expect_order(lsn, end)
        self.advance_end(end)
        self.event("R", (lsn, end, ended_at), xid, gid)

    def current(self) -> OpenTransaction:
        if self.transaction is None:
            raise RefusedError("outside a transaction")
        return self.transaction

    def expect_none_open(self) -> None:
        if self.transaction:
            raise RefusedError("inside a transaction")

    def expect_order(self, low: int, high: int) -> None:
        if low > high:
            raise RefusedError("ends before it begins")

    def advance_end(self, end: int) -> None:
        if end < self.last_end:
            raise RefusedError("ends before the previous end")
        self.last_end = end

    # All other messages but rows.

    def message(self, cursor: Cursor) -> None:
        flags, lsn, prefix = cursor.number(1), cursor.position(), self.raw_name(cursor)
        content = cursor.take(cursor.number(4))
        if flags > 1:
            raise RefusedError("unknown flags")
        if flags == 0:
            self.advance_end(lsn)
        else:
            transaction = self.current()
            if prefix == b"snapshot.gid" and transaction.gid is None and 0 < len(content) < 200:
                transaction.tag = decode_or(content, transaction.tag)
            if prefix == b"snapshot.participants" and 0 < len(content) <= 8192:
                transaction.participants = (decode_or(content, None) or "").encode() or transaction.participants
        self.found.through = max(self.found.through, lsn)
        if prefix == b"cutline":
            self.event("M", (lsn, lsn, 0), 0, None, content)

    def raw_name(self, cursor: Cursor) -> bytes:
        end = cursor.message.find(b"\0", cursor.place)
        content = cursor.take(end - cursor.place)
        cursor.take(1)
        return content

    def origin(self, cursor: Cursor) -> None:
        self.current().has_origin = True
        cursor.number(8)
        self.raw_name(cursor)

    def type(self, cursor: Cursor) -> None:
        cursor.number(4)
        cursor.name()
        cursor.name()

    def relation(self, cursor: Cursor) -> None:
        self.tables.describe(cursor)

    def truncate(self, cursor: Cursor) -> None:
        transaction = self.current()
        count, options = cursor.number(4), cursor.number(1)
        if options > 3 or count * 4 != len(cursor.message) - cursor.place:
            raise RefusedError("unknown options or wrong number of tables")
        for _ in range(count):
            group = self.tables.group(cursor.number(4))
            if group is None:
                self.found.ignored += 1
            else:
                self.change("T", group, 2 * transaction.rows, b"", b"")
        transaction.rows += 1

    # Rows.

    def insert(self, cursor: Cursor) -> None:
        group = self.row_group(cursor)
        if group is not None:
            letter, new = cursor.take(1), self.values(cursor, group)
            self.expect(letter == b"N")
            self.add_row(group, new, 0)
        self.current().rows += 1

    def update(self, cursor: Cursor) -> None:
        group = self.row_group(cursor)
        if group is not None:
            self.expect(group.identity != "append_only")
            letter = cursor.take(1)
            if letter == b"N":
                self.expect(not group.is_multiset)
                self.add_row(group, self.values(cursor, group), 0)
            else:
                self.expect(letter == (b"O" if group.identity == "full" else b"K"))
                old = self.values(cursor, group)
                self.expect(cursor.take(1) == b"N")
                self.add_moved_row(group, old, self.values(cursor, group))
        self.current().rows += 1

    def add_moved_row(self, group: Group, old: list[Any], new: list[Any]) -> None:
        keys = (
            range(len(new)) if group.is_multiset else [column.position for column in group.columns[: group.key_width]]
        )
        for place in keys:
            if new[place] is UNCHANGED:
                new[place] = old[place]
        before, after = self.key(group, old), self.key(group, new)
        if group.is_multiset:
            self.change("D", group, 2 * self.current().rows, b"", self.line(group, old))
        elif before != after:
            is_partial = any(value is UNCHANGED for value in new)
            self.change("D", group, 2 * self.current().rows, before, after + b"\n" if is_partial else b"")
        self.add_row(group, new, 1)

    def delete(self, cursor: Cursor) -> None:
        group = self.row_group(cursor)
        if group is not None:
            self.expect(group.identity != "append_only")
            self.expect(cursor.take(1) == (b"O" if group.identity == "full" else b"K"))
            old = self.values(cursor, group)
            line = self.line(group, old) if group.is_multiset else b""
            self.change("D", group, 2 * self.current().rows, self.key(group, old), line)
        self.current().rows += 1

    def row_group(self, cursor: Cursor) -> Group | None:
        """The group of a row; a row of an unknown table is skipped."""
        self.current()
        group = self.tables.group(cursor.number(4))
        if group is None:
            cursor.take(3)
            cursor.place = len(cursor.message)
            self.found.ignored += 1
        return group

    def values(self, cursor: Cursor, group: Group) -> list[Any]:
        self.expect(cursor.number(2) == len(group.columns))
        found: list[Any] = []
        for _ in group.columns:
            kind = cursor.take(1)
            self.expect(kind in (b"n", b"u", b"t"))
            found.append({b"n": None, b"u": UNCHANGED}[kind] if kind != b"t" else cursor.take(cursor.number(4)))
        return found

    def add_row(self, group: Group, new: list[Any], second: int) -> None:
        key, line = self.key(group, new), self.line(group, new)
        is_partial = any(value is UNCHANGED for value in new)
        self.expect(not (is_partial and group.is_multiset))
        op = "I" if group.is_multiset else "u" if is_partial else "U"
        self.change(op, group, 2 * self.current().rows + second, key, line)

    def line(self, group: Group, values: list[Any]) -> bytes:
        if group.is_multiset:
            self.expect(UNCHANGED not in values)
        return b"\t".join(copy_text(values[column.position]) for column in group.columns) + b"\n"

    def key(self, group: Group, values: list[Any]) -> bytes:
        keys = [values[column.position] for column in group.columns[: group.key_width]]
        self.expect(UNCHANGED not in keys)
        return b"\t".join(map(copy_text, keys))

    def expect(self, is_so: bool) -> None:  # noqa: FBT001
        if not is_so:
            raise RefusedError("not a row of the table")

    def change(self, op: str, group: Group, seq: int, key: bytes, row: bytes) -> None:
        transaction = self.current()
        hashed = xxhash.xxh64(row if group.is_multiset else key, seed=42).intdigest()
        partition = -1 if op == "T" else hashed % group.partitions
        self.found.changes.append({
            "lsn": transaction.lsn, "end_lsn": transaction.lsn, "seq": seq, "xid": transaction.xid,
            "global_id": transaction.gid, "op": ord(op), "group": group.number, "partition": partition, "key": key,
            "row": row,
        })  # fmt: skip

    def event(
        self, op: str, record: tuple[int, int, int], xid: int, gid: str | None, row: bytes = b"", *, key: bytes = b""
    ) -> None:
        lsn, end, ended_at = record
        self.found.through = max(self.found.through, end)
        self.found.events.append({
            "lsn": lsn, "end_lsn": end, "seq": ended_at, "xid": xid, "global_id": gid, "op": ord(op), "group": 0,
            "partition": -1, "key": key, "row": row,
        })  # fmt: skip


READERS = {
    "B": Reader.begin, "C": Reader.commit, "b": Reader.begin_prepare, "P": Reader.prepare,
    "K": Reader.commit_prepared, "r": Reader.rollback_prepared, "M": Reader.message, "O": Reader.origin,
    "Y": Reader.type, "R": Reader.relation, "T": Reader.truncate,
    "I": Reader.insert, "U": Reader.update, "D": Reader.delete,
}  # fmt: skip
