"""Findings from the archived events of a cut's window: differences from its commit, torn transactions, lost PREPAREs.

Every finding names the node and the global id if the events show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.check.report import Conflict
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.lsn import Lsn
from cutline.snapshots.records.commit import CutRecord
from cutline.wal.cut.cut_events import FleetEvents
from cutline.wal.cut.cut_values import Cut, InDoubt, NodeCut, Undecided
from cutline.wal.cut.resolve import NodeWindow
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED, are_of

FIELDS = ("local_transactions", "last_commit_at")
TOTALS = ("global_transactions", "included_early", "in_flight")
# At most this many transactions are named for each field of a node's cut.
NAMED_MAX = 20
# At most this many transactions that one node committed and another rolled back are looked at for a cut.
DECIDED_MAX = 1000
TRANSACTION = "transaction"


def differences(stored: CutRecord, resolved: Cut, windows: Mapping[str, NodeWindow]) -> Iterator[Conflict]:
    """Yield the differences between a cut in its commit and the cut that its archived events define."""
    cuts = stored.by_node
    for again in resolved.nodes:
        node, window = cuts[again.node], windows[again.node]
        for detail, global_id in _of_node(node, again, window):
            yield Conflict("cut", f"cut {stored.id}: {detail}", node=again.node, global_id=global_id)
    for name in TOTALS:
        given, expected = getattr(stored, name), getattr(resolved, name)
        if given != expected:
            yield Conflict("cut", f"cut {stored.id}: {name} {_is_but(given, expected)}")


def _is_but(given: object, expected: object) -> str:
    return f"is {given} in the commit, but {expected} in the archived events"


def _of_node(stored: NodeCut, again: NodeCut, window: NodeWindow) -> Iterator[tuple[str, str | None]]:
    """Yield the differences in a node's cut, each with the global id of its transaction if that is known."""
    if stored.position != again.position:
        global_id = _part_between(window, stored.position, again.position)
        between = "" if global_id is None else "; between them, the transaction is prepared, or committed in one phase"
        yield f"position {_is_but(stored.position, again.position)}{between}", global_id
    yield from _of_lists("undecided", stored.undecided, again.undecided, _of_undecided)
    yield from _of_lists("in doubt", stored.in_doubt, again.in_doubt, _of_in_doubt)
    if set(stored.rolled_back) != set(again.rolled_back):
        names = _names_at(window)
        yield from _of_lists(
            "rolled back", stored.rolled_back, again.rolled_back, lambda lsn: (f"prepared at {lsn}", names.get(lsn))
        )
    for name in FIELDS:
        given, expected = getattr(stored, name), getattr(again, name)
        if given != expected:
            yield f"{name} {_is_but(given, expected)}", None


def _of_undecided(entry: Undecided) -> tuple[str, str | None]:
    return f"prepared at {entry.lsn}", entry.global_id


def _of_in_doubt(entry: InDoubt) -> tuple[str, str | None]:
    part = "prepared" if entry.is_prepared else "committed"
    return f"{part} and {'included' if entry.is_included else 'not included'}, at {entry.lsn}", entry.global_id


def _of_lists(
    name: str, stored: Iterable[Any], again: Iterable[Any], describe: Callable[[Any], tuple[str, str | None]]
) -> Iterator[tuple[str, str | None]]:
    """Yield the entries that only one of two lists of transactions has."""
    given, expected = frozenset(stored), frozenset(again)
    for only, other, has, lacks in (
        (given, expected, "the commit", "the archived events"),
        (expected, given, "the archived events", "the commit"),
    ):
        found = sorted(only - other, key=_position)
        for entry in found[:NAMED_MAX]:
            what, global_id = describe(entry)
            yield f"the transaction is {name} ({what}) according to {has}, but not according to {lacks}", global_id
        if len(found) > NAMED_MAX:
            yield f"{len(found) - NAMED_MAX:,} more transactions are {name} only according to {has}", None


def _position(entry: Undecided | InDoubt | Lsn) -> Lsn:
    return entry if isinstance(entry, Lsn) else entry.lsn


def _parts(window: NodeWindow) -> pa.Table:
    """Return the PREPAREs, and the one-phase commits with a global id, in a window."""
    events = window.events
    parts = events.filter(to_mask(are_of(to_numpy(events["op"]), (PREPARE, COMMIT))))
    return parts.filter(pc.is_valid(parts["global_id"]))


