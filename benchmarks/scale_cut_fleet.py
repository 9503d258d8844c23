"""Windows of fleets of any size, for resolving cuts: a million global transactions in flight, or long chains."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_arrow
from cutline.columns.bytes_column import Ints
from cutline.fleet.lsn import Lsn
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.segments.segments import COMMIT_PREPARED, PREPARE, SEGMENT_SCHEMA

START, FINISH = 1 << 40, 1 << 41
RECORD_BYTES = 64


def in_flight_windows(nodes: int, transactions: int) -> dict[str, NodeWindow]:
    """Every global transaction is prepared on two nodes (or one, if there is no other), half of them committed on one.

    Every tenth of the committed ones is prepared after the other node's start marker, and raises that node's position.
    """
    number = np.arange(transactions)
    one = number % nodes
    other = (one + 1 + number // nodes % max(nodes - 1, 1)) % nodes
    is_late = number % 20 == 0
    begin = START - (transactions - number) * 4 * RECORD_BYTES
    prepared = [(one, begin, number)]
    if nodes > 1:
        prepared.append((other, np.where(is_late, START + number * RECORD_BYTES, begin + RECORD_BYTES), number))
    committed = number[number % 2 == 0]
    return windows(nodes, prepared, (one[committed], begin[committed] + 2 * RECORD_BYTES, committed))


def chain_windows(nodes: int, links: int) -> dict[str, NodeWindow]:
    """Every raised position includes one more commit, whose transaction raises the next node: one round per link."""
    number = np.arange(links)
    prepared = ((number + 1) % nodes, START + (2 * number + 1) * RECORD_BYTES, number)
    committed_at = np.where(number == 0, START - RECORD_BYTES, START + (2 * number - 2) * RECORD_BYTES)
    return windows(nodes, [prepared], (number % nodes, committed_at, number))


def windows(
    nodes: int, prepared: list[tuple[Ints, Ints, Ints]], committed: tuple[Ints, Ints, Ints]
) -> dict[str, NodeWindow]:
    """The windows of nodes with these events, each of them (node, lsn, number of the global id)."""
    node, lsn, number = (np.concatenate(columns) for columns in zip(*prepared, committed, strict=True))
    size = sum(len(columns[0]) for columns in prepared)
    op = np.where(np.arange(len(node)) < size, PREPARE, COMMIT_PREPARED).astype(np.int8)
    order = np.lexsort((lsn, node))
    zeros = np.zeros(len(node), np.int64)
    nothing = pa.array([b""], pa.binary()).take(to_arrow(zeros))
    # Global ids as long as an application's: some thirty characters.
    names = pa.array([f"payment-7f3a2c91-{one:012}" for one in range(int(number.max()) + 1)])
    columns = {
        "lsn": to_arrow(lsn[order]),
        "end_lsn": to_arrow(lsn[order] + RECORD_BYTES),
        "seq": to_arrow(zeros),
        "xid": to_arrow(zeros),
        "global_id": names.take(to_arrow(number[order])),
        "op": to_arrow(op[order]),
        "group": to_arrow(zeros.astype(np.int32)),
        "partition": to_arrow(zeros.astype(np.int32)),
        "key": nothing,
        "row": nothing,
    }
    table = pa.table(columns, schema=SEGMENT_SCHEMA)
    first = np.searchsorted(node[order], np.arange(nodes + 1)).tolist()
    return {
        f"node-{place}": NodeWindow(
            Lsn(0), Lsn(START), Lsn(FINISH), table.slice(first[place], first[place + 1] - first[place])
        )
        for place in range(nodes)
    }
