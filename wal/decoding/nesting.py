"""Check that the messages of a batch form transactions, one after the other, whose ends match their beginnings.

A slot yields each transaction in one piece, in the order of the records that ended them. Between them are messages
outside of any transaction. Relation and type messages may be anywhere: they change nothing by themselves.
"""

from __future__ import annotations

import numpy as np

from cutline.columns.bytes_column import Ints, gather
from cutline.wal.decoding import pgoutput
from cutline.wal.decoding.pgoutput import Messages, refuse
from cutline.wal.decoding.transactions import OpenTransactionHead

BEGINS = (pgoutput.BEGIN, pgoutput.BEGIN_PREPARE)
ENDS = (pgoutput.COMMIT_LOCAL, pgoutput.PREPARED)
WITHIN = (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED, pgoutput.TRUNCATED, pgoutput.ORIGIN)
BETWEEN = (pgoutput.COMMIT_OF_PREPARED, pgoutput.ROLLBACK_OF_PREPARED)
# Messages that begin with kind and flags and have the end of their record at the same offset, and that come in the
# order of these ends. A PREPARE may not: one from before the slot was created comes with its COMMIT PREPARED.
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
    refuse(everything, open_after > 1, "a transaction begins within another one")
    refuse(everything, open_after < 0, "a transaction ends without a BEGIN")
    is_within = np.isin(kinds, WITHIN)
    loose = np.flatnonzero(kinds == pgoutput.MESSAGE)
    is_within[loose] = messages.u8(messages.starts[loose] + 1) == 1
    refuse(everything, is_within & (open_after == 0), "a change is outside of any transaction")
    refuse(
        everything,
        np.isin(kinds, BETWEEN) & (open_after == 1),
        "COMMIT PREPARED or ROLLBACK PREPARED inside another transaction",
    )
    _check_ends(messages, np.flatnonzero(begins), np.flatnonzero(ends), before)


def check_order(messages: Messages, after: int) -> int:
    """Raise DecodingError unless records come in the order of their ends, from `after` on; return the last end."""
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
