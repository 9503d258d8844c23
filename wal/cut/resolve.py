"""Resolve a consistent cut: which transactions on each node belong to the state of the whole fleet.

Pure functions over positions, without connections, so the rule can be tested on millions of interleavings. A
node's cut position c is the end of a record: a transaction is before the cut if and only if its record begins before c.
Each event is visited a bounded number of times, no matter how often positions are raised. Source: docs/consistency.md;
Ignite IEP-89, "Consistent cut".
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.lsn import Lsn
from cutline.storage.errors import RefusedError
from cutline.wal.cut.cut_events import FleetEvents, NodeWindow, fleet_events
from cutline.wal.cut.cut_values import Cut, NodeCut, Undecided
from cutline.wal.cut.in_doubt import with_in_doubt
from cutline.wal.cut.safe_time import with_last_commits

__all__ = ["GlobalIdReusedError", "NodeWindow", "resolve"]


class GlobalIdReusedError(RefusedError):
    """Two transactions share a global id, and one of them was in progress when the cut began."""


class _History(Struct, frozen=True):
    """All prepares that were not rolled back, and all commits, ordered by global id, then node, then position.

    `row` is the row in `prepared`, or in `committed` if `is_commit`. The rows of global id g are first[g] to
    first[g + 1].
    """

    row: Ints
    is_commit: Flags
    node: Ints
    gid: Ints
    place: Ints
    first: Ints


def resolve(windows: Mapping[str, NodeWindow]) -> Cut:
    """Find the lowest positions at or after the start markers at which no global transaction is torn.

    Raises GlobalIdReusedError if a global id is ambiguous.
    """
    return resolve_events(windows, fleet_events(windows)) if windows else Cut((), 0, 0, 0)


def resolve_events(windows: Mapping[str, NodeWindow], events: FleetEvents) -> Cut:
    """Do the same for windows whose events are already converted to columns."""
    history = _history(events)
    _check_unique(events, history)
    position, is_global = _raise_positions(events, history)
    cut = with_in_doubt(windows, _describe(windows, events, history, position, is_global))
    return with_last_commits(windows, cut)


def _history(events: FleetEvents) -> _History:
    # A prepare that was rolled back does not count, because a retry may have reused its gid.
    live = np.flatnonzero(~events.undone)
    prepared, committed = events.prepared.where(live), events.committed
    row = np.concatenate([live, np.arange(len(committed))])
    is_commit = np.arange(len(row)) >= len(live)
    gid = np.concatenate([prepared.gid, committed.gid])
    place = np.concatenate([prepared.place, committed.place])
    # A one-phase commit has a row of each kind at the same place. The stable sort keeps the prepare before the commit.
    order = np.lexsort((place, gid))
    first = np.zeros(len(events.names) + 1, np.int64)
    np.cumsum(np.bincount(gid, minlength=len(events.names)), out=first[1:])
    node = np.concatenate([prepared.node, committed.node])
    return _History(row[order], is_commit[order], node[order], gid[order], place[order], first)


def _check_unique(events: FleetEvents, history: _History) -> None:
    """Refuse a gid that is prepared again after a commit, unless all transactions that used it ended before the cut.

    Branches of one transaction (XA, Citus) also share a global id, but all of them are prepared before the first is
    committed.
    """
    gid, node, is_commit = history.gid, history.node, history.is_commit
    is_reused = is_commit[:-1] & ~is_commit[1:] & (gid[:-1] == gid[1:]) & (node[:-1] == node[1:])
    if not is_reused.any():
        return
    starts = (events.starts + events.offset)[node]
    # A gid is in progress if its last row on some node is a prepare, or if it has a row after the start marker.
    is_last = np.concatenate([(gid[:-1] != gid[1:]) | (node[:-1] != node[1:]), [True]])
    in_progress = (is_last & ~is_commit) | (history.place >= starts)
    ambiguous = np.intersect1d(gid[:-1][is_reused], gid[in_progress])
    if len(ambiguous):
        name = events.names[int(ambiguous[0])].as_py()
        raise GlobalIdReusedError(
            f"several transactions since the last cut have the global id {name!r}, and one of them is in progress",
            hint="give each distributed transaction a unique gid, or tell them apart with cut.global_id in fleet.toml",
            details={"global_id": name, "count": len(ambiguous)},
        )


def _raise_positions(events: FleetEvents, history: _History) -> tuple[Ints, Flags]:
    """Compute the least fixed point: each node's position, and the global ids committed before any of them.

    A round visits only the commits that the previous round reached, and the prepares of their global ids.
    """
    prepared, offset = events.prepared, events.offset
    order = np.argsort(events.committed.place, kind="stable")
    commit_place, commit_gid = events.committed.place[order], events.committed.gid[order]
    position = events.starts.copy()
    nodes = np.arange(len(position))
    begin = np.searchsorted(events.committed.node[order], nodes)
    reached = np.searchsorted(commit_place, position + offset)
    is_global = np.zeros(len(events.names), np.bool_)
    node_mark, gid_mark = np.zeros(len(position), np.int64), np.zeros(len(is_global), np.int64)
    while True:
        gids = commit_gid[_ranges(begin, reached[nodes])]
        gids = _distinct(gids[~is_global[gids]], gid_mark)
        if len(gids) == 0:
            return position, is_global
        is_global[gids] = True
        found = _ranges(history.first[gids], history.first[gids + 1])
        rows = history.row[found[~history.is_commit[found]]]
        touched = prepared.node[rows]
        before = position[touched]
        np.maximum.at(position, touched, prepared.end[rows])
        nodes = _distinct(touched[position[touched] > before], node_mark)
        begin = reached[nodes]
        reached[nodes] = np.searchsorted(commit_place, position[nodes] + offset[nodes])


def _ranges(begin: Ints, end: Ints) -> Ints:
    """Concatenate the numbers of all ranges."""
    lengths = end - begin
    ends = np.cumsum(lengths)
    numbers: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(end - ends, lengths)
    return numbers


def _distinct(values: Ints, mark: Ints) -> Ints:
    """Return the distinct values, in linear time; `mark` is a scratch array with one element per possible value."""
    count = np.arange(len(values))
    mark[values] = count
    distinct: Ints = values[mark[values] == count]
    return distinct


def _open(events: FleetEvents, history: _History, position: Ints) -> Flags:
    """Flag the global ids that are prepared before some node's position, but not committed before it."""
    gid, node = history.gid, history.node
    is_open = np.zeros(len(events.names), np.bool_)
    if len(gid) == 0:
        return is_open
    begins = np.flatnonzero(np.concatenate([[True], (gid[1:] != gid[:-1]) | (node[1:] != node[:-1])]))
    before = history.place < (position + events.offset)[node]
    is_prepared = np.logical_or.reduceat(before & ~history.is_commit, begins)
    is_committed = np.logical_or.reduceat(before & history.is_commit, begins)
    is_open[gid[begins[is_prepared & ~is_committed]]] = True
    return is_open