def _part_between(window: NodeWindow, one: Lsn, other: Lsn) -> str | None:
    """Return the global id of the last part that ends between two positions, or at the higher of them."""
    low, high = sorted((one, other))
    parts = _parts(window)
    ends = to_numpy(parts["end_lsn"])
    between = np.flatnonzero((ends > low) & (ends <= high))
    if not len(between):
        return None
    global_id: str = parts["global_id"][int(between[np.argmax(ends[between])])].as_py()
    return global_id


def _names_at(window: NodeWindow) -> dict[Lsn, str]:
    """Return the global ids of the parts in a window, and of those undecided before it, by position."""
    parts = _parts(window)
    of_parts = zip(map(Lsn, parts["lsn"].to_pylist()), parts["global_id"].to_pylist(), strict=True)
    return {entry.lsn: entry.global_id for entry in window.undecided} | dict(of_parts)


def lost_prepares(window: NodeWindow, before: Lsn) -> list[tuple[str, Lsn]]:
    """Return the global id and position of each COMMIT PREPARED before `before` whose PREPARE is not in the archive.

    The PREPARE is in the window, or the transaction was prepared at the previous cut, which then lists it as in doubt.
    """
    events = window.events
    op, lsn, xid = (to_numpy(events[name]) for name in ("op", "lsn", "xid"))
    if not (op == COMMIT_PREPARED).any():
        return []
    # Events of one transaction have the same xid and the same gid, from which the chain's one rule made the global id.
    waiting = [part for part in window.in_doubt if part.is_prepared]
    names = pa.concat_arrays(
        [*events["global_id"].cast(pa.string()).chunks, pa.array([part.global_id for part in waiting], pa.string())]
    )
    name = to_numpy(names.dictionary_encode().indices.fill_null(to_arrow(np.array([-1], np.int32))[0])).astype(np.int64)
    xids = np.concatenate([xid, np.fromiter((part.xid for part in waiting), np.int64)])
    # xids have 32 bits.
    part = (name << 32) | xids
    is_prepared = np.concatenate([op == PREPARE, np.ones(len(waiting), np.bool_)])
    is_lost = (op == COMMIT_PREPARED) & (lsn >= window.previous) & (lsn < before)
    is_lost &= ~np.isin(part[: len(op)], part[is_prepared])
    lost = events.filter(to_mask(is_lost))
    return list(zip(lost["global_id"].to_pylist(), map(Lsn, lost["lsn"].to_pylist()), strict=True))


class TornTransaction(Struct, frozen=True):
    """A transaction that the state of a cut contains on the shard `has`, but not on `lacks`, which has a part of it."""

    global_id: str
    has: str
    lacks: str


class SharedParts(Struct, frozen=True):
    """The transactions with parts on several shards in a cut's window.

    `pairs` counts them once for each pair of shards on which the cut's state contains them, and `waiting` those that it
    contains on neither.
    """

    pairs: int
    waiting: int
    torn: tuple[TornTransaction, ...]


