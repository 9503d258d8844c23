"""Check a batch of messages before its fields are used: each message's format, and the nesting of transactions.

Only the tuples of row messages are checked later, when they are read. Checks work on whole columns, except for rare
kinds of messages: relation and type messages, and TRUNCATEs. Source: PostgreSQL manual, "Logical Replication Message
Formats"; flags that it calls unused must be zero.

A slot yields each transaction in one piece, in the order of the records that ended the transactions. Between
transactions there may be other messages. Relation and type messages may be anywhere, because they don't change rows.
"""

from __future__ import annotations

import numpy as np

from cutline.columns.bytes_column import Ints, gather
from cutline.wal.decoding import pgoutput
from cutline.wal.decoding.pgoutput import DecodingError, Fields, Messages, name_texts, refuse
from cutline.wal.decoding.transactions import OpenTransactionHead

# The length of each kind that has a fixed length, and of the fixed part of each kind that ends with a name.
LENGTHS = {pgoutput.BEGIN: 21, pgoutput.COMMIT_LOCAL: 26}
LENGTHS_UNNAMED = {
    pgoutput.BEGIN_PREPARE: 29,
    pgoutput.PREPARED: 30,
    pgoutput.COMMIT_OF_PREPARED: 30,
    pgoutput.ROLLBACK_OF_PREPARED: 38,
    pgoutput.ORIGIN: 9,
}
# Kind, oid, tuple letter and number of columns.
ROW_BYTES_MIN = 8
MESSAGE_BYTES_MIN = 15
# The offsets of WAL positions; below, the kinds with flags that must be zero.
POSITIONS = {
    pgoutput.BEGIN: (1,),
    pgoutput.COMMIT_LOCAL: (2, 10),
    pgoutput.BEGIN_PREPARE: (1, 9),
    pgoutput.PREPARED: (2, 10),
    pgoutput.COMMIT_OF_PREPARED: (2, 10),
    pgoutput.ROLLBACK_OF_PREPARED: (2, 10),
    pgoutput.MESSAGE: (2,),
}
UNUSED_FLAGS = (
    pgoutput.COMMIT_LOCAL,
    pgoutput.PREPARED,
    pgoutput.COMMIT_OF_PREPARED,
    pgoutput.ROLLBACK_OF_PREPARED,
)
# The ends of prefixes up to this length are found in all messages at once; the ends of longer prefixes are found
# message by message.
PREFIX_BYTES_BY_COLUMN = 32


def check_forms(messages: Messages) -> None:
    """Raise DecodingError unless every message has the length and field values that its kind allows."""
    lengths = messages.ends - messages.starts
    of_kind = {int(kind): np.flatnonzero(messages.kinds == kind) for kind in np.unique(messages.kinds)}
    for kind, numbers in of_kind.items():
        letter = chr(kind)
        if kind in LENGTHS:
            refuse(numbers, lengths[numbers] != LENGTHS[kind], f"a message {letter!r} has an invalid length")
        elif kind in LENGTHS_UNNAMED:
            _check_name(messages, numbers, LENGTHS_UNNAMED[kind])
        elif kind in (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED):
            refuse(numbers, lengths[numbers] < ROW_BYTES_MIN, "a row message is too short")
        elif kind == pgoutput.MESSAGE:
            _check_messages(messages, numbers)
        if kind in UNUSED_FLAGS:
            flags = messages.u8(messages.starts[numbers] + 1)
            refuse(numbers, flags != 0, f"a message {letter!r} has unknown flags")
        _check_positions(messages, kind, numbers)
    for number in of_kind.get(pgoutput.TYPE, ()):
        fields = Fields(messages.bytes_at(int(number)), int(number))
        fields.content(4)
        names = [fields.name(), fields.name()]
        if messages.convert is None:
            name_texts(names, int(number))
        fields.end()
    for number in of_kind.get(pgoutput.TRUNCATED, ()):
        truncated_tables(messages, int(number))


def truncated_tables(messages: Messages, number: int) -> list[int]:
    """Read the oids of the tables in this TRUNCATE message."""
    fields = Fields(messages.bytes_at(number), number)
    count, options = fields.number(4), fields.number(1)
    if options > 3:
        raise DecodingError(f"a TRUNCATE message has unknown options {options}", number=number)
    if 4 * count != len(fields.message) - fields.offset:
        raise DecodingError("a TRUNCATE message has the wrong number of tables", number=number)
    return [fields.number(4) for _ in range(count)]


def _check_positions(messages: Messages, kind: int, numbers: Ints) -> None:
    positions = [messages.u64(messages.starts[numbers] + skip) for skip in POSITIONS.get(kind, ())]
    for position in positions:
        refuse(numbers, position < 0, "a message has an invalid WAL position")
    if len(positions) == 2:
        refuse(numbers, positions[0] > positions[1], "a transaction ends before it begins")


def _check_name(messages: Messages, numbers: Ints, skip: int) -> None:
    """Check that after `skip` bytes there is a zero-terminated name and nothing else."""
    what = "a message does not end with a complete name"
    starts, ends = messages.starts[numbers] + skip, messages.ends[numbers]
    refuse(numbers, starts >= ends, what)
    refuse(numbers, messages.u8(ends - 1) != 0, what)
    names = gather(messages.source, starts, ends - starts)
    if int(np.count_nonzero(names.data == 0)) != len(numbers):
        zeros = np.add.reduceat(names.data == 0, names.offsets[:-1], dtype=np.int64)
        refuse(numbers, zeros != 1, what)


