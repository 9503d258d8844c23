"""Histories drawn by Hypothesis: one that breaks a promise is shrunk to a few records and printed."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from cutline.storage.errors import SnapshotError
from cutline.wal.segments.segments import MARKER
from tests.run.soak import first
from tests.simulation.fleet_model import World
from tests.simulation.mutants import MUTANTS, Mutant, finish_before_all_starts, no_raising
from tests.simulation.promises import check_histories

EXAMPLES = 200
# Smaller than the histories drawn from seeds: a decision is many times as expensive in Hypothesis.
TRANSACTIONS_MAX = 6
WAVES = 1
EXAMPLES_MAX = 5000
# Without markers: a global transaction on two nodes and what tears it. Shrinking is not perfect.
RECORDS_MAX = 8
# A search takes ten times as long as a history drawn from a seed; test_mutants.py runs all mutants every time.
SHRUNK = first([finish_before_all_starts, no_raising])
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@cache
def below(size: int) -> st.SearchStrategy[int]:
    return st.integers(0, size - 1)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A history whose decisions Hypothesis draws."""
    world = World(lambda size: draw(below(size)), TRANSACTIONS_MAX, WAVES)
    world.run()
    return world


def is_broken(world: World) -> bool:
    try:
        check_histories([world])
    except (AssertionError, SnapshotError):
        return True
    return False


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=RELAXED)
@given(worlds())
def test_every_history_keeps_every_promise(world: World) -> None:
    check_histories([world])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", SHRUNK, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_found_and_shrunk_to_a_few_records(mutant: Mutant) -> None:
    assert mutant in MUTANTS
    with mutant():
        limits = settings(max_examples=EXAMPLES_MAX, deadline=None, suppress_health_check=RELAXED, database=None)
        # A fixed seed: how far a history shrinks is partly luck.
        smallest = find(worlds(), is_broken, settings=limits, random=random.Random(1))
        records = [event for event in smallest.story if event[2] != MARKER]
        print(f"{mutant.__name__}:\n{smallest!r}")  # noqa: T201  # shows what the broken rule does
        assert is_broken(smallest)
    assert len(smallest.nodes) <= 3
    assert len(records) <= RECORDS_MAX, repr(smallest)
