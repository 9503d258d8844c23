"""From pgoutput's messages to row changes and transaction events, by whole columns.

A Decoder is fed a node's messages in order and remembers only the transaction that a batch left open. What
is not a change of a group's rows or an event of a transaction is dropped, and counted. It never guesses: a
table that is not as the snapshot has it is a SchemaChangedError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fleet.groups import Group
from storage.errors import RefusedError
from wal import pgoutput
from wal.bytes_column import BytesColumn, Ints
from wal.changes import ChangeColumns, changes_of_relation
from wal.global_ids import global_ids
from wal.markers import MARKER_PREFIX
from wal.pgoutput import DecodingError, Messages, Relation, messages_of, read_relation
from wal.segment_schema import (
    COMMIT,
    COMMIT_PREPARED,
    EVERY_PARTITION,
    MARKER,
    NO_GROUP,
    PREPARE,
    ROLLBACK_PREPARED,
    SEGMENT_SCHEMA,
    TRUNCATE,
)

ROW_KINDS = (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED, pgoutput.TRUNCATED)


class SchemaChangedError(RefusedError):
    """A table is no longer as it was at the full snapshot."""


@dataclass(frozen=True, slots=True)
class Open:
    """The transaction that the messages so far have begun and not ended; `sent` counts its rows so far."""

    lsn: int
    xid: int
    global_id: str | None
    sent: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch of messages holds. `through` is where its last whole transaction or event ends, 0: none."""

    changes: pa.Table
    events: pa.Table
    through: int
    open: Open | None
    ignored: int


@dataclass(slots=True)
class Decoder:
    """Decodes the messages of `node`, whose tables are `groups` (by name)."""

    node: str
    groups: Mapping[str, Group]
    global_id_form: str
    relations: dict[int, Group | None] = field(default_factory=dict)
    open: Open | None = None

    def feed(self, column: BytesColumn) -> Decoded:
        """Decode the next messages. Raises SchemaChangedError, DecodingError."""
        if len(column) == 0:
            return Decoded(SEGMENT_SCHEMA.empty_table(), SEGMENT_SCHEMA.empty_table(), 0, self.open, 0)
        messages = messages_of(column)
        self._learn(messages)
        transactions = _Transactions.of(messages, self.open, self.global_id_form)
        changes, ignored = self._changes(messages, transactions)
        events, through = self._events(messages, transactions)
        self.open = transactions.left_open
        return Decoded(changes, events, through, self.open, ignored)

    def _learn(self, messages: Messages) -> None:
        # Bounded by the tables: a peek describes each of them once.
        for number in np.flatnonzero(messages.kinds == pgoutput.RELATION):
            relation = read_relation(messages.bytes_at(int(number)))
            group = self.groups.get(f"{relation.schema}.{relation.table}")
            if group is not None:
                check_relation(self.node, group, relation)
            self.relations[relation.oid] = group

    def _changes(self, messages: Messages, transactions: _Transactions) -> tuple[pa.Table, int]:
        kinds = messages.kinds
        is_row = np.isin(kinds, ROW_KINDS[:3])
        rows = np.flatnonzero(is_row)
        oids = messages.u32(messages.starts[rows] + 1)
        tables: list[pa.Table] = []
        ignored = 0
        for oid in np.unique(oids):
            numbers = rows[oids == oid]
            group = self._group(int(oid))
            if group is None:
                ignored += len(numbers)
                continue
            for part in changes_of_relation(messages, numbers, group):
                tables.append(_change_table(part, group, transactions))
        truncated, others = self._truncates(messages, transactions)
        tables += truncated
        return pa.concat_tables(tables) if tables else SEGMENT_SCHEMA.empty_table(), ignored + others

    def _group(self, oid: int) -> Group | None:
        if oid not in self.relations:
            raise DecodingError(f"node {self.node}: changes of table {oid} came before its description")
        return self.relations[oid]

    def _truncates(self, messages: Messages, transactions: _Transactions) -> tuple[list[pa.Table], int]:
        tables: list[pa.Table] = []
        ignored = 0
        # Bounded by the TRUNCATE commands, each of which costs the server far more.
        for number in np.flatnonzero(messages.kinds == pgoutput.TRUNCATED):
            message = messages.bytes_at(int(number))
            for place in range(6, len(message), 4):
                group = self._group(int.from_bytes(message[place : place + 4], "big"))
                if group is None:
                    ignored += 1
                    continue
                one = np.array([number])
                nothing = BytesColumn(np.empty(0, np.uint8), np.zeros(2, np.int64))
                part = ChangeColumns(one, np.zeros(1, np.int64), TRUNCATE, nothing, nothing)
                tables.append(_change_table(part, group, transactions))
        return tables, ignored

    def _events(self, messages: Messages, transactions: _Transactions) -> tuple[pa.Table, int]:
        parts = [
            _commits(messages, transactions),
            _prepares(messages, transactions, self.global_id_form),
            _settled(messages, pgoutput.COMMIT_OF_PREPARED, COMMIT_PREPARED, self.global_id_form),
            _settled(messages, pgoutput.ROLLBACK_OF_PREPARED, ROLLBACK_PREPARED, self.global_id_form),
            *_markers(messages),
        ]
        events = pa.concat_tables(parts).sort_by("end_lsn")
        # What ends last has the highest position: PostgreSQL sends commits in the order of their records.
        # Others' messages count too, or a chunk of nothing else would seem to end where it begins.
        others = messages.u64(messages.starts[messages.kinds == pgoutput.MESSAGE] + 2)
        return events, max(int(pc.max(events["end_lsn"]).as_py() or 0), int(others.max(initial=0)))


