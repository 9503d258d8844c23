"""Resolve all cuts of simulated fleets, and compute the state at each.

The state follows from `resolve`'s result alone, as in a restore: the change records before the node's position, except
those of transactions that the cut leaves undecided or that were rolled back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa

from cutline.fleet.lsn import Lsn
from cutline.wal.cut import resolve as rule
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.cut_values import Cut, InDoubt, NodeCut, Undecided
from cutline.wal.cut.in_doubt import included_and_prepared
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.simulation.fleet_model import World
from tests.simulation.fleet_records import WAL_BEGIN, Change, Node, Wave
from tests.unit.made_commits import MARKED_AT

BASE_POSITION = WAL_BEGIN - 100


@dataclass(frozen=True, slots=True)
class ResolvedCut:
    """One cut of one fleet: the `changes` by node that a restore applies, and their parts on all nodes, the `state`."""

    wave: Wave
    nodes: tuple[NodeCut, ...]
    changes: tuple[list[Change], ...]
    state: set[int]


@dataclass(slots=True)
class NodeCursor:
    """One node from cut to cut: where its events are in the table of all nodes, and what its last cut passes on.

    `rolled_back_lsns` has the positions of all transactions that were rolled back.
    """

    world: World
    number: int
    name: str
    first_row: int
    position: int = BASE_POSITION
    undecided: tuple[Undecided, ...] = ()
    in_doubt: tuple[InDoubt, ...] = ()
    rolled_back_lsns: set[int] = field(default_factory=set)

    @property
    def node(self) -> Node:
        """The node, with its WAL."""
        return self.world.nodes[self.number]

    def window(self, wave: Wave, events: pa.Table) -> NodeWindow:
        """The node's window for a cut: the events since the previous cut, and some earlier ones."""
        # The first segment may begin long before the window does.
        ends, since, until = self.node.ends, self.position - wave.reach[self.number], decoded_until(wave, self.number)
        first, last = bisect_right(ends, since), bisect_right(ends, until)
        found = events.slice(self.first_row + first, last - first)
        start = Lsn(wave.starts[self.number])
        return NodeWindow(Lsn(self.position), start, Lsn(until), found, MARKED_AT, self.undecided, self.in_doubt)


def events_table(nodes: Sequence[Node]) -> pa.Table:
    """All events in SEGMENT_SCHEMA, node after node."""
    op = [op for node in nodes for op in node.op]
    # A cut doesn't depend on these.
    columns: dict[str, object] = dict.fromkeys(("seq", "group", "partition", "changes"), [0] * len(op))
    columns |= dict.fromkeys(("key", "row"), [b""] * len(op))
    columns["op"] = op
    columns["xid"] = [xid for node in nodes for xid in node.xid]
    columns["lsn"] = [lsn for node in nodes for lsn in node.lsn]
    columns["end_lsn"] = [end for node in nodes for end in node.ends]
    columns["global_id"] = [gid for node in nodes for gid in node.gid]
    return pa.table(columns, SEGMENT_SCHEMA)


def decoded_until(wave: Wave, node: int) -> int:
    """The position up to which a node's WAL is decoded for a cut."""
    return wave.finishes[node]


def undecided_for_next(cut: NodeCut) -> tuple[Undecided, ...]:
    """The transactions that this cut leaves out, as the next one gets them."""
    return cut.undecided


def in_doubt_for_next(cut: NodeCut) -> tuple[InDoubt, ...]:
    """What is in doubt at this cut, as the next one gets it."""
    return cut.in_doubt


def included_in_doubt(nodes: Sequence[NodeCut]) -> dict[str, dict[int, InDoubt]]:
    """What a cut includes of what is prepared at it, by node and xid."""
    return included_and_prepared(nodes)


def changes_at(world: World, node: int, cut: NodeCut, excluded: set[int], previous: ResolvedCut | None) -> list[Change]:
    """The node's changes that belong to the state at the cut; mutants also look at the `previous` cut."""
    position = cut.position
    return [one for one in world.nodes[node].changes if one[0] < position and one[0] not in excluded]


def resolve_cuts(worlds: Sequence[World]) -> Iterator[tuple[Cut, list[ResolvedCut]]]:
    """Resolve the cuts of some histories, one after the other: the cut of all nodes, and every fleet's part of it.

    The fleets are resolved as if they were one. No two share a global id, so none affects another, and each must keep
    the promises that it would have to keep alone.
    """
    nodes: list[list[NodeCursor]] = []
    rows = 0
    for place, world in enumerate(worlds):
        nodes.append([])
        for number, node in enumerate(world.nodes):
            nodes[-1].append(NodeCursor(world, number, f"{place}/{number}", rows))
            rows += len(node.op)
    events = events_table([node for world in worlds for node in world.nodes])
    previous: list[ResolvedCut | None] = [None] * len(worlds)
    for waves in zip(*(world.waves for world in worlds), strict=True):
        windows = {
            one.name: one.window(wave, events) for wave, fleet in zip(waves, nodes, strict=True) for one in fleet
        }
        cut = rule.resolve(windows)
        assert [part.node for part in cut.nodes] == list(windows)
        resolved, parts = [], iter(cut.nodes)
        for wave, fleet, last in zip(waves, nodes, previous, strict=True):
            resolved.append(_apply_cut(wave, fleet, tuple(islice(parts, len(fleet))), last))
        yield cut, resolved
        previous = list(resolved)


def _apply_cut(
    wave: Wave, fleet: list[NodeCursor], cuts: tuple[NodeCut, ...], previous: ResolvedCut | None
) -> ResolvedCut:
    """Compute the state of one fleet at a cut, and advance its nodes to the cut."""
    changes: list[list[Change]] = []
    for one, cut in zip(fleet, cuts, strict=True):
        one.rolled_back_lsns.update(cut.rolled_back)
        excluded = one.rolled_back_lsns.union([each.lsn for each in cut.undecided])
        changes.append(changes_at(one.world, one.number, cut, excluded, previous))
        one.position, one.undecided = cut.position, undecided_for_next(cut)
        one.in_doubt = in_doubt_for_next(cut)
    return ResolvedCut(wave, cuts, tuple(changes), {change.part for found in changes for change in found})
