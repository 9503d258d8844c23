"""The transactions in doubt at a cut: prepared but not yet decided at the position of some node.

On a server recovered to that position, they are prepared transactions, and a coordinator may still ask about them.
Parts are identified by xid, because several parts on one node may share a global id. The list is carried from cut to
cut, because a transaction that is part of one cut may stay prepared on a node through many later cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints, texts_array
from cutline.fleet.lsn import Lsn
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.cut_values import Cut, InDoubt, NodeCut
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED

# The columns to read from the few events in doubt.
READ = ("global_id", "row", "xid", "lsn")
XID_BITS = 32

# A node's number and its part of a transaction.
_Found: TypeAlias = tuple[int, InDoubt]


def with_in_doubt(windows: Mapping[str, NodeWindow], cut: Cut) -> Cut:
    """Add the transactions in doubt on each node to the resolved cut."""
    events = pa.concat_tables([windows[node_cut.node].events for node_cut in cut.nodes])
    node = np.repeat(np.arange(len(cut.nodes)), [len(windows[node_cut.node].events) for node_cut in cut.nodes])
    op, lsn, end, xid = (to_numpy(events.column(name)) for name in ("op", "lsn", "end_lsn", "xid"))
    previous = np.array([windows[node_cut.node].previous for node_cut in cut.nodes], np.int64)[node]
    position = np.array([node_cut.position for node_cut in cut.nodes], np.int64)[node]
    is_within = (lsn >= previous) & (lsn < position)
    # For a ROLLBACK PREPARED, only the end of its record is known.
    is_rollback = (op == ROLLBACK_PREPARED) & (end > previous) & (end <= position)
    is_commit, is_prepare = is_within & (op == COMMIT_PREPARED), is_within & (op == PREPARE)
    part = (node << XID_BITS) | xid
    is_open = is_prepare & ~np.isin(part, part[is_commit | is_rollback])

    found = _carried(windows, cut, part[is_commit], part[is_rollback])
    found += _read(events, node, is_open, is_prepared=True)
    open_ids = {doubt.global_id for _, doubt in found if doubt.is_prepared}
    if open_ids:
        is_decided = is_within & ~is_open & ((op == PREPARE) | (op == COMMIT))
        found += _read(events, node, is_decided & _is_among(events["global_id"], open_ids), is_prepared=False)
    return replace(cut, nodes=_listed(cut, found, open_ids))


def included_and_prepared(nodes: Iterable[NodeCut]) -> dict[str, dict[int, InDoubt]]:
    """Return the included parts still prepared at the cut, keyed by node and xid; the catalogs lack their DDL."""
    return {
        cut.node: {doubt.xid: doubt for doubt in cut.in_doubt if doubt.is_prepared and doubt.is_included}
        for cut in nodes
    }


def _carried(windows: Mapping[str, NodeWindow], cut: Cut, committed: Ints, rolled_back: Ints) -> list[_Found]:
    """Return the transactions in doubt at the previous cut, except those that have been rolled back since."""
    before = [(number, doubt) for number, each in enumerate(cut.nodes) for doubt in windows[each.node].in_doubt]
    part = np.array([(number << XID_BITS) | doubt.xid for number, doubt in before], np.int64)
    is_committed, is_rolled_back = np.isin(part, committed).tolist(), np.isin(part, rolled_back).tolist()
    return [
        (number, structs.replace(doubt, is_prepared=doubt.is_prepared and not is_over))
        for (number, doubt), is_over, is_gone in zip(before, is_committed, is_rolled_back, strict=True)
        if not is_gone
    ]


def _read(events: pa.Table, node: Ints, chosen: Flags, *, is_prepared: bool) -> list[_Found]:
    """Return the chosen events as parts; only a few transactions are ever in doubt."""
    rows = events.select(READ).filter(to_mask(chosen))
    return [
        (number, InDoubt(gid.decode() or name, name, xid, Lsn(lsn), is_prepared, is_included=False))
        for number, name, gid, xid, lsn in zip(
            node[chosen].tolist(), *(rows[column].to_pylist() for column in READ), strict=True
        )
    ]


def _is_among(names: Any, wanted: set[str]) -> Flags:
    found = pc.is_in(names, texts_array(sorted(wanted)))
    flags: Flags = to_numpy(found.cast(pa.int8())) == 1
    return flags


def _listed(cut: Cut, found: list[_Found], open_ids: set[str]) -> tuple[NodeCut, ...]:
    """Return the cut's nodes with their parts that are in doubt, ordered by position."""
    listed: list[list[InDoubt]] = [[] for _ in cut.nodes]
    excluded = [{*(each.lsn for each in node.undecided), *node.rolled_back} for node in cut.nodes]
    for number, part in sorted(found, key=lambda one: one[1].lsn):
        is_included = part.lsn not in excluded[number]
        if part.global_id in open_ids and (part.is_prepared or is_included):
            listed[number].append(structs.replace(part, is_included=is_included))
    return tuple(
        structs.replace(node_cut, in_doubt=tuple(parts)) for node_cut, parts in zip(cut.nodes, listed, strict=True)
    )