def check_relation(node: str, group: Group, relation: Relation) -> None:
    """Raise SchemaChangedError unless the relation's columns and key are those that the group has."""
    now = [(c.name, c.type_oid, c.type_modifier) for c in relation.columns]
    was = [(c.name, c.type_oid, c.type_modifier) for c in sorted(group.columns, key=lambda c: c.position)]
    keys_now = {column.name for column in relation.columns if column.is_key}
    keys_was = {column.name for column in group.columns[: group.key_width]}
    is_full = relation.replica_identity == "f"
    if now == was and is_full == (group.identity == "full") and (group.is_multiset or keys_now == keys_was):
        return
    raise SchemaChangedError(
        f"node {node}: table {group.name} is not as it was at the full snapshot",
        hint="take a new full snapshot: snapshot create NAME",
        details={"node": node, "group": group.name, "columns": [column.name for column in relation.columns]},
    )


@dataclass(frozen=True, slots=True)
class _Transactions:
    """To which transaction every message of a batch belongs; number 0 is the one left open before."""

    of_message: Ints
    ordinal: Ints
    lsn: Ints
    xid: Ints
    global_id: pa.Array[Any]
    left_open: Open | None

    @classmethod
    def of(cls, messages: Messages, before: Open | None, form: str) -> _Transactions:
        kinds = messages.kinds
        begins = np.flatnonzero((kinds == pgoutput.BEGIN) | (kinds == pgoutput.BEGIN_PREPARE))
        is_prepared = kinds[begins] == pgoutput.BEGIN_PREPARE
        at = messages.starts[begins]
        count = len(begins)
        lsn, xid = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
        lsn[1:] = messages.u64(at + 1)
        xid[1:] = messages.u32(at + np.where(is_prepared, 25, 17))
        prepared = np.flatnonzero(is_prepared)
        names = messages.texts(at[prepared] + 29, messages.ends[begins[prepared]] - 1)
        index = np.full(count + 1, -1, np.int64)
        index[1:][prepared] = np.arange(len(prepared)) + 1
        known = pa.concat_arrays(
            [pa.array([before.global_id if before else None], pa.string()), global_ids(names, form)]
        )
        if before:
            lsn[0], xid[0], index[0] = before.lsn, before.xid, 0
        of_message = np.cumsum((kinds == pgoutput.BEGIN) | (kinds == pgoutput.BEGIN_PREPARE))
        # Only rows are counted: descriptions of tables are sent anew whenever the WAL is read again.
        is_row = np.isin(kinds, ROW_KINDS)
        rows = np.cumsum(is_row)
        first = np.concatenate([[-(before.sent if before else 0)], rows[begins]])
        ordinal = rows - is_row - first[of_message]
        identities = known.take(pa.array(index, mask=index < 0))
        sent = int(rows[-1] - first[of_message[-1]])
        left = _left_open(kinds, of_message, sent, lsn, xid, identities, before)
        return cls(of_message, ordinal, lsn, xid, identities, left)