def _check_messages(messages: Messages, numbers: Ints) -> None:
    """Check the flags, prefix and content length of logical messages."""
    starts, ends = messages.starts[numbers], messages.ends[numbers]
    refuse(numbers, ends - starts < MESSAGE_BYTES_MIN, "a logical message is too short")
    refuse(numbers, messages.u8(starts + 1) > 1, "a logical message has unknown flags")
    zeros = np.full(len(numbers), -1, np.int64)
    rows = np.arange(len(numbers))
    for offset in range(10, 10 + PREFIX_BYTES_BY_COLUMN):
        rows = rows[starts[rows] + offset < ends[rows]]
        is_zero = messages.u8(starts[rows] + offset) == 0
        zeros[rows[is_zero]] = offset
        rows = rows[~is_zero]
        if len(rows) == 0:
            break
    for row in rows:
        zeros[row] = messages.bytes_at(int(numbers[row])).find(b"\0", 10)
    contents = starts + zeros + 5
    refuse(numbers, (zeros < 0) | (contents > ends), "a logical message ends within its prefix")
    lengths = messages.u32(contents - 4)
    refuse(numbers, contents + lengths != ends, "a logical message has the wrong content length")


BEGINS = (pgoutput.BEGIN, pgoutput.BEGIN_PREPARE)
ENDS = (pgoutput.COMMIT_LOCAL, pgoutput.PREPARED)
WITHIN = (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED, pgoutput.TRUNCATED, pgoutput.ORIGIN)
BETWEEN = (pgoutput.COMMIT_OF_PREPARED, pgoutput.ROLLBACK_OF_PREPARED)
# The kinds that begin with kind and flags, have the end of their record at the same offset, and are ordered by it.
# PREPARE is not ordered: a PREPARE from before the slot was created is sent with its COMMIT PREPARED.
ORDERED = (pgoutput.COMMIT_LOCAL, *BETWEEN)
POSITION_BYTES = 8


def check_nesting(messages: Messages, before: OpenTransactionHead | None) -> None:
    """Raise DecodingError unless transactions are complete and not nested.

    `before` is the transaction that the previous batch left open.
    """
    kinds, everything = messages.kinds, np.arange(len(messages))
    begins, ends = np.isin(kinds, BEGINS), np.isin(kinds, ENDS)
    # How many transactions are open after each message: 0 or 1, up to the first invalid message.
    open_after = np.cumsum(begins.astype(np.int64) - ends) + (before is not None)
    refuse(everything, open_after > 1, "a transaction begins inside another transaction")
    refuse(everything, open_after < 0, "a transaction ends without a BEGIN")
    is_within = np.isin(kinds, WITHIN)
    loose = np.flatnonzero(kinds == pgoutput.MESSAGE)
    is_within[loose] = messages.u8(messages.starts[loose] + 1) == 1
    refuse(everything, is_within & (open_after == 0), "a change is outside any transaction")
    refuse(
        everything,
        np.isin(kinds, BETWEEN) & (open_after == 1),
        "COMMIT PREPARED or ROLLBACK PREPARED inside another transaction",
    )
    _check_ends(messages, np.flatnonzero(begins), np.flatnonzero(ends), before)


def check_order(messages: Messages, after: int) -> int:
    """Raise DecodingError unless records are ordered by their ends, starting at `after`; return the last end."""
    loose = np.flatnonzero(messages.kinds == pgoutput.MESSAGE)
    loose = loose[messages.u8(messages.starts[loose] + 1) == 0]
    ended = np.flatnonzero(np.isin(messages.kinds, ORDERED))
    numbers = np.concatenate([ended, loose])
    positions = np.concatenate([messages.u64(messages.starts[ended] + 10), messages.u64(messages.starts[loose] + 2)])
    order = np.argsort(numbers)
    numbers, positions = numbers[order], positions[order]
    before = np.concatenate([[after], positions[:-1]])
    refuse(numbers, positions < before, "a record ends before the record that was decoded before it")
    return int(positions[-1]) if len(positions) else after


def _check_ends(messages: Messages, begins: Ints, ends: Ints, before: OpenTransactionHead | None) -> None:
    what = "the end message of a transaction does not match its BEGIN"
    if before is not None:
        first, ends = ends[:1], ends[1:]
        kind = pgoutput.COMMIT_LOCAL if before.global_id is None else pgoutput.PREPARED
        refuse(first, messages.kinds[first] != kind, what)
        head = before.head if kind == pgoutput.PREPARED else before.head[:POSITION_BYTES]
        refuse(first, np.array([messages.bytes_at(int(one))[2:][: len(head)] != head for one in first], np.bool_), what)
    begins = begins[: len(ends)]
    is_prepared = messages.kinds[begins] == pgoutput.BEGIN_PREPARE
    refuse(ends, is_prepared != (messages.kinds[ends] == pgoutput.PREPARED), what)
    low, high = messages.starts[begins] + 1, messages.starts[ends] + 2
    refuse(ends, messages.u64(low) != messages.u64(high), what)
    # PREPARE repeats the fields of BEGIN PREPARE: both positions, time, xid and gid.
    low, high = low[is_prepared], high[is_prepared]
    began = gather(messages.source, low, messages.ends[begins[is_prepared]] - low)
    ended = gather(messages.source, high, messages.ends[ends[is_prepared]] - high)
    refuse(ends[is_prepared], ~began.equals(ended), what)
