"""The simulation detects every deliberately broken rule, by the promise that it breaks."""

from __future__ import annotations

import re

import pytest

from tests.run.soak import SEED
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.runs import PromiseBrokenError, run_history

# The mutant that shows most rarely does so in one history of ninety.
HISTORIES_MAX = 3000


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_broken_rule_is_caught(mutant: Mutant) -> None:
    """The seed that catches the mutant must also keep every promise under the unbroken rule."""
    promise = re.compile(rf"CUTLINE_SEED=\d+: {MUTANTS[mutant]}\b")
    for seed in range(SEED, SEED + HISTORIES_MAX):
        try:
            with mutant():
                run_history(seed)
        except PromiseBrokenError as error:
            if promise.match(str(error)):
                run_history(seed)
                return
    pytest.fail(f"CUTLINE_SEED={SEED}: {HISTORIES_MAX} histories, and none broke {MUTANTS[mutant]!r}")
