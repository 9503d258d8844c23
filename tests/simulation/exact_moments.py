"""Exact times of the model's histories: the state at random moments between any two cuts, and its promises.

The model knows when every record was written. A node's clock is off by a constant, and its commits' times jitter, so
they do not always rise with positions.
"""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta

import pyarrow as pa

from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.exact_time import CutAtTime, resolve_at
from cutline.wal.cut.safe_time import POSTGRESQL_EPOCH
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED
from tests.run.soak import SEED
from tests.simulation import promises
from tests.simulation.fleet_model import World, seeded
from tests.simulation.fleet_records import Wave
from tests.simulation.made_cuts import ResolvedCut, changes_at, events_table, resolve_cuts
from tests.simulation.runs import PromiseBrokenError

MOMENTS_PER_HISTORY = 6
# Times are microseconds since 2000: ten for every tick of the model's clock.
TICK, BEGIN = 10, 1000
SKEW_MAX, JITTERS = 60, (0, 0, 0, 4, -4, 90, -90)


def run_moments(first: int, histories: int) -> Counter[str]:
    """Check the states at some moments of the histories of successive seeds; raise PromiseBrokenError."""
    tally: Counter[str] = Counter()
    for seed in range(first, first + histories):
        world = World(seeded(seed))
        world.run()
        try:
            check_moments(world, random.Random(seed), tally)
        except AssertionError as error:
            raise PromiseBrokenError(f"CUTLINE_SEED={seed}: {error}") from error
    tally["histories"] += histories
    return tally


def check_moments(world: World, chance: random.Random, tally: Counter[str]) -> None:
    """Assert every promise on the states at random moments."""
    times = draw_times(world, chance)
    events = {str(number): with_times(world, number, times[number]) for number in range(len(world.nodes))}
    cuts = [cuts[0] for _, cuts in resolve_cuts([world])]
    before = chance.randrange(len(cuts) - 1)
    after = chance.randrange(before + 1, len(cuts))
    latest = max(max(found, default=BEGIN) for found in times)
    moments = sorted(chance.randrange(BEGIN - SKEW_MAX, latest + SKEW_MAX) for _ in range(MOMENTS_PER_HISTORY))
    states: list[ResolvedCut] = [cuts[before]]
    for moment in moments:
        earlier, later = named(cuts[before].nodes), named(cuts[after].nodes)
        found = resolve_at(earlier, later, events, POSTGRESQL_EPOCH + timedelta(microseconds=moment))
        state = state_at(world, found, cuts[: after + 1], later)
        promises.check_monotone(world, state, states[-1])
        promises.check_monotone(world, cuts[after], state)
        promises.check_atomic(world, state)
        promises.check_causal(world, state)
        promises.check_positions(world, state)
        promises.check_undecided(world, state, tally)
        promises.check_in_doubt(world, state, tally)
        check_times(world, found, state, times, moment, tally)
        states.append(state)
        tally["moments"] += 1
    promises.check_order([world], [states[1:]])


def draw_times(world: World, chance: random.Random) -> list[list[int]]:
    """When each event of each node was, by the node's clock; 0 for a commit that a subscription applied."""
    skews = [chance.randrange(SKEW_MAX) for _ in world.nodes]
    times: list[list[int]] = [[] for _ in world.nodes]
    for now, node, op, gid, _ in world.story:
        is_foreign = op == COMMIT and gid is None and chance.random() < 0.05
        times[node].append(0 if is_foreign else BEGIN + now * TICK + skews[node] + chance.choice(JITTERS))
    return times


def with_times(world: World, number: int, times: list[int]) -> pa.Table:
    """All events of a node, with their times."""
    events = events_table([world.nodes[number]])
    place = events.schema.get_field_index("seq")
    return events.set_column(place, events.schema.field(place), pa.array(times, events.schema.field(place).type))


def named(cuts: tuple[NodeCut, ...]) -> dict[str, NodeCut]:
    """The nodes' parts of a cut, by the nodes' numbers."""
    return {str(number): cut for number, cut in enumerate(cuts)}


def state_at(world: World, found: CutAtTime, cuts: list[ResolvedCut], later: dict[str, NodeCut]) -> ResolvedCut:
    """The state at a moment, computed from the cut as a restore does (Chain.position, Chain.excluded)."""
    changes = []
    for number, cut in enumerate(found.cut.nodes):
        excluded = {one.lsn for one in cut.undecided}.union(
            cut.rolled_back, *(earlier.nodes[number].rolled_back for earlier in cuts[:-1])
        )
        changes.append(changes_at(world, number, cut, set(map(int, excluded)), None))
    starts = {number: int(node.at) for number, node in enumerate(found.nodes)}
    finishes = {int(number): int(cut.position) for number, cut in later.items()}
    state = {change.part for of_node in changes for change in of_node}
    return ResolvedCut(Wave(starts=starts, finishes=finishes), found.cut.nodes, tuple(changes), state)


def check_times(
    world: World, found: CutAtTime, state: ResolvedCut, times: list[list[int]], moment: int, tally: Counter[str]
) -> None:
    """Assert that the state has what was committed by the moment, and otherwise only what the rule includes early."""
    for number, (node, at) in enumerate(zip(world.nodes, found.nodes, strict=True)):
        finish, early, late = state.wave.finishes[number], 0, 0
        committed = {}
        for op, lsn, xid, time in zip(node.op, node.lsn, node.xid, times[number], strict=True):
            if op in (COMMIT, COMMIT_PREPARED):
                committed[xid] = (lsn, time)
        previous = int(at.at)
        has_later = False
        for xid, (lsn, time) in sorted(committed.items(), key=lambda one: one[1]):
            if lsn < previous:
                assert time <= moment or lsn < finish, "exact: a position is after a later commit"
            has_later |= time > moment and lsn >= previous
            if lsn < finish and lsn >= previous:
                is_in = xid in state.state
                # Everything in the WAL up to the first later commit is in the state.
                assert has_later or is_in, f"exact: part {xid} was committed in time and is not in the state"
                early += is_in and time > moment
                late += not is_in and 0 < time <= moment
        # The state has parts that the node commits after the later cut, or never.
        early += sum(
            part.number in state.state and (part.commit_lsn is None or part.commit_lsn >= finish)
            for part in world.parts
            if part.node == number and part.lsn is not None and part.lsn < at.position
        )
        assert (at.early, at.late) == (early, late), "exact: wrong counts"
        tally["early"] += early
        tally["late"] += late
        tally["raised"] += at.position > at.at


def run_seed() -> Counter[str]:
    """Check the moments of the history of the seed."""
    return run_moments(SEED, 1)
