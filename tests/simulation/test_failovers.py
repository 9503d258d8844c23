"""A chain keeps the promises of docs/consistency.md while the primaries of its fleet fail over, with and without loss.

Between and during increments a primary is promoted without loss, promoted with loss of WAL that may be archived, taken
back by a server that it had replaced, or loses its slots; and commands are killed. The short form takes few chains; the
long form (`make soak`) runs for CUTLINE_SOAK=SECONDS.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.run.soak import SEED, SOAK_SECONDS, first
from tests.simulation import failover_chain
from tests.simulation.failover_chain import KILL_IN_DRAIN_ODDS, FailoverChain, run_failovers
from tests.simulation.failover_model import FailoverWorld
from tests.simulation.failover_mutants import MUTANTS, Mutant
from tests.simulation.fleet_records import Part
from tests.simulation.runs import PromiseBrokenError, check_not_vacuous, run_on_all_cores
from tests.simulation.schedule import KilledError

HISTORIES = (12, 300)
# The mutant that shows most rarely does so in one history of a hundred.
HISTORIES_MAX = 600
TRIED_MAX = 4
# Per thousand histories; with fewer the simulation would prove nothing. At most half of the usual counts.
LEAST_PER_THOUSAND = {
    "increments": 1000,
    "renewed": 800,
    "with a loss": 80,
    "on another timeline": 600,
    "found while it was read": 28,
    "killed": 400,
    "failed: server-promoted": 200,
    "undecided": 250,
}


def test_the_history_of_the_seed_keeps_every_promise() -> None:
    """Runs first and alone, so that CUTLINE_SEED reproduces a failure at once."""
    run_failovers(SEED, 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SOAK_SECONDS > 0, reason="CUTLINE_SOAK asks for the long form")
@pytest.mark.parametrize("histories", first(HISTORIES))
def test_chains_keep_every_promise_over_failovers(histories: int) -> None:
    check_not_vacuous(run_failovers(SEED, histories), LEAST_PER_THOUSAND)


@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.skipif(SOAK_SECONDS == 0, reason="the long form runs for CUTLINE_SOAK seconds")
def test_chains_keep_every_promise_over_failovers_for_as_long_as_asked() -> None:
    check_not_vacuous(run_on_all_cores(SEED, None, SOAK_SECONDS, run_failovers), LEAST_PER_THOUSAND)


def die_in_drain(chain: FailoverChain, odds: int) -> None:
    """Kill the command after the first segment of node 0."""
    if odds == KILL_IN_DRAIN_ODDS and chain.reading == 0:
        raise KilledError


def commit_locally(world: FailoverWorld, number: int, count: int) -> None:
    """Commit some transactions of one row on a node."""
    for _ in range(count):
        one = world._new_transaction(None)
        part = Part(len(world.parts), one, number, writes=(0,))
        one.parts.append(part)
        world.parts.append(part)
        world._commit(part, None)
        one.fate = "committed"


@pytest.mark.parametrize("is_promoted", [False, True])
def test_what_a_killed_drain_has_of_another_server_is_not_taken_for_the_nodes_own(
    *, is_promoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No marker follows it that could be missed, and the server that the node was before comes back."""
    # Nothing happens by itself, and each record is a segment.
    monkeypatch.setattr(failover_chain, "SIZES", (1,))
    world = FailoverWorld(lambda size: size - 1)
    world._agenda.clear()
    chain = FailoverChain(world, Counter(), may_kill=False)
    for count in (3, 1):
        commit_locally(world, 0, count)
        commit_locally(world, 1, count)
        assert chain.create()
    slots = dict(world.servers[0].slots)
    world._promote(0, loses=False)
    world.servers[0].slots = slots
    commit_locally(world, 0, 5)
    monkeypatch.setattr(FailoverChain, "kill_sometimes", die_in_drain)
    assert not chain.create()
    monkeypatch.undo()
    former = world.former[0].pop()
    if is_promoted:
        former.switches[former.timeline] = former.end
        former.timeline += 1
    world._become(0, former)
    commit_locally(world, 0, 8)
    # It asserts that only what the server has is restored.
    assert chain.create()
    assert chain.chain.last.renewed.keys() == {"0"}
    chain.check_kept()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", first(MUTANTS, TRIED_MAX), ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_broken_rule_is_caught(mutant: Mutant) -> None:
    """The seed that catches the mutant must also keep every promise under the unbroken rule."""
    promise = re.compile(rf"CUTLINE_SEED=\d+: ({MUTANTS[mutant]})\b")
    for seed in range(SEED, SEED + HISTORIES_MAX):
        try:
            with mutant():
                run_failovers(seed, 1)
        except PromiseBrokenError as error:
            if promise.match(str(error)):
                run_failovers(seed, 1)
                return
    pytest.fail(f"CUTLINE_SEED={SEED}: {HISTORIES_MAX} histories, and none broke {MUTANTS[mutant]!r}")
