"""To which transaction every message of a batch belongs, and which one the batch leaves open.

A slot yields a transaction's messages in one piece, between its BEGIN and its COMMIT or PREPARE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from wal import pgoutput
from wal.arrow_numbers import to_arrow
from wal.bytes_column import Ints, from_list
from wal.global_ids import global_ids
from wal.pgoutput import Messages

ROW_KINDS = (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED, pgoutput.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Open:
    """The transaction that the messages so far have begun and not ended; `sent` counts its rows so far."""

    lsn: int
    xid: int
    global_id: str | None
    sent: int


@dataclass(frozen=True, slots=True)
class Transactions:
    """To which transaction every message of a batch belongs; number 0 is the one left open before."""

    of_message: Ints
    ordinal: Ints
    lsn: Ints
    xid: Ints
    global_id: pa.Array[Any]
    left_open: Open | None

    @classmethod
    def of(cls, messages: Messages, before: Open | None, form: str) -> Transactions:
        """The transactions of a batch that follows one which left `before` open."""
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
        known = pa.concat_arrays([_one_text(before.global_id if before else None), global_ids(names, form)])
        if before:
            lsn[0], xid[0], index[0] = before.lsn, before.xid, 0
        of_message = np.cumsum((kinds == pgoutput.BEGIN) | (kinds == pgoutput.BEGIN_PREPARE))
        # Only rows are counted: descriptions of tables are sent anew whenever the WAL is read again.
        is_row = np.isin(kinds, ROW_KINDS)
        rows = np.cumsum(is_row)
        first = np.concatenate([[-(before.sent if before else 0)], rows[begins]])
        ordinal = rows - is_row - first[of_message]
        identities = known.take(to_arrow(index, absent=index < 0))
        sent = int(rows[-1] - first[of_message[-1]])
        left = None
        if _is_left_open(kinds, of_message, was_open=before is not None):
            last = int(of_message[-1])
            left = Open(int(lsn[last]), int(xid[last]), identities[last].as_py(), sent)
        return cls(of_message, ordinal, lsn, xid, identities, left)


def _one_text(text: str | None) -> pa.Array[Any]:
    if text is None:
        return pa.nulls(1, pa.string())
    return from_list([text.encode()]).to_arrow().cast(pa.string())


def _is_left_open(kinds: Any, of_message: Ints, *, was_open: bool) -> bool:
    """Whether the last message belongs to a transaction whose end has not come."""
    last = int(of_message[-1])
    ends = np.flatnonzero((kinds == pgoutput.COMMIT_LOCAL) | (kinds == pgoutput.PREPARED))
    ended = len(ends) > 0 and int(of_message[ends[-1]]) == last
    return (last > 0 or was_open) and not ended
