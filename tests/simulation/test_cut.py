"""The cut rule on random interleavings of local and two-phase transactions: the promises of docs/consistency.md.

What a cut's state is, is worked out from `resolve`'s answers alone, as a restore does it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from tests.simulation.fleet_model import MadeCut, World
from wal.cut import NodeWindow, resolve
from wal.cut_values import Cut, Undecided
from wal.segment_schema import SEGMENT_SCHEMA

SEED = int(os.environ.get("CUTLINE_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
CUTS_MIN = 10_000


def events_table(events: list[tuple[int, int, str | None, int]]) -> pa.Table:
    """SEGMENT_SCHEMA events out of (op, lsn, global id, end)."""
    size = len(events)
    zeros = np.zeros(size, np.int64)
    nothing = pa.array([b""] * size, pa.binary())
    return pa.table(
        [
            pa.array([event[1] for event in events], pa.int64()),
            pa.array([event[3] for event in events], pa.int64()),
            zeros,
            zeros,
            pa.array([event[2] for event in events], pa.string()),
            pa.array([event[0] for event in events], pa.int8()),
            zeros.astype(np.int32),
            zeros.astype(np.int32),
            nothing,
            nothing,
        ],
        schema=SEGMENT_SCHEMA,
    )


@dataclass(slots=True)
class Resolved:
    """One cut of a history, and the state that a restore would make of it: transactions by node."""

    made: MadeCut
    cut: Cut
    state: dict[int, set[int]]


def resolved(world: World) -> Iterator[Resolved]:
    """Resolve all cuts of a history in a row; each gets the events since the last, and some before."""
    base = 900
    position = dict.fromkeys(range(len(world.nodes)), base)
    undecided: Mapping[int, tuple[Undecided, ...]] = dict.fromkeys(position, ())
    never: dict[int, set[int]] = {node: set() for node in position}
    for made in (cut for cut in world.cuts if len(cut.finishes) == len(world.nodes)):
        windows = {}
        for node, place in enumerate(world.nodes):
            # A segment begins anywhere before the window does, and may reach back a long way.
            since = position[node] - world.random.choice([0, 300, 10_000])
            found = [event for event in place.events if since < event[3] <= made.finishes[node]]
            windows[str(node)] = NodeWindow(
                position[node], made.starts[node], made.finishes[node], events_table(found), undecided[node]
            )
        cut = resolve(windows)
        state: dict[int, set[int]] = {}
        for node in position:
            part = cut.nodes[str(node)]
            never[node] |= set(part.rolled_back)
            left_out = never[node] | {one.lsn for one in part.undecided}
            state[node] = {
                number
                for number, one in enumerate(world.transactions)
                if node in one.at and one.at[node] < part.position and one.at[node] not in left_out
            }
        position = {node: cut.nodes[str(node)].position for node in position}
        undecided = {node: cut.nodes[str(node)].undecided for node in position}
        yield Resolved(made, cut, state)


def violations(world: World, state: Mapping[int, set[int]]) -> list[str]:
    """What is wrong with a state of the fleet taken alone."""
    found: list[str] = []
    for node, included in state.items():
        for number in included:
            one = world.transactions[number]
            if one.fate != "committed":
                found.append(f"node {node} has transaction {number}, which is {one.fate}")
            found += [
                f"transaction {number} is on node {node} and not on {other}"
                for other in one.nodes
                if number not in state[other]
            ]
            missing = one.saw[node] - included
            if missing:
                found.append(f"node {node} has transaction {number} and not {missing}, whose rows it saw")
    return found


def check_history(world: World) -> tuple[int, int, int]:
    """Assert every invariant on every cut of a history; return how many cuts, early ones and carried ones."""
    cuts = early = carried = 0
    before: Mapping[int, set[int]] = {node: set() for node in range(len(world.nodes))}
    for one in resolved(world):
        assert violations(world, one.state) == []
        for node, included in one.state.items():
            assert before[node] <= included, "a later cut lacks what an earlier one had"
            part = one.cut.nodes[str(node)]
            assert one.made.starts[node] <= part.position <= one.made.finishes[node]
            for number, transaction in enumerate(world.transactions):
                settled = transaction.settled_at.get(node)
                if settled is not None and settled < part.position:
                    assert number in included, "a transaction that was over before the cut is not in it"
        entered = {
            number
            for node, included in one.state.items()
            for number in included - before[node]
            if world.transactions[number].gid
        }
        assert one.cut.global_transactions == len(entered)
        early += one.cut.included_early
        carried += sum(len(part.undecided) for part in one.cut.nodes.values())
        before = one.state
        cuts += 1
    committed = {number for number, one in enumerate(world.transactions) if one.fate == "committed"}
    for node, included in before.items():
        assert included == {number for number in committed if node in world.transactions[number].nodes}
    return cuts, early, carried


def naive_state(world: World, made: MadeCut) -> dict[int, set[int]]:
    """The state at the start positions alone: what is committed before them."""
    return {
        node: {
            number
            for number, one in enumerate(world.transactions)
            if node in one.settled_at and one.settled_at[node] < start
        }
        for node, start in made.starts.items()
    }


def test_no_cut_of_ten_thousand_is_torn() -> None:
    cuts = early = carried = histories = 0
    while cuts < CUTS_MIN:
        seed = SEED + histories
        world = World(seed)
        world.run()
        try:
            found = check_history(world)
        except AssertionError as error:
            pytest.fail(f"CUTLINE_SEED={seed}: {error}")
        cuts, early, carried = cuts + found[0], early + found[1], carried + found[2]
        histories += 1
    print(f"CUTLINE_SEED={SEED}: {histories} histories, {cuts} cuts, {early} early, {carried} carried")  # noqa: T201  # a simulation prints its seed
    # Or the simulation would prove nothing.
    assert early > cuts // 20
    assert carried > cuts // 20


def test_the_start_positions_alone_tear() -> None:
    torn = 0
    for number in range(100):
        world = World(SEED + number)
        world.run()
        torn += sum(bool(violations(world, naive_state(world, made))) for made in world.cuts)
    assert torn > 10, f"CUTLINE_SEED={SEED}"
