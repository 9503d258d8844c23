"""Decoder: convert pgoutput's messages to row changes and transaction events, whole columns at a time.

A Decoder receives a node's messages in order. Between batches it keeps only the open transaction and the last
description of each table. Changes to tables that are not in a group are dropped and counted. A Decoder never guesses: a
changed table that does not match any of its definitions raises SchemaMovedError.

If a prepared transaction was rolled back before being decoded, PostgreSQL may omit any of its changes, or the whole
transaction if it made no changes. Callers must allow for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow, to_numpy
from cutline.columns.bytes_column import BytesColumn, Ints
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import NEW_CHAIN
from cutline.nodes.encodings import Texts
from cutline.nodes.groups import Group
from cutline.nodes.server_errors import KEY_CHARACTERS_MAX, row_hint
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.wal.decoding import pgoutput
from cutline.wal.decoding.changes import ChangeColumns, changes_of_relation
from cutline.wal.decoding.known_definitions import EVERYWHERE, KnownDefinitions, SchemaMovedError, TableDescription
from cutline.wal.decoding.message_forms import BEGINS, ENDS, check_forms, check_nesting, check_order, truncated_tables
from cutline.wal.decoding.pgoutput import DecodingError, Messages, messages_of, read_relation
from cutline.wal.decoding.transactions import ROW_KINDS, OpenTransactionHead, Transactions, events_of
from cutline.wal.segments.archive import Definition
from cutline.wal.segments.segments import EVERY_PARTITION, SEGMENT_SCHEMA, TRUNCATE

# PostgreSQL's MaxAllocSize minus the terminating byte: the longest line, including its newline, that COPY TO and COPY
# FROM accept. A row from WAL may yield a longer line, because WAL does not escape characters.
LINE_BYTES_MAX = (1 << 30) - 2
# "Program limit exceeded", which COPY itself reports on newer versions.
TOO_LONG = "54000"


class RowUndecodableError(RefusedError):
    """A node can't print a row that was written, or COPY can't read its line, so the chain ends before that row."""

    def __init__(self, *, node: str, table: str, what: str, row: str, sqlstate: str, slot: str = "") -> None:
        super().__init__(
            f"node {node}: table {table}: {what}{f' ({row})' if row else ''}",
            hint=f"{NEW_CHAIN}; the chain can't continue after this row. First: {row_hint(sqlstate)}",
            ends_chain=ChainEnd.FOR_GOOD,
            details={"node": node, "group": table, "row": row, **({"slot": slot} if slot else {})},
        )


def refuse_long_lines(node: str, group: Group, part: ChangeColumns) -> None:
    """Raise RowUndecodableError if COPY could not read one of the lines; otherwise only a restore would find out."""
    lengths = part.rows.lengths
    row = int(lengths.argmax()) if len(lengths) else 0
    if not len(lengths) or lengths[row] <= LINE_BYTES_MAX:
        return
    begin, end = part.keys.offsets[row : row + 2].tolist()
    fields = bytes(part.keys.data[begin:end]).decode(errors="replace").split("\t")
    names = [column.name for column in group.columns[: group.key_width]]
    key = ", ".join(f"{name} = {value}" for name, value in zip(names, fields, strict=False))
    raise RowUndecodableError(
        node=node,
        table=group.name,
        what=f"a row was written that takes {int(lengths[row])} bytes in COPY's format, more than COPY can read",
        row=key[:KEY_CHARACTERS_MAX] or "the table has no key",
        sqlstate=TOO_LONG,
    )


class Decoded(Struct, frozen=True):
    """The content of a batch of messages. `through` is the end of its last transaction or event, 0 if it has none.

    `ignored` counts the changes that are in no group. `dropped` has the positions of the transactions among them that
    changed a table before it was copied, under a definition that is not known.
    """

    changes: pa.Table
    events: pa.Table
    through: Lsn
    open: OpenTransactionHead | None
    ignored: int
    dropped: frozenset[int] = frozenset()


@dataclass(slots=True)
class _NotArchived:
    """The facts about changes that are in no group: `Decoded.ignored` and `Decoded.dropped`."""

    ignored: int = 0
    dropped: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Decoder:
    """Decodes the messages of `node`; `definitions` are all definitions that its tables have had.

    `convert` decodes names, gids and tags if the server's encoding is not UTF-8.
    """

    node: str
    definitions: tuple[Definition, ...]
    global_id_form: str
    descriptions: dict[int, TableDescription] = field(default_factory=dict)
    open: OpenTransactionHead | None = None
    read: int = 0
    read_bytes: int = 0
    ended: Lsn = ORIGIN
    convert: Texts | None = None
    _known: KnownDefinitions = field(init=False)

    def __post_init__(self) -> None:
        self._known = KnownDefinitions(self.definitions)

    def feed(self, column: BytesColumn) -> Decoded:
        """Decode the next messages. Raises SchemaMovedError, DecodingError, RowUndecodableError."""
        return self.decode(self.view(column))

    def view(self, column: BytesColumn) -> Messages:
        """Copy the next messages into the form that `decode` needs. Raises DecodingError."""
        try:
            return messages_of(column, self.convert)
        except DecodingError as error:
            raise self._locate(error, column) from error

    def decode(self, messages: Messages) -> Decoded:
        """Decode the next messages. Raises SchemaMovedError, DecodingError, RowUndecodableError."""
        if len(messages) == 0:
            empty = pa.Table.from_batches([], SEGMENT_SCHEMA)
            return Decoded(empty, empty, ORIGIN, self.open, 0)
        try:
            check_forms(messages)
            check_nesting(messages, self.open)
            self.ended = Lsn(check_order(messages, self.ended))
            transactions = Transactions.of(messages, self.open, self.global_id_form)
            changes, others = self._changes(messages, transactions)
            events, through = self._events(messages, transactions)
        except DecodingError as error:
            raise self._locate(error, messages.column) from error
        self.open = transactions.left_open
        self.read += len(messages)
        self.read_bytes += messages.data_bytes
        return Decoded(changes, events, through, self.open, others.ignored, frozenset(others.dropped))

    def _locate(self, error: DecodingError, column: BytesColumn) -> DecodingError:
        """Return the error with its location: the message's number among all that were read, and its transaction."""
        number = error.number or 0
        read = [column.data[low:high] for low, high in pairwise(column.offsets[: number + 2].tolist())]
        lsn = self.open.lsn if self.open else ORIGIN
        for message in read[:-1]:
            if len(message) >= 9 and message[0] in BEGINS:
                lsn = Lsn.from_bytes(message[1:9].tobytes(), "big")
            elif len(message) and message[0] in ENDS:
                lsn = ORIGIN
        where = f", in the transaction at {lsn}" if lsn else ""
        return DecodingError(
            f"node {self.node}: message {self.read + number + 1} of its slot ({len(read[-1])} bytes{where}) is invalid:"
            f" {error.message}",
            hint=error.hint or "repeat the command: it reads the same WAL again; if this error persists, report it",
            details={"node": self.node, "message": self.read + number + 1, "lsn": str(lsn)},
        )

    def _changes(self, messages: Messages, transactions: Transactions) -> tuple[pa.Table, _NotArchived]:
        """Return the changes to tables in groups, and the facts about all other changes."""
        tables: list[pa.Table] = []
        others = _NotArchived()
        moved: dict[int, TableDescription] = {}
        for description, numbers in self._by_description(messages):
            if description.group is not None:
                tables += self._change_tables(messages, numbers, description.group, transactions)
                continue
            others.ignored += len(numbers)
            if description.dropped_before < EVERYWHERE:
                lsns = np.unique(transactions.lsn[transactions.of_message[numbers]])
                if lsns[-1] >= description.dropped_before:
                    moved[description.oid] = description
                others.dropped.update(lsns.tolist())
        if moved:
            raise SchemaMovedError(node=self.node, moved=moved.values())
        return pa.concat_tables(tables) if tables else pa.Table.from_batches([], SEGMENT_SCHEMA), others

    def _change_tables(
        self, messages: Messages, numbers: Ints, group: Group, transactions: Transactions
    ) -> Iterator[pa.Table]:
        if messages.kinds[numbers[0]] == pgoutput.TRUNCATED:
            empty = BytesColumn(np.empty(0, np.uint8), np.zeros(len(numbers) + 1, np.int64))
            part = ChangeColumns(numbers, np.zeros(len(numbers), np.int64), TRUNCATE, empty, empty)
            yield _change_table(part, group, transactions)
            return
        for part in changes_of_relation(messages, numbers, group):
            refuse_long_lines(self.node, group, part)
            yield _change_table(part, group, transactions)

    def _by_description(self, messages: Messages) -> Iterator[tuple[TableDescription, Ints]]:
        """Yield the message numbers of changes, with the table description that applied when they were made.

        The number of a TRUNCATE is yielded once per table, separate from row changes.
        """
        # Bounded by the tables and their DDL: within a peek, a table is described again only after it was altered.
        changed_at: dict[int, list[tuple[int, TableDescription]]] = {}
        for number in np.flatnonzero(messages.kinds == pgoutput.RELATION):
            relation = read_relation(messages.bytes_at(int(number)), int(number), self.convert)
            changed_at.setdefault(relation.oid, []).append((int(number), self._known.describe(relation)))
        rows = np.flatnonzero(np.isin(messages.kinds, ROW_KINDS[:3]))
        oids = messages.u32(messages.starts[rows] + 1)
        order = np.argsort(oids, kind="stable")
        firsts = np.flatnonzero(np.diff(oids[order], prepend=-1))
        by_oid = (
            list(zip(oids[order][firsts].tolist(), np.split(rows[order], firsts[1:]), strict=True)) if len(rows) else []
        )
        # Bounded by the number of TRUNCATE commands, each of which costs the server far more.
        for number in np.flatnonzero(messages.kinds == pgoutput.TRUNCATED):
            by_oid += [(oid, np.array([number])) for oid in truncated_tables(messages, int(number))]
        for oid, numbers in by_oid:
            yield from self._split(oid, numbers, changed_at.get(oid, []))
        for oid, descriptions in changed_at.items():
            self.descriptions[oid] = descriptions[-1][1]

    def _split(
        self, oid: int, numbers: Ints, descriptions: list[tuple[int, TableDescription]]
    ) -> Iterator[tuple[TableDescription, Ints]]:
        bounds = np.searchsorted(numbers, [number for number, _ in descriptions])
        parts = np.split(numbers, bounds)
        for number, part in enumerate(parts):
            description = descriptions[number - 1][1] if number else self.descriptions.get(oid)
            if len(part) == 0:
                continue
            if description is None:
                raise DecodingError(
                    f"a change to table {oid} comes before the table's relation message", number=int(part[0])
                )
            yield description, part

    def _events(self, messages: Messages, transactions: Transactions) -> tuple[pa.Table, Lsn]:
        events = events_of(messages, transactions, self.global_id_form)
        # PostgreSQL sends commits in the order of their records, so the highest position is the last commit's position.
        # Logical messages from other programs also count; otherwise a chunk that contains nothing else would seem to
        # end where it begins.
        others = messages.u64(messages.starts[messages.kinds == pgoutput.MESSAGE] + 2)
        return events, Lsn(max(to_numpy(events["end_lsn"]).max(initial=0), others.max(initial=0)))


def _change_table(part: ChangeColumns, group: Group, transactions: Transactions) -> pa.Table:
    numbers = transactions.of_message[part.numbers]
    count = len(part.numbers)
    # An UPDATE of a key becomes two changes, so each row gets two numbers.
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
            to_arrow(lsn),
            to_arrow(lsn),
            to_arrow(seq),
            to_arrow(transactions.xid[numbers]),
            names,
            to_arrow(np.full(count, part.op, np.int8)),
            to_arrow(np.full(count, group.number, np.int32)),
            to_arrow(partitions),
            part.keys.to_arrow(),
            part.rows.to_arrow(),
            pa.nulls(count, pa.int64()),
        ],
        schema=SEGMENT_SCHEMA,
    )
