"""The cut rule keeps the promises of docs/consistency.md on random interleavings of local and two-phase transactions.

The short form resolves forty thousand cuts; the long form (`make soak`) runs for CUTLINE_SOAK=SECONDS.
"""

from __future__ import annotations

import pytest

from tests.run.soak import SEED, SOAK_SECONDS
from tests.simulation.runs import (
    HISTORIES_PER_TASK,
    PromiseBrokenError,
    check_not_vacuous,
    run_history,
    run_on_all_cores,
)

HISTORIES = 10_000
CUTS_MIN = 40_000
# Per thousand histories; with fewer the simulation would prove nothing. At most a quarter of the usual counts.
LEAST_PER_THOUSAND = {
    "cuts": 4000,
    "early": 100,
    "undecided": 1500,
    "undecided at two cuts": 40,
    "in doubt for ever": 500,
    "raised": 20,
    "raised to a tagged commit": 3,
    "tagged": 80,
    "with two branches on a node": 40,
    "reused_gids": 250,
    "awaits DDL": 50,
    "catalogs changed": 150,
    "with DDL in doubt": 250,
}


def test_the_history_of_the_seed_keeps_every_promise() -> None:
    """Runs first and alone, so that CUTLINE_SEED reproduces a failure at once."""
    run_history(SEED)


# Ten seconds on two idle cores, much longer on a busy machine.
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SOAK_SECONDS > 0, reason="CUTLINE_SOAK asks for the long form")
@pytest.mark.rest
def test_forty_thousand_cuts_keep_every_promise() -> None:
    tally = run_on_all_cores(SEED, HISTORIES)
    assert tally["histories"] == HISTORIES
    assert tally["cuts"] >= CUTS_MIN
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.skipif(SOAK_SECONDS == 0, reason="the long form runs for CUTLINE_SOAK seconds")
def test_interleavings_keep_every_promise_for_as_long_as_asked() -> None:
    tally = run_on_all_cores(SEED, None, SOAK_SECONDS)
    assert tally["histories"] >= HISTORIES_PER_TASK
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


def test_a_broken_promise_names_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise AssertionError("torn")

    monkeypatch.setattr("tests.simulation.promises.check_atomic", fail)
    with pytest.raises(PromiseBrokenError, match=r"^CUTLINE_SEED=77: torn$"):
        run_history(77)
