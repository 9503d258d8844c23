"""From pgoutput's messages to row changes and transaction events, by whole columns.

A Decoder is fed a node's messages in order and remembers only the transaction that a batch left open. What
is not a change of a group's rows or an event of a transaction is dropped, and counted. It never guesses: a
table that is as no version of it says is a SchemaMovedError.

Of a prepared transaction that was rolled back by the time it is decoded, PostgreSQL may leave out any of the
changes; of one that changed nothing, everything. Nothing may rely on either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa

from columns.arrow_numbers import to_arrow, to_numpy
from columns.bytes_column import BytesColumn, Ints
from fleet.lsn import ORIGIN, Lsn
from fleet.nodes.encodings import Texts
from fleet.tables.groups import Group
from wal.decoding import pgoutput
from wal.decoding.changes import ChangeColumns, changes_of_relation
from wal.decoding.events import events_of
from wal.decoding.known_definitions import EVERYWHERE, Described, KnownDefinitions, SchemaMovedError
from wal.decoding.message_forms import check_forms, truncated_tables
from wal.decoding.nesting import BEGINS, ENDS, check_nesting, check_order
from wal.decoding.pgoutput import DecodingError, Messages, messages_of, read_relation
from wal.decoding.transactions import ROW_KINDS, OpenTransactionHead, Transactions
from wal.segments.definitions import Definition
from wal.segments.segment_schema import EVERY_PARTITION, SEGMENT_SCHEMA, TRUNCATE


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch of messages holds. `through` is where its last transaction or event ends, 0: none."""

    changes: pa.Table
    events: pa.Table
    through: Lsn
    open: OpenTransactionHead | None
    ignored: int


