"""The consistent cut: which transactions of which node belong to a state of the whole fleet.

Pure functions over positions: nothing here opens a connection, so the rule can be tested on millions of
interleavings. A cut position c of a node is the end of a record: a transaction is before the cut exactly when
its record begins before c. Source: docs/consistency.md; Ignite IEP-89, "Consistent cut".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.errors import RefusedError
from wal.arrow_numbers import to_mask, to_numpy
from wal.bytes_column import from_list
from wal.cut_values import Cut, NodeCut, Undecided
from wal.segment_schema import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED

Ints = npt.NDArray[np.int64]


class GlobalIdReusedError(RefusedError):
    """A global id names two transactions, one of which was under way when the cut began."""


@dataclass(frozen=True, slots=True)
class NodeWindow:
    """One node's part of a cut to be resolved.

    `previous` is its position at the cut before (the base position for the first), `start` and `finish` are
    its markers, `events` its transaction events up to `finish` (SEGMENT_SCHEMA), `undecided` what the cut
    before left out.
    """

    previous: int
    start: int
    finish: int
    events: pa.Table
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class _Events:
    """A node's events by number of global id; `undone` are the prepared ones that were rolled back here."""

    prepared: Ints
    prepared_lsn: Ints
    prepared_end: Ints
    undone: npt.NDArray[np.bool_]
    committed: Ints
    committed_lsn: Ints
    local_commits_lsn: Ints


def resolve(windows: Mapping[str, NodeWindow]) -> Cut:
    """Find the least positions, from the start markers on, at which no global transaction is torn.

    Raises GlobalIdReusedError where a global id does not tell which transaction is meant.
    """
    events, names = _numbered(windows)
    _check_unique(windows, events, names)
    position = {node: window.start for node, window in windows.items()}
    is_global = np.zeros(len(names), np.bool_)
    while True:
        before = dict(position)
        for node, found in events.items():
            is_global[found.committed[found.committed_lsn < position[node]]] = True
        for node, found in events.items():
            # What was rolled back here is no part of the transaction: its gid was used again to retry it.
            ends = found.prepared_end[is_global[found.prepared] & ~found.undone]
            if len(ends):
                position[node] = max(position[node], int(ends.max()))
        if position == before:
            break
    return _described(windows, events, position, is_global, names)


def _numbered(windows: Mapping[str, NodeWindow]) -> tuple[dict[str, _Events], pa.Array[Any]]:
    names: list[pa.Array[Any]] = []
    parts: dict[str, tuple[pa.Table, pa.Table]] = {}
    for node, window in windows.items():
        parts[node] = _of(window, PREPARE), _of(window, COMMIT_PREPARED)
        names.append(from_list([entry.global_id.encode() for entry in window.undecided]).to_arrow().cast(pa.string()))
        names += [chunk for part in parts[node] for chunk in part["global_id"].chunks]
    codes = pa.chunked_array(names, pa.string()).combine_chunks().dictionary_encode()
    numbers = to_numpy(codes.indices).astype(np.int64)
    found: dict[str, _Events] = {}
    place = 0
    for node, window in windows.items():
        prepared, committed = parts[node]
        middle = place + len(window.undecided) + len(prepared)
        end = middle + len(committed)
        carried = window.undecided
        ends = np.concatenate([np.array([e.end_lsn for e in carried], np.int64), _ints(prepared, "end_lsn")])
        found[node] = _Events(
            prepared=numbers[place:middle],
            prepared_lsn=np.concatenate([np.array([e.lsn for e in carried], np.int64), _ints(prepared, "lsn")]),
            prepared_end=ends,
            undone=np.isin(ends, _ints(_of(window, ROLLBACK_PREPARED), "lsn")),
            committed=numbers[middle:end],
            committed_lsn=_ints(committed, "lsn"),
            local_commits_lsn=_ints(_of(window, COMMIT), "lsn"),
        )
        place = end
    return found, codes.dictionary


def _check_unique(windows: Mapping[str, NodeWindow], events: Mapping[str, _Events], names: pa.Array[Any]) -> None:
    """Refuse a gid that is prepared anew after a commit, unless all its uses were over before the cut.

    Branches of one transaction (XA, Citus) share a global id too, but all of them are prepared before the
    first is committed.
    """
    is_reused, is_under_way = np.zeros((2, len(names)), np.bool_)
    for node, found in events.items():
        last_prepared = np.full(len(names), -1, np.int64)
        first_committed = np.full(len(names), np.iinfo(np.int64).max, np.int64)
        last_committed = np.full(len(names), -1, np.int64)
        np.maximum.at(last_prepared, found.prepared[~found.undone], found.prepared_lsn[~found.undone])
        np.minimum.at(first_committed, found.committed, found.committed_lsn)
        before = found.committed_lsn < windows[node].start
        np.maximum.at(last_committed, found.committed[before], found.committed_lsn[before])
        is_reused |= first_committed < last_prepared
        is_under_way |= last_committed < last_prepared
        is_under_way[found.committed[~before]] = True
    unclear = np.flatnonzero(is_reused & is_under_way)
    if len(unclear):
        gid = names[int(unclear[0])].as_py()
        raise GlobalIdReusedError(
            f"global id {gid!r} names several transactions since the last cut, and one was under way",
            hint="give every distributed transaction a gid of its own, or tell them apart by [cut] global_id",
            details={"global_id": gid, "count": len(unclear)},
        )


def _of(window: NodeWindow, op: int) -> pa.Table:
    """The window's events of one kind; a segment may begin before the window does."""
    events = window.events
    # A rollback is known by its own end; its lsn is the end of the PREPARE that it undid.
    place = to_numpy(events["end_lsn"]) - 1 if op == ROLLBACK_PREPARED else to_numpy(events["lsn"])
    return events.filter(to_mask((to_numpy(events["op"]) == op) & (place >= window.previous)))


def _ints(table: pa.Table, column: str) -> Ints:
    return to_numpy(table[column])


def _described(
    windows: Mapping[str, NodeWindow],
    events: Mapping[str, _Events],
    position: Mapping[str, int],
    is_global: npt.NDArray[np.bool_],
    names: pa.Array[Any],
) -> Cut:
    nodes: dict[str, NodeCut] = {}
    is_open, is_included = np.zeros((2, len(is_global)), np.bool_)
    for node, window in windows.items():
        found = events[node]
        before = found.prepared_lsn < position[node]
        included = before & is_global[found.prepared] & ~found.undone
        left_out = before & ~included
        at_cut = found.committed[found.committed_lsn < position[node]]
        is_open[np.setdiff1d(found.prepared[before & ~found.undone], at_cut)] = True
        is_included[found.prepared[included]] = True
        nodes[node] = NodeCut(
            start=window.start,
            finish=window.finish,
            position=position[node],
            undecided=tuple(
                Undecided(
                    names[int(found.prepared[row])].as_py(),
                    int(found.prepared_lsn[row]),
                    int(found.prepared_end[row]),
                )
                for row in np.flatnonzero(left_out & ~found.undone)
            ),
            rolled_back=tuple(int(lsn) for lsn in found.prepared_lsn[left_out & found.undone]),
            local_transactions=int(np.count_nonzero(found.local_commits_lsn < position[node])),
        )
    return Cut(
        nodes=nodes,
        global_transactions=int(np.count_nonzero(is_included)),
        included_early=int(np.count_nonzero(is_open & is_included)),
        in_flight=int(np.count_nonzero(is_open)),
    )
