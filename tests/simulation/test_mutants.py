"""The simulation catches what it is there to catch: every deliberately broken rule, by the promise that it breaks."""

from __future__ import annotations

import re

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.runs import PromiseBrokenError, run_history
from tests.soak import SEED

# The rarest mutant shows in one history of ninety.
HISTORIES_MAX = 3000


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_broken_rule_is_caught(mutant: Mutant) -> None:
    """And the seed that catches it keeps every promise under the rule itself."""
    promise = re.compile(rf"CUTLINE_SEED=\d+: {MUTANTS[mutant]}\b")
    for seed in range(SEED, SEED + HISTORIES_MAX):
        try:
            with mutant():
                run_history(seed)
        except PromiseBrokenError as error:
            if promise.match(str(error)):
                run_history(seed)
                return
    pytest.fail(f"CUTLINE_SEED={SEED}: {HISTORIES_MAX} histories don't show that it breaks {MUTANTS[mutant]!r}")
