"""That the messages of a batch are transactions, one after the other, and that each ends as it began.

A slot yields every transaction in one piece, in the order of the records that ended them; in between comes what belongs
to none. Descriptions of tables and types may stand anywhere: they change nothing by themselves.
"""

from __future__ import annotations

import numpy as np

from columns.bytes_column import Ints, gather
from wal.decoding import pgoutput
from wal.decoding.pgoutput import Messages, refuse
from wal.decoding.transactions import OpenTransactionHead

BEGINS = (pgoutput.BEGIN, pgoutput.BEGIN_PREPARE)
ENDS = (pgoutput.COMMIT_LOCAL, pgoutput.PREPARED)
WITHIN = (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED, pgoutput.TRUNCATED, pgoutput.ORIGIN)
BETWEEN = (pgoutput.COMMIT_OF_PREPARED, pgoutput.ROLLBACK_OF_PREPARED)
# What begins with its kind and flags, and has the end of its record at the same place. A PREPARE is not among them:
# one from before the slot was made comes with its COMMIT PREPARED.
ORDERED = (pgoutput.COMMIT_LOCAL, *BETWEEN)
POSITION_BYTES = 8


def check_nesting(messages: Messages, before: OpenTransactionHead | None) -> None:
    """Raise DecodingError unless transactions are whole and none is within another.

    `before` is what the batch before has left open.
    """
    kinds, everything = messages.kinds, np.arange(len(messages))
    begins, ends = np.isin(kinds, BEGINS), np.isin(kinds, ENDS)
    # How many are open after each message. Up to the first that is wrong this is 0 or 1.
    open_after = np.cumsum(begins.astype(np.int64) - ends) + (before is not None)
    refuse(everything, open_after > 1, "a decoded transaction begins within another")
    refuse(everything, open_after < 0, "a decoded transaction ends that has not begun")
    is_within = np.isin(kinds, WITHIN)
    loose = np.flatnonzero(kinds == pgoutput.MESSAGE)
    is_within[loose] = messages.u8(messages.starts[loose] + 1) == 1
    refuse(everything, is_within & (open_after == 0), "a decoded change is in no transaction")
    refuse(
        everything, np.isin(kinds, BETWEEN) & (open_after == 1), "what is decoded of a prepared one is in a transaction"
    )
    _check_ends(messages, np.flatnonzero(begins), np.flatnonzero(ends), before)


def check_order(messages: Messages, after: int) -> int:
    """Raise DecodingError unless what ends comes in the order of its ends, from `after` on; return the last."""
    loose = np.flatnonzero(messages.kinds == pgoutput.MESSAGE)
    loose = loose[messages.u8(messages.starts[loose] + 1) == 0]
    ended = np.flatnonzero(np.isin(messages.kinds, ORDERED))
    numbers = np.concatenate([ended, loose])
    places = np.concatenate([messages.u64(messages.starts[ended] + 10), messages.u64(messages.starts[loose] + 2)])
    order = np.argsort(numbers)
    numbers, places = numbers[order], places[order]
    before = np.concatenate([[after], places[:-1]])
    refuse(numbers, places < before, "what is decoded ends before what came before it")
    return int(places[-1]) if len(places) else after


def _check_ends(messages: Messages, begins: Ints, ends: Ints, before: OpenTransactionHead | None) -> None:
    what = "a decoded transaction ends as another than began"
    if before is not None:
        first, ends = ends[:1], ends[1:]
        kind = pgoutput.COMMIT_LOCAL if before.global_id is None else pgoutput.PREPARED
        refuse(first, messages.kinds[first] != kind, what)
        told = before.head if kind == pgoutput.PREPARED else before.head[:POSITION_BYTES]
        refuse(first, np.array([messages.bytes_at(int(one))[2:][: len(told)] != told for one in first], np.bool_), what)
    begins = begins[: len(ends)]
    is_prepared = messages.kinds[begins] == pgoutput.BEGIN_PREPARE
    refuse(ends, is_prepared != (messages.kinds[ends] == pgoutput.PREPARED), what)
    low, high = messages.starts[begins] + 1, messages.starts[ends] + 2
    refuse(ends, messages.u64(low) != messages.u64(high), what)
    # The PREPARE repeats its beginning: both positions, the time, the number, the name.
    low, high = low[is_prepared], high[is_prepared]
    began = gather(messages.source, low, messages.ends[begins[is_prepared]] - low)
    ended = gather(messages.source, high, messages.ends[ends[is_prepared]] - high)
    refuse(ends[is_prepared], ~began.equals(ended), what)
