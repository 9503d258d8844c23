"""Histories that Hypothesis makes, so that one that breaks a promise is shrunk to a few records and printed."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from storage.errors import SnapshotError
from tests.simulation.fleet_model import World
from tests.simulation.mutants import MUTANTS, Mutant, finish_before_all_starts, no_raising
from tests.simulation.promises import check_histories
from tests.soak import SOAK_SECONDS
from wal.segments.segment_schema import MARKER

EXAMPLES = 200
# Smaller than the histories of seeds: a decision costs Hypothesis many times as much.
TRANSACTIONS_MAX = 6
WAVES = 1
EXAMPLES_MAX = 5000
# A global transaction on two nodes and what tears it, but for markers; shrinking is not perfect.
RECORDS_MAX = 8
# A search costs ten times what a history of a seed does; test_mutants.py has all mutants at every run.
SHRUNK = [finish_before_all_starts, no_raising] if SOAK_SECONDS else [finish_before_all_starts]
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@cache
def below(size: int) -> st.SearchStrategy[int]:
    return st.integers(0, size - 1)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A history whose scheduler's decisions are Hypothesis's."""
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
        # Always the same search: how small a history gets is partly luck.
        smallest = find(worlds(), is_broken, settings=limits, random=random.Random(1))
        records = [event for event in smallest.story if event[2] != MARKER]
        print(f"{mutant.__name__}:\n{smallest!r}")  # noqa: T201  # what a broken rule would look like
        assert is_broken(smallest)
    assert len(smallest.nodes) <= 3
    assert len(records) <= RECORDS_MAX, repr(smallest)
