"""Extract transaction events and markers from a batch of messages, as SEGMENT_SCHEMA rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_arrow, to_numpy
from cutline.columns.bytes_column import BytesColumn, Ints, from_list
from cutline.wal.cut.global_ids import global_ids
from cutline.wal.cut.markers import MARKER_PREFIX
from cutline.wal.decoding import pgoutput
from cutline.wal.decoding.pgoutput import Messages
from cutline.wal.decoding.transactions import Transactions
from cutline.wal.segments.segment_schema import (
    COMMIT,
    COMMIT_PREPARED,
    EVERY_PARTITION,
    MARKER,
    NO_GROUP,
    PREPARE,
    ROLLBACK_PREPARED,
    SEGMENT_SCHEMA,
)

NO_GID = from_list([b""]).to_arrow()[0]


def events_of(messages: Messages, transactions: Transactions, form: str) -> pa.Table:
    """The events of a batch, ordered by their end positions; `form` is the rule for global ids."""
    parts = [
        _commits(messages, transactions),
        _prepares(messages, transactions, form),
        _settlements(messages, pgoutput.COMMIT_OF_PREPARED, COMMIT_PREPARED, form),
        _settlements(messages, pgoutput.ROLLBACK_OF_PREPARED, ROLLBACK_PREPARED, form),
        *_markers(messages),
    ]
    events = pa.concat_tables(parts)
    return events.take(to_arrow(np.argsort(to_numpy(events["end_lsn"]), kind="stable")))


def _commits(messages: Messages, transactions: Transactions) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == pgoutput.COMMIT_LOCAL)
    at = messages.starts[numbers]
    of_commit = transactions.of_message[numbers]
    names = transactions.tag.take(to_arrow(of_commit))
    of_records = _Numbers(
        messages.u64(at + 2), messages.u64(at + 10), messages.u64(at + 18), transactions.xid[of_commit]
    )
    return _event_table(COMMIT, of_records, names)


def _prepares(messages: Messages, transactions: Transactions, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == pgoutput.PREPARED)
    at = messages.starts[numbers]
    gids = messages.names(numbers, 30)
    names = global_ids(gids, form)
    # The position of its changes: where the PREPARE record begins.
    lsn = transactions.lsn[transactions.of_message[numbers]]
    other_gids = pc.if_else(pc.equal(gids, names), NO_GID, gids.cast(pa.binary()))
    of_records = _Numbers(lsn, messages.u64(at + 10), messages.u64(at + 18), messages.u32(at + 26))
    return _event_table(PREPARE, of_records, names, other_gids)


def _settlements(messages: Messages, kind: int, op: int, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == kind)
    at = messages.starts[numbers]
    is_commit = kind == pgoutput.COMMIT_OF_PREPARED
    names = global_ids(messages.names(numbers, 30 if is_commit else 38), form)
    # The message of a rollback identifies the transaction by the end of its PREPARE, not by its beginning; it has the
    # time of its PREPARE before its own.
    ended_at = at + (18 if is_commit else 26)
    of_records = _Numbers(
        messages.u64(at + 2), messages.u64(at + 10), messages.u64(ended_at), messages.u32(ended_at + 8)
    )
    return _event_table(op, of_records, names)


def _markers(messages: Messages) -> list[pa.Table]:
    tables: list[pa.Table] = []
    # There are two markers per cut.
    for number, start in zip(*messages.find_prefix(MARKER_PREFIX), strict=True):
        end = messages.u64(messages.starts[[number]] + 2)
        content = from_list([messages.source[start : messages.ends[number]].tobytes()]).to_arrow()
        none = np.zeros(1, np.int64)
        tables.append(_event_table(MARKER, _Numbers(end, end, none, none), pa.nulls(1, pa.string()), content))
    return tables


class _Numbers(NamedTuple):
    """Of the records of events: where each begins and ends, when it was written, and of which transaction it is."""

    lsn: Ints
    end_lsn: Ints
    written_at: Ints
    xid: Ints


def _event_table(op: int, numbers: _Numbers, names: Any, rows: Any = None) -> pa.Table:
    count = len(numbers.lsn)
    empty = BytesColumn(np.empty(0, np.uint8), np.zeros(count + 1, np.int64)).to_arrow()
    return pa.table(
        [
            *map(to_arrow, numbers), names,
            to_arrow(np.full(count, op, np.int8)), to_arrow(np.full(count, NO_GROUP, np.int32)),
            to_arrow(np.full(count, EVERY_PARTITION, np.int32)),
            empty, empty if rows is None else rows,
        ],
        schema=SEGMENT_SCHEMA,
    )  # fmt: skip
