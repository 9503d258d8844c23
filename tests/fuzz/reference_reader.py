"""A reader of pgoutput's messages that goes message by message, value by value, as the manual has them.

Slow on purpose: it shares no line with the code that decodes whole columns, and says what that has to come to.
Source: PostgreSQL manual, "Logical Replication Message Formats" (protocol 3 without streaming); COPY, "Text Format".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from fleet.tables.groups import Group
from tests.fuzz.reference_cursor import UNCHANGED, Cursor, RefusedError, copied, text_or
from tests.fuzz.reference_tables import Tables

Row = dict[str, Any]


@dataclass(slots=True)
class Begun:
    """The open transaction: what its messages have said of it."""

    head: bytes
    lsn: int
    xid: int
    gid: str | None
    rows: int = 0
    tag: str | None = None


@dataclass(slots=True)
class Read:
    """What all messages come to: changes and events as SEGMENT_SCHEMA has them, and how many changes are nobody's."""

    changes: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    ignored: int = 0
    through: int = 0


@dataclass(slots=True)
class Reader:
    """Reads the messages of a node."""

    tables: Tables
    found: Read = field(default_factory=Read)
    begun: Begun | None = None
    ended: int = 0

    def read(self, messages: Sequence[bytes]) -> Read:
        for message in messages:
            if not message:
                raise RefusedError("nothing")
            cursor = Cursor(message, 1)
            reading = READINGS.get(chr(message[0]))
            if reading is None:
                raise RefusedError("unknown")
            reading(self, cursor)
            cursor.end()
        return self.found

    # What begins and ends.

    def begin(self, cursor: Cursor) -> None:
        self.opened(Begun(b"", cursor.position(), 0, None))
        cursor.number(8)
        self.within().xid = cursor.number(4)

    def begin_prepare(self, cursor: Cursor) -> None:
        lsn, end = cursor.position(), cursor.position()
        self.in_order(lsn, end)
        cursor.number(8)
        xid, gid = cursor.number(4), cursor.name()
        self.opened(Begun(cursor.message[1:], lsn, xid, gid))

    def opened(self, begun: Begun) -> None:
        if self.begun:
            raise RefusedError("two at once")
        self.begun = begun

    def commit(self, cursor: Cursor) -> None:
        begun = self.within()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        cursor.number(8)
        self.in_order(lsn, end)
        self.next_end(end)
        if begun.gid is not None or lsn != begun.lsn:
            raise RefusedError("another's end")
        self.event("C", lsn, end, begun.xid, begun.tag)
        self.begun = None

    def prepare(self, cursor: Cursor) -> None:
        begun = self.within()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        cursor.number(8)
        xid, gid = cursor.number(4), cursor.name()
        if begun.gid is None or cursor.message[2:] != begun.head:
            raise RefusedError("another's end")
        self.event("P", lsn, end, xid, gid)
        self.begun = None

    def commit_prepared(self, cursor: Cursor) -> None:
        self.between()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        cursor.number(8)
        xid, gid = cursor.number(4), cursor.name()
        self.in_order(lsn, end)
        self.next_end(end)
        self.event("K", lsn, end, xid, gid)

    def rollback_prepared(self, cursor: Cursor) -> None:
        self.between()
        cursor.zero()
        lsn, end = cursor.position(), cursor.position()
        cursor.number(8)
        cursor.number(8)
        xid, gid = cursor.number(4), cursor.name()
        self.in_order(lsn, end)
        self.next_end(end)
        self.event("R", lsn, end, xid, gid)

    def within(self) -> Begun:
        if self.begun is None:
            raise RefusedError("in no transaction")
        return self.begun

    def between(self) -> None:
        if self.begun:
            raise RefusedError("in a transaction")

    def in_order(self, low: int, high: int) -> None:
        if low > high:
            raise RefusedError("ends before it begins")

    def next_end(self, end: int) -> None:
        if end < self.ended:
            raise RefusedError("ends before what was before")
        self.ended = end

    # What is in between.

    def message(self, cursor: Cursor) -> None:
        flags, lsn, prefix = cursor.number(1), cursor.position(), self.raw_name(cursor)
        content = cursor.take(cursor.number(4))
        if flags > 1:
            raise RefusedError("flags")
        if flags == 0:
            self.next_end(lsn)
        else:
            begun = self.within()
            if prefix == b"snapshot.gid" and begun.gid is None and 0 < len(content) < 200:
                begun.tag = text_or(content, begun.tag)
        self.found.through = max(self.found.through, lsn)
        if prefix == b"cutline":
            self.event("M", lsn, lsn, 0, None, content)

    def raw_name(self, cursor: Cursor) -> bytes:
        end = cursor.message.find(b"\0", cursor.place)
        content = cursor.take(end - cursor.place)
        cursor.take(1)
        return content

    def origin(self, cursor: Cursor) -> None:
        self.within()
        cursor.number(8)
        self.raw_name(cursor)

    def type(self, cursor: Cursor) -> None:
        cursor.number(4)
        cursor.name()
        cursor.name()

    def relation(self, cursor: Cursor) -> None:
        self.tables.describe(cursor)

    def truncate(self, cursor: Cursor) -> None:
        begun = self.within()
        count, options = cursor.number(4), cursor.number(1)
        if options > 3 or count * 4 != len(cursor.message) - cursor.place:
            raise RefusedError("options or tables")
        for _ in range(count):
            group = self.tables.group(cursor.number(4))
            if group is None:
                self.found.ignored += 1
            else:
                self.change("T", group, 2 * begun.rows, b"", b"")
        begun.rows += 1

    # Rows.

    def insert(self, cursor: Cursor) -> None:
        group = self.row_of(cursor)
        if group is not None:
            letter, new = cursor.take(1), self.values(cursor, group)
            self.need(letter == b"N")
            self.written(group, new, 0)
        self.within().rows += 1

    def update(self, cursor: Cursor) -> None:
        group = self.row_of(cursor)
        if group is not None:
            self.need(group.identity != "append_only")
            letter = cursor.take(1)
            if letter == b"N":
                self.need(not group.is_multiset)
                self.written(group, self.values(cursor, group), 0)
            else:
                self.need(letter == (b"O" if group.identity == "full" else b"K"))
                old = self.values(cursor, group)
                self.need(cursor.take(1) == b"N")
                self.moved(group, old, self.values(cursor, group))
        self.within().rows += 1

    def moved(self, group: Group, old: list[Any], new: list[Any]) -> None:
        keys = (
            range(len(new)) if group.is_multiset else [column.position for column in group.columns[: group.key_width]]
        )
        for place in keys:
            if new[place] is UNCHANGED:
                new[place] = old[place]
        before, after = self.key(group, old), self.key(group, new)
        if group.is_multiset:
            self.change("D", group, 2 * self.within().rows, b"", self.line(group, old))
        elif before != after:
            is_partial = any(value is UNCHANGED for value in new)
            self.change("D", group, 2 * self.within().rows, before, after + b"\n" if is_partial else b"")
        self.written(group, new, 1)

    def delete(self, cursor: Cursor) -> None:
        group = self.row_of(cursor)
        if group is not None:
            self.need(group.identity != "append_only")
            self.need(cursor.take(1) == (b"O" if group.identity == "full" else b"K"))
            old = self.values(cursor, group)
            line = self.line(group, old) if group.is_multiset else b""
            self.change("D", group, 2 * self.within().rows, self.key(group, old), line)
        self.within().rows += 1

    def row_of(self, cursor: Cursor) -> Group | None:
        """The table of a row; of one that is not ours nothing more is read."""
        self.within()
        group = self.tables.group(cursor.number(4))
        if group is None:
            cursor.take(3)
            cursor.place = len(cursor.message)
            self.found.ignored += 1
        return group

    def values(self, cursor: Cursor, group: Group) -> list[Any]:
        self.need(cursor.number(2) == len(group.columns))
        found: list[Any] = []
        for _ in group.columns:
            kind = cursor.take(1)
            self.need(kind in (b"n", b"u", b"t"))
            found.append({b"n": None, b"u": UNCHANGED}[kind] if kind != b"t" else cursor.take(cursor.number(4)))
        return found

    def written(self, group: Group, new: list[Any], second: int) -> None:
        key, line = self.key(group, new), self.line(group, new)
        is_partial = any(value is UNCHANGED for value in new)
        self.need(not (is_partial and group.is_multiset))
        op = "I" if group.is_multiset else "u" if is_partial else "U"
        self.change(op, group, 2 * self.within().rows + second, key, line)

    def line(self, group: Group, values: list[Any]) -> bytes:
        if group.is_multiset:
            self.need(UNCHANGED not in values)
        return b"\t".join(copied(values[column.position]) for column in group.columns) + b"\n"

    def key(self, group: Group, values: list[Any]) -> bytes:
        keys = [values[column.position] for column in group.columns[: group.key_width]]
        self.need(UNCHANGED not in keys)
        return b"\t".join(map(copied, keys))

    def need(self, is_so: bool) -> None:  # noqa: FBT001
        if not is_so:
            raise RefusedError("a row")

    def change(self, op: str, group: Group, seq: int, key: bytes, row: bytes) -> None:
        begun = self.within()
        hashed = xxhash.xxh64(row if group.is_multiset else key, seed=42).intdigest()
        partition = -1 if op == "T" else hashed % group.partitions
        self.found.changes.append({
            "lsn": begun.lsn, "end_lsn": begun.lsn, "seq": seq, "xid": begun.xid, "global_id": begun.gid, "op": ord(op),
            "group": group.number, "partition": partition, "key": key, "row": row,
        })  # fmt: skip

    def event(self, op: str, lsn: int, end: int, xid: int, gid: str | None, row: bytes = b"") -> None:
        self.found.through = max(self.found.through, end)
        self.found.events.append({
            "lsn": lsn, "end_lsn": end, "seq": 0, "xid": xid, "global_id": gid, "op": ord(op), "group": 0,
            "partition": -1, "key": b"", "row": row,
        })  # fmt: skip


READINGS = {
    "B": Reader.begin, "C": Reader.commit, "b": Reader.begin_prepare, "P": Reader.prepare,
    "K": Reader.commit_prepared, "r": Reader.rollback_prepared, "M": Reader.message, "O": Reader.origin,
    "Y": Reader.type, "R": Reader.relation, "T": Reader.truncate,
    "I": Reader.insert, "U": Reader.update, "D": Reader.delete,
}  # fmt: skip
