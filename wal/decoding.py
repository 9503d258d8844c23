"""From pgoutput's messages to row changes and transaction events, by whole columns.

A Decoder is fed a node's messages in order and remembers only the transaction that a batch left open. What
is not a change of a group's rows or an event of a transaction is dropped, and counted. It never guesses: a
table that is not as the snapshot has it is a SchemaChangedError.

Of a prepared transaction that was rolled back by the time it is decoded, PostgreSQL may leave out any of the
changes; of one that changed nothing, everything. Nothing may rely on either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from fleet.groups import Group, SchemaChangedError
from fleet.hints import NEW_CHAIN
from wal import pgoutput
from wal.arrow_numbers import to_arrow, to_numpy
from wal.bytes_column import BytesColumn
from wal.changes import ChangeColumns, changes_of_relation
from wal.events import events_of
from wal.pgoutput import DecodingError, Messages, Relation, messages_of, read_relation
from wal.segment_schema import EVERY_PARTITION, SEGMENT_SCHEMA, TRUNCATE
from wal.transactions import ROW_KINDS, Open, Transactions


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch of messages holds. `through` is where its last transaction or event ends, 0: none."""

    changes: pa.Table
    events: pa.Table
    through: int
    open: Open | None
    ignored: int


@dataclass(slots=True)
class Decoder:
    """Decodes the messages of `node`, whose tables are `groups` (by name); `oids` are their names, where known."""

    node: str
    groups: Mapping[str, Group]
    global_id_form: str
    relations: dict[int, Group | None] = field(default_factory=dict)
    open: Open | None = None
    oids: Mapping[int, str] = field(default_factory=dict)

    def feed(self, column: BytesColumn) -> Decoded:
        """Decode the next messages. Raises SchemaChangedError, DecodingError."""
        if len(column) == 0:
            return Decoded(
                pa.Table.from_batches([], SEGMENT_SCHEMA), pa.Table.from_batches([], SEGMENT_SCHEMA), 0, self.open, 0
            )
        messages = messages_of(column)
        self._learn(messages)
        transactions = Transactions.of(messages, self.open, self.global_id_form)
        changes, ignored = self._changes(messages, transactions)
        events, through = self._events(messages, transactions)
        self.open = transactions.left_open
        return Decoded(changes, events, through, self.open, ignored)

    def _learn(self, messages: Messages) -> None:
        # Bounded by the tables: a peek describes each of them once.
        for number in np.flatnonzero(messages.kinds == pgoutput.RELATION):
            relation = read_relation(messages.bytes_at(int(number)))
            group = self.groups.get(f"{relation.schema}.{relation.table}")
            check_name(self.node, self.oids, relation)
            if group is not None:
                check_relation(self.node, group, relation)
            self.relations[relation.oid] = group

    def _changes(self, messages: Messages, transactions: Transactions) -> tuple[pa.Table, int]:
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
        return pa.concat_tables(tables) if tables else pa.Table.from_batches([], SEGMENT_SCHEMA), ignored + others

    def _group(self, oid: int) -> Group | None:
        if oid not in self.relations:
            raise DecodingError(f"node {self.node}: changes of table {oid} came before its description")
        return self.relations[oid]

    def _truncates(self, messages: Messages, transactions: Transactions) -> tuple[list[pa.Table], int]:
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

    def _events(self, messages: Messages, transactions: Transactions) -> tuple[pa.Table, int]:
        events = events_of(messages, transactions, self.global_id_form)
        # What ends last has the highest position: PostgreSQL sends commits in the order of their records.
        # Others' messages count too, or a chunk of nothing else would seem to end where it begins.
        others = messages.u64(messages.starts[messages.kinds == pgoutput.MESSAGE] + 2)
        return events, max(int(to_numpy(events["end_lsn"]).max(initial=0)), int(others.max(initial=0)))


def check_name(node: str, oids: Mapping[int, str], relation: Relation) -> None:
    """Raise SchemaChangedError if the relation had another name than at the full snapshot when it was changed.

    A table that was renamed and renamed back looks as it was; what it was called meanwhile is only in WAL.
    """
    called = f"{relation.schema}.{relation.table}"
    known = oids.get(relation.oid, called if called not in oids.values() else "")
    if known != called:
        raise SchemaChangedError(
            f"node {node}: table {known or called} "
            + (f"was changed under the name {called}" if known else "was another table when it was changed"),
            hint=NEW_CHAIN,
            details={"node": node, "group": known or called},
        )


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
        hint=NEW_CHAIN,
        details={"node": node, "group": group.name, "columns": [column.name for column in relation.columns]},
    )


def _change_table(part: ChangeColumns, group: Group, transactions: Transactions) -> pa.Table:
    numbers = transactions.of_message[part.numbers]
    count = len(part.numbers)
    # An update of a key is two changes; twice the ordinal leaves a number for the second.
    seq = transactions.ordinal[part.numbers] * 2 + part.second
    if transactions.global_id.null_count == len(transactions.global_id):
        names = pa.nulls(count, pa.string())
    else:
        names = transactions.global_id.take(to_arrow(numbers))
    partitions = part.partitions(group)
    if part.op == TRUNCATE:
        partitions = np.full(count, EVERY_PARTITION, np.int32)
    lsn = transactions.lsn[numbers]
    return pa.table(
        [
            to_arrow(lsn), to_arrow(lsn), to_arrow(seq), to_arrow(transactions.xid[numbers]), names,
            to_arrow(np.full(count, part.op, np.int8)), to_arrow(np.full(count, group.number, np.int32)),
            to_arrow(partitions),
            part.keys.to_arrow(), part.rows.to_arrow(),
        ],
        schema=SEGMENT_SCHEMA,
    )  # fmt: skip
