"""The transaction events of a whole fleet as flat columns, the input for resolving a cut.

Nodes and global ids are numbers here, so the rule needs no loop over nodes. The windows of all nodes are concatenated:
a *place* is a position in this sequence, and the places of one node are in the order of its WAL positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import UNSET, Struct, UnsetType

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Flags, Ints, texts_array
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.wal.cut.cut_values import InDoubt, Undecided
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED

NO_GLOBAL_ID = -1


class NodeWindow(Struct, frozen=True):
    """One node's input for resolving a cut.

    `previous` is the node's position at the previous cut (for the first cut, its base position); `start` and `finish`
    are the positions of its markers. `events` are its transaction events up to `finish` (SEGMENT_SCHEMA), `undecided`
    are the transactions that the previous cut left undecided, and `in_doubt` are the transactions in doubt at the
    previous cut. `last_commit_at` is the time of the last commit before the previous cut, and `marked_at` is the time
    of the start marker.
    """

    previous: Lsn
    start: Lsn
    finish: Lsn
    events: pa.Table
    marked_at: Time
    undecided: tuple[Undecided, ...] = ()
    in_doubt: tuple[InDoubt, ...] = ()
    last_commit_at: Time | UnsetType = UNSET


class EventRows(Struct, frozen=True):
    """Some events as columns. `gid` is an index into `FleetEvents.names`; `place` orders the events of all windows."""

    node: Ints
    gid: Ints
    lsn: Ints
    end: Ints
    place: Ints

    def __len__(self) -> int:
        return len(self.node)

    def where(self, rows: Flags | Ints) -> EventRows:
        """Select rows."""
        return EventRows(self.node[rows], self.gid[rows], self.lsn[rows], self.end[rows], self.place[rows])


class FleetEvents(Struct, frozen=True):
    """The events of all windows that matter to a cut.

    `starts` are the positions of the start markers, indexed by node number; a node's `offset` plus an LSN is the place
    of that LSN. The one-phase commit of a global transaction (a COMMIT with a global id) is in both `prepared` and
    `committed`. `undone` flags the prepared transactions that were rolled back on their node.
    """

    starts: Ints
    offset: Ints
    prepared: EventRows
    undone: Flags
    committed: EventRows
    local_commits: EventRows
    names: pa.Array[Any]


def fleet_events(windows: Mapping[str, NodeWindow]) -> FleetEvents:
    """Convert the windows' events to columns; drop events before a window, because segments may begin before it."""
    limits = np.array(
        [(window.previous, window.start, window.finish) for window in windows.values()], np.int64
    ).reshape(-1, 3)
    previous, starts, finishes = limits.T
    tables = [window.events for window in windows.values()]
    node = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    together = pa.concat_tables(tables)
    op, lsn, end = (to_numpy(together.column(name).combine_chunks()) for name in ("op", "lsn", "end_lsn"))
    is_rollback = op == ROLLBACK_PREPARED
    # For a ROLLBACK PREPARED, only its own end is known; its lsn is the end of the PREPARE that it rolled back.
    at = np.where(is_rollback, end - 1, lsn)
    within = (at >= previous[node]) & (at < finishes[node])
    carried = [(number, entry) for number, one in enumerate(windows.values()) for entry in one.undecided]
    gid, names = _number([entry.global_id for _, entry in carried], together.column("global_id").combine_chunks())
    if carried:
        columns = np.array([(number, entry.lsn, entry.end_lsn) for number, entry in carried], np.int64)
        node, lsn, end = (np.concatenate(pair) for pair in zip(columns.T, (node, lsn, end), strict=True))
        op = np.concatenate([np.full(len(carried), PREPARE, op.dtype), op])
        within = np.concatenate([np.ones(len(carried), np.bool_), within])
        is_rollback = op == ROLLBACK_PREPARED
    low = previous.copy()
    np.minimum.at(low, node, lsn)
    # Places don't overflow if the fleet writes less than 8 EB of WAL between two cuts.
    offset = np.cumsum(finishes - low + 1) - finishes
    rows = EventRows(node, gid, lsn, end, lsn + offset[node])
    is_commit = op == COMMIT
    has_gid = gid != NO_GLOBAL_ID
    tagged = is_commit & has_gid
    prepared = rows.where(within & ((op == PREPARE) | tagged))
    undone = _are_among(prepared.end + offset[prepared.node], rows.place[within & is_rollback])
    committed = rows.where(within & ((op == COMMIT_PREPARED) | tagged))
    return FleetEvents(starts, offset, prepared, undone, committed, rows.where(within & is_commit & ~has_gid), names)


def _number(carried: list[str], names: pa.Array[Any]) -> tuple[Ints, pa.Array[Any]]:
    """Number the global ids, `carried` first, with NO_GLOBAL_ID for null; also return the names in numerical order."""
    if carried:
        names = pa.concat_arrays([texts_array(carried), names])
    codes = names.dictionary_encode()
    return to_numpy(codes.indices.fill_null(NO_GLOBAL_ID)).astype(np.int64), codes.dictionary


def _are_among(values: Ints, members: Ints) -> Flags:
    if len(members) == 0:
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(members)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    matches: Flags = ordered[place] == values
    return matches