def shared_parts(events: FleetEvents, stored: CutRecord, nodes: tuple[str, ...]) -> SharedParts:
    """Compare the parts in the windows of a cut by global id, as the commit of the cut includes them.

    `nodes` are the shards, in the order of their numbers in `events`.
    """
    prepared = events.prepared
    if not len(prepared):
        return SharedParts(0, 0, ())
    cuts = [stored.of(node) for node in nodes]
    position = np.array([cut.position for cut in cuts], np.int64)[prepared.node]
    undecided = _are_at(events, cuts, [[entry.lsn for entry in cut.undecided] for cut in cuts])
    # Another attempt may have used the same gid after a rollback, on other shards.
    is_gone = events.undone | _are_at(events, cuts, [list(cut.rolled_back) for cut in cuts])
    width = len(nodes)
    part = prepared.gid * width + prepared.node
    included = np.unique(part[(prepared.lsn < position) & ~undecided & ~is_gone])
    waiting = np.setdiff1d(part[~is_gone], included)
    included_gids, first = np.unique(included // width, return_index=True)
    place = np.minimum(np.searchsorted(included_gids, waiting // width), max(len(included_gids) - 1, 0))
    is_torn = np.isin(waiting // width, included_gids)
    torn = tuple(
        TornTransaction(
            events.names[int(one // width)].as_py(),
            has=nodes[int(included[first[at]] % width)],
            lacks=nodes[int(one % width)],
        )
        for one, at in zip(waiting[is_torn].tolist(), place[is_torn].tolist(), strict=True)
    )
    return SharedParts(_pairs(included // width), _pairs(waiting[~is_torn] // width), torn)


class _Part(NamedTuple):
    """A part of a global transaction: when it was prepared, and when it was committed or rolled back."""

    prepared_at: float
    ended_at: float


class _Decided(NamedTuple):
    """A part of the global transaction, and whether it was committed."""

    global_id: str
    is_commit: bool
    part: _Part


def decided_differently(events: FleetEvents, windows: Mapping[str, NodeWindow]) -> Iterator[str]:
    """Describe the global transactions that were committed on one node, and rolled back on another at the same time.

    An attempt that was rolled back on a node does not count if the same gid was prepared there again. Nor does it count
    if it ended, by the clocks of the nodes, before the transaction was prepared on the other node.
    """
    if not events.undone.any():
        return
    nodes, width = tuple(windows), len(windows)
    prepared, committed = events.prepared, events.committed
    part = prepared.gid * width + prepared.node
    gone = np.setdiff1d(part[events.undone], part[~events.undone])
    gids = np.intersect1d(gone // width, committed.gid)[:DECIDED_MAX]
    if not len(gids):
        return
    names = events.names.take(to_arrow(gids))
    committed_on, rolled_back_on = dict[str, list[tuple[str, _Part]]](), dict[str, list[tuple[str, _Part]]]()
    chosen = gone[np.isin(gone // width, gids)].tolist()
    gone_on = {(events.names[one // width].as_py(), nodes[one % width]) for one in chosen}
    for node, window in windows.items():
        for global_id, is_commit, found in _decided_parts(window, names):
            if is_commit:
                committed_on.setdefault(global_id, []).append((node, found))
            elif (global_id, node) in gone_on:
                rolled_back_on.setdefault(global_id, []).append((node, found))
    for global_id in sorted(committed_on.keys() & rolled_back_on.keys()):
        for (has, one), (lacks, other) in product(committed_on[global_id], rolled_back_on[global_id]):
            if one.prepared_at <= other.ended_at and other.prepared_at <= one.ended_at:
                yield f"transaction {global_id!r} was committed on {has}, but rolled back on {lacks}"
                break


def _decided_parts(window: NodeWindow, names: pa.Array[Any]) -> Iterator[_Decided]:
    """Yield the parts of these transactions that end in a window, and whether they were committed."""
    rows = window.events.filter(pc.is_in(window.events["global_id"], value_set=names))
    events = rows.select(["op", "xid", "seq", "global_id"]).to_pylist()  # bounded by DECIDED_MAX
    prepared_at = {one["xid"]: one["seq"] for one in events if one["op"] == PREPARE}
    for one in events:
        if one["op"] in (COMMIT, COMMIT_PREPARED, ROLLBACK_PREPARED):
            began = one["seq"] if one["op"] == COMMIT else prepared_at.get(one["xid"], -math.inf)
            yield _Decided(one["global_id"], one["op"] != ROLLBACK_PREPARED, _Part(began, one["seq"]))


def _are_at(events: FleetEvents, cuts: list[NodeCut], positions: list[list[Lsn]]) -> Flags:
    """Flag the prepared transactions at these positions, which are listed by node."""
    places = [
        offset + lsn
        for offset, cut, listed in zip(events.offset.tolist(), cuts, positions, strict=True)
        for lsn in listed
        # A damaged commit may list a position after the window, even a position that is no 64-bit integer.
        if lsn < cut.finish
    ]
    return np.isin(events.prepared.place, np.array(places, np.int64))


def _pairs(gids: Ints) -> int:
    """Count the pairs of parts with the same gid."""
    counts = np.unique(gids, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def torn_conflict(torn: TornTransaction, nodes: tuple[str, ...]) -> Conflict:
    """Return the conflict for a torn transaction; its nodes are in the order of `nodes`."""
    here, there = sorted((torn.has, torn.lacks), key=nodes.index)
    detail = f"it is included in the state on {torn.has}, but not in the state on {torn.lacks}"
    return Conflict(TRANSACTION, detail, node=here, other_node=there, global_id=torn.global_id)
