"""No changed value of a merge, of the mark that a chain begins with it, of a pin, or of a renewal goes unnoticed.

As tests/integration/test_mutations.py does for the other documents: no command may end in a traceback, hang, show a
changed value as true, or restore anything else. A sample of all changes is tried, and in the long form all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import Ready
from tests.mutations.table import Trial
from tests.mutations.trial import ACCEPTED, COMMANDS
from tests.mutations.values import Mutation
from tests.mutations.world import NAME, made_merged_world
from tests.run.soak import SEED, SOAK_SECONDS, first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OF_MERGES = re.compile(rf"snapshots/{NAME}/(merges|begins|pins)/.*")
OF_RENEWALS = re.compile(rf"snapshots/{NAME}/increments/.*")
SAMPLE, REST = 8, 200


@pytest.fixture(scope="module", autouse=True)
def drawn_folding() -> None:
    """Nothing is drawn: the driver folds. Spark would take most of the time."""


@pytest.fixture(scope="module")
def trial(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trial]:
    with made_merged_world(shared_fleet, tmp_path_factory.mktemp("merged-mutations"), Ready(spark)) as world:
        yield Trial.of(world, SEED)


def test_every_document_is_accepted_as_it_is(trial: Trial) -> None:
    assert {trial.originals[NAME, command].kind for command in COMMANDS} == {ACCEPTED}
    assert trial.recipe is not None
    kinds = {key.split("/")[2] for key in trial.documents if OF_MERGES.fullmatch(key)}
    assert kinds == {"merges", "begins", "pins"}


def cases_of(trial: Trial, kind: str) -> list[Mutation]:
    if kind == "renewed":
        changed = ("renewed", "slots_complete_at")
        return [one for one in trial.cases() if OF_RENEWALS.fullmatch(one.key) and one.path[0] in changed]
    if kind == "dead":
        return [one for one in cases_of(trial, "merges") if "dead" in one.path]
    return [one for one in trial.cases() if OF_MERGES.fullmatch(one.key) and one.key.split("/")[2] == kind]


@pytest.mark.timeout(0 if SOAK_SECONDS else 600)
@pytest.mark.parametrize("size", first((SAMPLE, REST)))
@pytest.mark.parametrize("kind", ["merges", "dead", "begins", "pins", "renewed"])
def test_no_changed_value_goes_unnoticed(trial: Trial, kind: str, size: int) -> None:
    cases = cases_of(trial, kind)
    assert len(cases) > 20
    trial.failed.clear()
    trial.run(cases if SOAK_SECONDS else cases[:size])
    sys.stdout.write("\n".join([*trial.lines(), ""]))
    assert not trial.failed, "\n".join(trial.failed)