@dataclass(slots=True)
class Decoder:
    """Decodes the messages of `node`, whose tables have had the definitions `versions`.

    `convert` makes text of names, gids and tags where the server's encoding is not UTF-8.
    """

    node: str
    versions: tuple[Definition, ...]
    global_id_form: str
    described: dict[int, Described] = field(default_factory=dict)
    open: OpenTransactionHead | None = None
    read: int = 0
    read_bytes: int = 0
    ended: Lsn = ORIGIN
    convert: Texts | None = None
    _versions: KnownDefinitions = field(init=False)

    def __post_init__(self) -> None:
        self._versions = KnownDefinitions(self.versions)

    def feed(self, column: BytesColumn) -> Decoded:
        """Decode the next messages. Raises SchemaMovedError, DecodingError."""
        return self.decode(self.view(column))

    def view(self, column: BytesColumn) -> Messages:
        """The next messages as `decode` takes them, their bytes copied. Raises DecodingError."""
        try:
            return messages_of(column, self.convert)
        except DecodingError as error:
            raise self._placed(error, column) from error

    def decode(self, messages: Messages) -> Decoded:
        """Decode the next messages. Raises SchemaMovedError, DecodingError."""
        if len(messages) == 0:
            nothing = pa.Table.from_batches([], SEGMENT_SCHEMA)
            return Decoded(nothing, nothing, ORIGIN, self.open, 0)
        try:
            check_forms(messages)
            check_nesting(messages, self.open)
            self.ended = Lsn(check_order(messages, self.ended))
            transactions = Transactions.of(messages, self.open, self.global_id_form)
            changes, ignored = self._changes(messages, transactions)
            events, through = self._events(messages, transactions)
        except DecodingError as error:
            raise self._placed(error, messages.column) from error
        self.open = transactions.left_open
        self.read += len(messages)
        self.read_bytes += messages.data_bytes
        return Decoded(changes, events, through, self.open, ignored)

    def _placed(self, error: DecodingError, column: BytesColumn) -> DecodingError:
        """The same error, saying where: the message among all read, and the transaction that it is in."""
        number = error.number or 0
        found = [column.data[low:high] for low, high in pairwise(column.offsets[: number + 2].tolist())]
        lsn = self.open.lsn if self.open else ORIGIN
        for one in found[:-1]:
            if len(one) >= 9 and one[0] in BEGINS:
                lsn = Lsn.from_bytes(one[1:9].tobytes(), "big")
            elif len(one) and one[0] in ENDS:
                lsn = ORIGIN
        where = f" in the transaction at {lsn}" if lsn else ""
        return DecodingError(
            f"node {self.node}: message {self.read + number + 1} that its slot gave, of {len(found[-1])} bytes{where}:"
            f" {error.message}",
            hint=error.hint or "repeat the command: it reads the same WAL again; if it ends here again, report this",
            details={"node": self.node, "message": self.read + number + 1, "lsn": str(lsn)},
        )

    def _changes(self, messages: Messages, transactions: Transactions) -> tuple[pa.Table, int]:
        """The changes of tables of ours, and how many others there are."""
        tables: list[pa.Table] = []
        ignored = 0
        moved: dict[int, Described] = {}
        for one, numbers in self._by_description(messages):
            if one.group is not None:
                tables += _change_tables(messages, numbers, one, transactions)
                continue
            ignored += len(numbers)
            lsns = transactions.lsn[transactions.of_message[numbers]]
            if one.dropped_before < EVERYWHERE and np.any(lsns >= one.dropped_before):
                moved[one.oid] = one
        if moved:
            raise SchemaMovedError(node=self.node, moved=moved.values())
        return pa.concat_tables(tables) if tables else pa.Table.from_batches([], SEGMENT_SCHEMA), ignored

    def _by_description(self, messages: Messages) -> Iterator[tuple[Described, Ints]]:
        """The changes of every table, by their messages' numbers, with the description that holds for them.

        A TRUNCATE's number comes once for each of its tables, apart from the rows.
        """
        # Bounded by the tables and by what is done to them: a peek describes each again only once it was altered.
        changed_at: dict[int, list[tuple[int, Described]]] = {}
        for number in np.flatnonzero(messages.kinds == pgoutput.RELATION):
            one = self._versions.described(read_relation(messages.bytes_at(int(number)), int(number), self.convert))
            changed_at.setdefault(one.oid, []).append((int(number), one))
        rows = np.flatnonzero(np.isin(messages.kinds, ROW_KINDS[:3]))
        oids = messages.u32(messages.starts[rows] + 1)
        order = np.argsort(oids, kind="stable")
        firsts = np.flatnonzero(np.diff(oids[order], prepend=-1))
        found = (
            list(zip(oids[order][firsts].tolist(), np.split(rows[order], firsts[1:]), strict=True)) if len(rows) else []
        )
        # Bounded by the TRUNCATE commands, each of which costs the server far more.
        for number in np.flatnonzero(messages.kinds == pgoutput.TRUNCATED):
            found += [(oid, np.array([number])) for oid in truncated_tables(messages, int(number))]
        for oid, numbers in found:
            yield from self._split(oid, numbers, changed_at.get(oid, []))
        for oid, descriptions in changed_at.items():
            self.described[oid] = descriptions[-1][1]

    def _split(
        self, oid: int, numbers: Ints, descriptions: list[tuple[int, Described]]
    ) -> Iterator[tuple[Described, Ints]]:
        bounds = np.searchsorted(numbers, [number for number, _ in descriptions])
        parts = np.split(numbers, bounds)
        for place, part in enumerate(parts):
            one = descriptions[place - 1][1] if place else self.described.get(oid)
            if len(part) == 0:
                continue
            if one is None:
                raise DecodingError(f"changes of table {oid} came before its description", number=int(part[0]))
            yield one, part

    def _events(self, messages: Messages, transactions: Transactions) -> tuple[pa.Table, Lsn]:
        events = events_of(messages, transactions, self.global_id_form)
        # What ends last has the highest position: PostgreSQL sends commits in the order of their records.
        # Others' messages count too, or a chunk of nothing else would seem to end where it begins.
        others = messages.u64(messages.starts[messages.kinds == pgoutput.MESSAGE] + 2)
        return events, Lsn(max(to_numpy(events["end_lsn"]).max(initial=0), others.max(initial=0)))


def _change_tables(messages: Messages, numbers: Ints, one: Described, transactions: Transactions) -> Iterator[pa.Table]:
    if one.group is None:
        return
    if messages.kinds[numbers[0]] == pgoutput.TRUNCATED:
        nothing = BytesColumn(np.empty(0, np.uint8), np.zeros(len(numbers) + 1, np.int64))
        part = ChangeColumns(numbers, np.zeros(len(numbers), np.int64), TRUNCATE, nothing, nothing)
        yield _change_table(part, one.group, transactions)
        return
    for part in changes_of_relation(messages, numbers, one.group):
        yield _change_table(part, one.group, transactions)


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