def _by_node(events: FleetEvents, rows: Ints, size: int) -> list[int]:
    """Return the index of each node's first row in `rows`, which are ordered by node."""
    begins: list[int] = np.searchsorted(events.prepared.node[rows], np.arange(size + 1)).tolist()
    return begins


def _lsns(positions: Ints) -> list[Lsn]:
    return list(map(Lsn, positions.tolist()))


def _describe(
    windows: Mapping[str, NodeWindow], events: FleetEvents, history: _History, position: Ints, is_global: Flags
) -> Cut:
    prepared, size = events.prepared, len(windows)
    before = prepared.lsn < position[prepared.node]
    is_included = np.zeros(len(is_global), np.bool_)
    included = before & is_global[prepared.gid] & ~events.undone
    is_included[prepared.gid[included]] = True
    is_open = _open(events, history, position)
    left_out = np.flatnonzero(before & ~included)
    left_out = left_out[np.argsort(prepared.place[left_out])]
    undone = events.undone[left_out]
    undecided, rolled_back = left_out[~undone], left_out[undone]
    undecided_first, rolled_back_first = (_by_node(events, rows, size) for rows in (undecided, rolled_back))
    names = events.names.take(to_arrow(prepared.gid[undecided])).to_pylist()
    entries = list(map(Undecided, names, _lsns(prepared.lsn[undecided]), _lsns(prepared.end[undecided])))
    undone_lsn = _lsns(prepared.lsn[rolled_back])
    local = events.local_commits
    local_transactions = np.bincount(local.node[local.lsn < position[local.node]], minlength=size).tolist()
    positions = _lsns(position)
    nodes = tuple(
        NodeCut(
            node=node,
            start=window.start,
            finish=window.finish,
            position=positions[number],
            undecided=tuple(entries[undecided_first[number] : undecided_first[number + 1]]),
            rolled_back=tuple(undone_lsn[rolled_back_first[number] : rolled_back_first[number + 1]]),
            local_transactions=local_transactions[number],
            in_doubt=(),
            marked_at=window.marked_at,
        )
        for number, (node, window) in enumerate(windows.items())
    )
    return Cut(
        nodes=nodes,
        global_transactions=int(np.count_nonzero(is_included)),
        included_early=int(np.count_nonzero(is_open & is_included)),
        in_flight=int(np.count_nonzero(is_open)),
    )
