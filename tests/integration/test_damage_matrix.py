"""Check finds every kind of damage that a reader can tell, and a restore brings back whatever check accepts.

tests/damage_matrix declares the kinds and tries them. `make test` tries a fixed sample by Spark jobs; the whole matrix
runs in the driver, as commands on so few rows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import Ready
from tests.damage_matrix.families import all_kinds
from tests.damage_matrix.kinds import Kind
from tests.damage_matrix.missed import read_missed
from tests.damage_matrix.sample import fixed_sample
from tests.damage_matrix.trial import Trials
from tests.damage_matrix.world import RESULTS, World, made_world
from tests.run.by_spark import in_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A test tries so many kinds at most: the longest family takes a quarter of an hour on a busy machine.
KINDS_OF_A_TEST = 40


def _tests() -> dict[str, list[Kind]]:
    """The kinds by test: a family, or the part of it that begins with its kind of that number."""
    families: dict[str, list[Kind]] = {}
    for kind in all_kinds():
        families.setdefault(kind.family, []).append(kind)
    return {
        f"{family} from {first}" if first else family: kinds[first : first + KINDS_OF_A_TEST]
        for family, kinds in families.items()
        for first in range(0, len(kinds), KINDS_OF_A_TEST)
    }


TESTS = _tests()


@pytest.fixture(scope="module")
def world(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with made_world(shared_fleet, tmp_path_factory.mktemp("matrix"), Ready(spark)) as world:
        yield world


@pytest.fixture(scope="module")
def trials(world: World) -> Trials:
    return Trials(world)


@pytest.fixture(scope="module")
def in_driver_trials(world: World, spark: SparkSession) -> Trials:
    return Trials(replace(world, spark=Ready(in_driver(spark))))


def wrong_results(trials: Trials, kinds: Sequence[Kind]) -> list[str]:
    """How results differ from the declared outcomes; a kind that is known to be missed has to be missed."""
    known = read_missed()
    wrong = [one for one in trials.run(kinds) if bool(one.problem) != (one.kind.id in known)]
    return [f"{one.kind.id}: {one.problem or 'it is found now: remove it from missed.txt'}" for one in wrong]


def test_the_clean_chains_pass(trials: Trials) -> None:
    for name, expected in RESULTS.items():
        code, document = trials.check_clean(name)
        assert (code, document["result"]) == (0, expected), document


def test_the_fixed_sample_of_damage_is_found(trials: Trials) -> None:
    assert wrong_results(trials, fixed_sample(all_kinds(), read_missed())) == []


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TESTS)
def test_every_kind_of_damage_is_found_or_can_not_be_told(in_driver_trials: Trials, name: str) -> None:
    wrong = wrong_results(in_driver_trials, TESTS[name])
    assert not wrong, "\n".join(wrong)
