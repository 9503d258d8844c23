"""All cuts of simulated fleets, resolved by the rule, and the state that each makes.

What a cut's state is, is worked out from `resolve`'s answers alone, as a restore does it: change records before
the node's position, but for the transactions that the cut or an earlier one left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa

from fleet.lsn import Lsn
from tests.simulation.fleet_model import World
from tests.simulation.fleet_records import WAL_BEGIN, Change, Node, Wave
from wal.cut import resolve as rule
from wal.cut.cut_events import NodeWindow
from wal.cut.cut_values import Cut, NodeCut, Undecided
from wal.segments.segment_schema import SEGMENT_SCHEMA

BASE_POSITION = WAL_BEGIN - 100


@dataclass(frozen=True, slots=True)
class Made:
    """One cut of one fleet; `changes` by node and `state` (the parts of all nodes) as a restore makes them."""

    wave: Wave
    nodes: tuple[NodeCut, ...]
    changes: tuple[list[Change], ...]
    state: set[int]


@dataclass(slots=True)
class Followed:
    """One node from cut to cut: its events in the table of all, and what its last cut says of the next.

    `never` has the places of what was rolled back.
    """

    world: World
    number: int
    name: str
    first_row: int
    position: int = BASE_POSITION
    undecided: tuple[Undecided, ...] = ()
    never: set[int] = field(default_factory=set)

    @property
    def node(self) -> Node:
        """Its WAL."""
        return self.world.nodes[self.number]

    def window(self, wave: Wave, events: pa.Table) -> NodeWindow:
        """What is decoded of it for a cut: the events since the last, and some before."""
        # A segment begins anywhere before the window does, and may reach back a long way.
        ends, since, until = self.node.ends, self.position - wave.reach[self.number], decoded_until(wave, self.number)
        first, last = bisect_right(ends, since), bisect_right(ends, until)
        found = events.slice(self.first_row + first, last - first)
        return NodeWindow(Lsn(self.position), Lsn(wave.starts[self.number]), Lsn(until), found, self.undecided)


def events_table(nodes: Sequence[Node]) -> pa.Table:
    """All events of the nodes in SEGMENT_SCHEMA, those of one after those of the other."""
    op = [op for node in nodes for op in node.op]
    # Of no importance to a cut.
    columns: dict[str, object] = dict.fromkeys(("seq", "xid", "group", "partition"), [0] * len(op))
    columns |= dict.fromkeys(("key", "row"), [b""] * len(op))
    columns["op"] = op
    columns["lsn"] = [lsn for node in nodes for lsn in node.lsn]
    columns["end_lsn"] = [end for node in nodes for end in node.ends]
    columns["global_id"] = [gid for node in nodes for gid in node.gid]
    return pa.table(columns, SEGMENT_SCHEMA)


def decoded_until(wave: Wave, node: int) -> int:
    """How far the WAL of a node is decoded for a cut."""
    return wave.finishes[node]


def carried(cut: NodeCut) -> tuple[Undecided, ...]:
    """What the next cut is told of the transactions that this one left out."""
    return cut.undecided


def effective(world: World, node: int, cut: NodeCut, excluded: set[int], before: Made | None) -> list[Change]:
    """The changes of a node that belong to a state; `before` is the cut before."""
    position = cut.position
    return [one for one in world.nodes[node].changes if one[0] < position and one[0] not in excluded]


def cuts_of(worlds: Sequence[World]) -> Iterator[tuple[Cut, list[Made]]]:
    """Resolve all cuts of some histories in a row: the cut of all nodes, and what it makes of every fleet.

    The fleets are resolved as if they were one. As none has a global id of another, nothing in one of them changes what
    becomes of another, so that what each must keep by itself it must keep here.
    """
    nodes: list[list[Followed]] = []
    rows = 0
    for place, world in enumerate(worlds):
        nodes.append([])
        for number, node in enumerate(world.nodes):
            nodes[-1].append(Followed(world, number, f"{place}/{number}", rows))
            rows += len(node.op)
    events = events_table([node for world in worlds for node in world.nodes])
    before: list[Made | None] = [None] * len(worlds)
    for waves in zip(*(world.waves for world in worlds), strict=True):
        windows = {
            one.name: one.window(wave, events) for wave, fleet in zip(waves, nodes, strict=True) for one in fleet
        }
        cut = rule.resolve(windows)
        assert [part.node for part in cut.nodes] == list(windows)
        made, parts = [], iter(cut.nodes)
        for wave, fleet, last in zip(waves, nodes, before, strict=True):
            made.append(_made(wave, fleet, tuple(islice(parts, len(fleet))), last))
        yield cut, made
        before = list(made)


def _made(wave: Wave, fleet: list[Followed], cuts: tuple[NodeCut, ...], before: Made | None) -> Made:
    """The state of one fleet at a cut; its nodes go on from there."""
    changes: list[list[Change]] = []
    for one, cut in zip(fleet, cuts, strict=True):
        one.never.update(cut.rolled_back)
        excluded = one.never.union([each.lsn for each in cut.undecided])
        changes.append(effective(one.world, one.number, cut, excluded, before))
        one.position, one.undecided = cut.position, carried(cut)
    return Made(wave, cuts, tuple(changes), {change.part for found in changes for change in found})