def _left_open(
    kinds: Any, of_message: Ints, sent: int, lsn: Ints, xid: Ints, names: Any, before: Open | None
) -> Open | None:
    last = int(of_message[-1])
    ends = np.flatnonzero((kinds == pgoutput.COMMIT_LOCAL) | (kinds == pgoutput.PREPARED))
    if (last == 0 and before is None) or (len(ends) and int(of_message[ends[-1]]) == last):
        return None
    return Open(int(lsn[last]), int(xid[last]), names[last].as_py(), sent)


def _change_table(part: ChangeColumns, group: Group, transactions: _Transactions) -> pa.Table:
    numbers = transactions.of_message[part.numbers]
    count = len(part.numbers)
    # An update of a key is two changes; twice the ordinal leaves a number for the second.
    seq = transactions.ordinal[part.numbers] * 2 + part.second
    if transactions.global_id.null_count == len(transactions.global_id):
        names = pa.nulls(count, pa.string())
    else:
        names = transactions.global_id.take(pa.array(numbers))
    partitions = part.partitions(group)
    if part.op == TRUNCATE:
        partitions = np.full(count, EVERY_PARTITION, np.int32)
    lsn = transactions.lsn[numbers]
    return pa.table(
        [
            lsn, lsn, seq, transactions.xid[numbers], names,
            np.full(count, part.op, np.int8), np.full(count, group.number, np.int32), partitions,
            part.keys.to_arrow(), part.rows.to_arrow(),
        ],
        schema=SEGMENT_SCHEMA,
    )  # fmt: skip


def _event_table(op: int, lsn: Ints, end_lsn: Ints, xid: Ints, names: Any, rows: Any = None) -> pa.Table:
    count = len(lsn)
    nothing = BytesColumn(np.empty(0, np.uint8), np.zeros(count + 1, np.int64)).to_arrow()
    return pa.table(
        [
            lsn, end_lsn, np.zeros(count, np.int64), xid, names, np.full(count, op, np.int8),
            np.full(count, NO_GROUP, np.int32), np.full(count, EVERY_PARTITION, np.int32),
            nothing, nothing if rows is None else rows,
        ],
        schema=SEGMENT_SCHEMA,
    )  # fmt: skip


def _commits(messages: Messages, transactions: _Transactions) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == pgoutput.COMMIT_LOCAL)
    at = messages.starts[numbers]
    xid = transactions.xid[transactions.of_message[numbers]]
    return _event_table(
        COMMIT, messages.u64(at + 2), messages.u64(at + 10), xid, pa.nulls(len(at), pa.string())
    )


def _prepares(messages: Messages, transactions: _Transactions, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == pgoutput.PREPARED)
    at = messages.starts[numbers]
    names = global_ids(messages.texts(at + 30, messages.ends[numbers] - 1), form)
    # The position that its changes have, which is where the PREPARE record begins.
    lsn = transactions.lsn[transactions.of_message[numbers]]
    return _event_table(PREPARE, lsn, messages.u64(at + 10), messages.u32(at + 26), names)


def _settled(messages: Messages, kind: int, op: int, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == kind)
    at = messages.starts[numbers]
    is_commit = kind == pgoutput.COMMIT_OF_PREPARED
    names = global_ids(messages.texts(at + (30 if is_commit else 38), messages.ends[numbers] - 1), form)
    end = messages.u64(at + 10)
    # A rollback's message names no beginnings; where its PREPARE ended tells which transaction it undid.
    lsn = messages.u64(at + 2)
    return _event_table(op, lsn, end, messages.u32(at + (26 if is_commit else 34)), names)


def _markers(messages: Messages) -> list[pa.Table]:
    tables: list[pa.Table] = []
    # Messages of ours are two per cut; others' may be many, so their prefix is compared by column first.
    numbers = np.flatnonzero(messages.kinds == pgoutput.MESSAGE)
    wanted = np.frombuffer(MARKER_PREFIX + b"\0", np.uint8)
    at = messages.starts[numbers]
    numbers = numbers[messages.ends[numbers] - at >= 14 + len(wanted)]
    at = messages.starts[numbers]
    is_ours = np.ones(len(numbers), np.bool_)
    for place, byte in enumerate(wanted):
        is_ours &= messages.u8(at + 10 + place) == byte
    for number in numbers[is_ours]:
        message = messages.bytes_at(int(number))
        end = np.array([int.from_bytes(message[2:10], "big")])
        content = pa.array([message[10 + len(wanted) + 4 :]], pa.binary())
        tables.append(
            _event_table(MARKER, end, end, np.zeros(1, np.int64), pa.nulls(1, pa.string()), content)
        )
    return tables
