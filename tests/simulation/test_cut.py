"""The cut rule on random interleavings of local and two-phase transactions: the promises of docs/consistency.md.

The short form takes a hundred thousand of them; the long form, CUTLINE_SOAK=SECONDS, goes on for so long, and
`make soak` does.
"""

from __future__ import annotations

import pytest

from tests.simulation.runs import (
    HISTORIES_PER_TASK,
    PromiseBrokenError,
    check_not_vacuous,
    run_fleet_of_histories,
    run_history,
)
from tests.soak import SEED, SOAK_SECONDS

HISTORIES = 100_000
# Per thousand histories, or the simulation would prove nothing; a quarter or less of what is usual.
LEAST_PER_THOUSAND = {
    "cuts": 4000,
    "early": 100,
    "undecided": 1500,
    "carried over two cuts": 40,
    "in doubt for ever": 500,
    "raised": 20,
    "raised to a tagged commit": 3,
    "tagged": 80,
    "with two branches on a node": 40,
    "reused_gids": 250,
}


def test_the_history_of_the_seed_keeps_every_promise() -> None:
    """First and alone, so that a seed repeats at once what it found."""
    run_history(SEED)


# Half a minute on two idle cores; a machine that does other things too may take long.
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SOAK_SECONDS > 0, reason="CUTLINE_SOAK asks for the long form")
def test_a_hundred_thousand_interleavings_keep_every_promise() -> None:
    tally = run_fleet_of_histories(SEED, HISTORIES)
    assert tally["histories"] == HISTORIES
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.skipif(SOAK_SECONDS == 0, reason="the long form runs for CUTLINE_SOAK seconds")
def test_interleavings_keep_every_promise_for_as_long_as_asked() -> None:
    tally = run_fleet_of_histories(SEED, None, SOAK_SECONDS)
    assert tally["histories"] >= HISTORIES_PER_TASK
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


def test_a_broken_promise_names_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise AssertionError("torn")

    monkeypatch.setattr("tests.simulation.promises.check_atomic", broken)
    with pytest.raises(PromiseBrokenError, match=r"^CUTLINE_SEED=77: torn$"):
        run_history(77)
