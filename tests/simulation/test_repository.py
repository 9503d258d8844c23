"""The repository under lost answers, crashes, sleeping processes, stale listings: the promises of docs/storage.md.

The short form takes ten thousand of them, and walks every fault at every call of every command; the long form,
CUTLINE_SOAK=SECONDS, goes on with random ones for so long; `make soak` does.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.simulation.repository_history import run_repositories, run_repository
from tests.simulation.repository_walk import COMMANDS, COMMITTING, RIVALS, walk_commit, walk_faults, walk_rivals
from tests.simulation.runs import HISTORIES_PER_TASK, PromiseBrokenError, check_not_vacuous, run_fleet_of_histories
from tests.soak import SEED, SOAK_SECONDS

HISTORIES = 10_000
# Per thousand histories, or the simulation would prove nothing; a third or less of what is usual.
LEAST_PER_THOUSAND = {
    "snapshots and increments committed": 2000,
    "told nothing": 60,
    "told unknown": 8,
    "late puts stored": 40,
    "late puts refused": 10,
    "412 after its own retry": 15,
    "answer lost, not stored": 15,
    "answer lost, stored": 15,
    "crash before": 50,
    "crash after": 40,
    "interrupt before": 50,
    "interrupt after": 40,
    "unreachable": 50,
    "throttled": 40,
    "truncated read": 100,
    "stale listing": 300,
    "reordered listing": 20,
    "slept": 800,
    "locks lost": 200,
    "delete: done": 15,
    "prune: killed": 2,
    "objects of garbage removed": 80,
}


def test_the_history_of_the_seed_keeps_every_promise() -> None:
    """First and alone, so that a seed repeats at once what it found."""
    run_repository(SEED)


# Half a minute on two idle cores; a machine that does other things too may take long.
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SOAK_SECONDS > 0, reason="CUTLINE_SOAK asks for the long form")
def test_ten_thousand_histories_keep_every_promise() -> None:
    tally = run_fleet_of_histories(SEED, HISTORIES, run=run_repositories)
    assert tally["histories"] == HISTORIES
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.skipif(SOAK_SECONDS == 0, reason="the long form runs for CUTLINE_SOAK seconds")
def test_histories_keep_every_promise_for_as_long_as_asked() -> None:
    tally = run_fleet_of_histories(SEED, None, SOAK_SECONDS, run=run_repositories)
    assert tally["histories"] >= HISTORIES_PER_TASK
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_every_fault_at_every_call_of_a_command_is_mended_by_the_next(command: str) -> None:
    assert walk_faults(command)["histories"] > 30


@pytest.mark.long
@pytest.mark.parametrize("command", COMMITTING)
def test_every_two_faults_around_a_commit_are_mended_by_the_next_command(command: str) -> None:
    assert walk_commit(command)["histories"] > 100


@pytest.mark.long
@pytest.mark.parametrize(("command", "rival"), list(product(RIVALS, COMMANDS)))
def test_a_command_that_is_stopped_at_any_call_while_another_runs_keeps_every_promise(command: str, rival: str) -> None:
    assert walk_rivals(command, rival)["histories"] > 10


def test_a_broken_promise_names_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise AssertionError("settled: otherwise")

    monkeypatch.setattr("tests.simulation.repository_calm.check_attempts", broken)
    with pytest.raises(PromiseBrokenError, match=r"^CUTLINE_SEED=77: settled: otherwise\n"):
        run_repository(77)
