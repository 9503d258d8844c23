"""The transaction events of a whole fleet as flat columns: what resolving a cut works on.

Nodes and global ids are numbers here, so that the rule itself needs no loop over nodes. The windows of all
nodes are laid end to end on one line: a *place* is a position on it, and places of one node order as its WAL
positions do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from columns.arrow_numbers import to_numpy
from columns.bytes_column import Flags, Ints, from_list
from fleet.lsn import Lsn
from wal.cut.cut_values import Undecided
from wal.segments.segment_schema import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED

NO_GLOBAL_ID = -1


@dataclass(frozen=True, slots=True)
class NodeWindow:
    """One node's part of a cut to be resolved.

    `previous` is its position at the cut before (the base position for the first), `start` and `finish` are
    its markers, `events` its transaction events up to `finish` (SEGMENT_SCHEMA), `undecided` what the cut
    before left out.
    """

    previous: Lsn
    start: Lsn
    finish: Lsn
    events: pa.Table
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Some events as columns. `gid` is a number of `FleetEvents.names`, `place` is on the line of all windows."""

    node: Ints
    gid: Ints
    lsn: Ints
    end: Ints
    place: Ints

    def __len__(self) -> int:
        return len(self.node)

    def where(self, rows: Flags | Ints) -> Rows:
        """These rows of them."""
        return Rows(self.node[rows], self.gid[rows], self.lsn[rows], self.end[rows], self.place[rows])


@dataclass(frozen=True, slots=True)
class FleetEvents:
    """The events of all windows that matter to a cut; `starts` by node number, `offset` takes a lsn to its place.

    The one-phase commit of a global transaction (a COMMIT with a global id) is in `prepared` and in
    `committed`. `undone` are the prepared ones that were rolled back on their node.
    """

    starts: Ints
    offset: Ints
    prepared: Rows
    undone: Flags
    committed: Rows
    local_commits: Rows
    names: pa.Array[Any]


def fleet_events(windows: Mapping[str, NodeWindow]) -> FleetEvents:
    """The windows' events as columns; a segment may begin before the window does, and what is before it is left out."""
    limits = np.array([(one.previous, one.start, one.finish) for one in windows.values()], np.int64).reshape(-1, 3)
    previous, starts, finishes = limits.T
    tables = [one.events for one in windows.values()]
    node = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    together = pa.concat_tables(tables)
    op, lsn, end = (to_numpy(together.column(name).combine_chunks()) for name in ("op", "lsn", "end_lsn"))
    is_rollback = op == ROLLBACK_PREPARED
    # A rollback is known by its own end; its lsn is the end of the PREPARE that it undid.
    at = np.where(is_rollback, end - 1, lsn)
    within = (at >= previous[node]) & (at < finishes[node])
    carried = [(number, e) for number, one in enumerate(windows.values()) for e in one.undecided]
    gid, names = _numbered([entry.global_id for _, entry in carried], together.column("global_id").combine_chunks())
    if carried:
        columns = np.array([(number, e.lsn, e.end_lsn) for number, e in carried], np.int64)
        node, lsn, end = (np.concatenate(pair) for pair in zip(columns.T, (node, lsn, end), strict=True))
        op = np.concatenate([np.full(len(carried), PREPARE, op.dtype), op])
        within = np.concatenate([np.ones(len(carried), np.bool_), within])
        is_rollback = op == ROLLBACK_PREPARED
    low = previous.copy()
    np.minimum.at(low, node, lsn)
    # As long as all the WAL between two cuts of the fleet is less than 8 EB, places don't overflow.
    offset = np.cumsum(finishes - low + 1) - finishes
    rows = Rows(node, gid, lsn, end, lsn + offset[node])
    is_commit = op == COMMIT
    has_gid = gid != NO_GLOBAL_ID
    tagged = is_commit & has_gid
    prepared = rows.where(within & ((op == PREPARE) | tagged))
    undone = _among(prepared.end + offset[prepared.node], rows.place[within & is_rollback])
    committed = rows.where(within & ((op == COMMIT_PREPARED) | tagged))
    return FleetEvents(starts, offset, prepared, undone, committed, rows.where(within & is_commit & ~has_gid), names)


def _numbered(carried: list[str], names: pa.Array[Any]) -> tuple[Ints, pa.Array[Any]]:
    """A number for every global id, NO_GLOBAL_ID where there is none, those carried over first."""
    if carried:
        first = from_list([name.encode() for name in carried]).to_arrow().cast(pa.string())
        names = pa.concat_arrays([first, names])
    codes = names.dictionary_encode()
    return to_numpy(codes.indices.fill_null(NO_GLOBAL_ID)).astype(np.int64), codes.dictionary


def _among(values: Ints, wanted: Ints) -> Flags:
    if len(wanted) == 0:
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(wanted)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: Flags = ordered[place] == values
    return found
