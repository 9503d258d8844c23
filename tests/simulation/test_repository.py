"""The repository keeps the promises of docs/store-format.md despite lost answers, crashes and stale listings.

The short form runs a thousand random histories, and injects every fault at every call of every command; the long form
(`make soak`) runs random histories for CUTLINE_SOAK=SECONDS. `make test` suspends every command once, and runs every
command once while another is suspended; `make all` tries all pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product

import pytest

from tests.run.soak import SEED, SOAK_SECONDS, first, first_of_each
from tests.simulation.removal_mutants import pins_are_read_for_the_plan_only, pins_look_for_no_removal
from tests.simulation.repository_history import run_repositories, run_repository
from tests.simulation.repository_walk import (
    CHANGING_COMMANDS,
    COMMANDS,
    COMMITTING,
    walk_commit,
    walk_faults,
    walk_rivals,
)
from tests.simulation.runs import HISTORIES_PER_TASK, PromiseBrokenError, check_not_vacuous, run_on_all_cores

HISTORIES = (250, 1_000)
# Per thousand histories; with fewer the simulation would prove nothing. At most a third of the usual counts.
LEAST_PER_THOUSAND = {
    "snapshots and increments committed": 2000,
    "reported nothing": 60,
    "reported unknown": 8,
    "late puts stored": 40,
    "late puts refused": 3,
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
    "suspended": 800,
    "locks lost": 200,
    "delete: done": 15,
    "prune: killed": 2,
    "kept because of conflicts": 1,
    "objects of garbage removed": 80,
    "keep: done": 35,
    "pins that held": 25,
}


def test_the_history_of_the_seed_keeps_every_promise() -> None:
    """Runs first and alone, so that CUTLINE_SEED reproduces a failure at once."""
    run_repository(SEED)


# A thousand take a dozen seconds on two idle cores, longer on a busy machine.
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(SOAK_SECONDS > 0, reason="CUTLINE_SOAK asks for the long form")
@pytest.mark.parametrize("histories", first(HISTORIES))
def test_random_histories_keep_every_promise(histories: int) -> None:
    tally = run_on_all_cores(SEED, histories, run=run_repositories)
    assert tally["histories"] == histories
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.skipif(SOAK_SECONDS == 0, reason="the long form runs for CUTLINE_SOAK seconds")
def test_histories_keep_every_promise_for_as_long_as_asked() -> None:
    tally = run_on_all_cores(SEED, None, SOAK_SECONDS, run=run_repositories)
    assert tally["histories"] >= HISTORIES_PER_TASK
    check_not_vacuous(tally, LEAST_PER_THOUSAND)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_after_any_fault_at_any_call_of_a_command_every_promise_is_kept(command: str) -> None:
    assert walk_faults(command)["histories"] > 30


@pytest.mark.long
@pytest.mark.parametrize("command", COMMITTING)
def test_after_any_two_faults_around_a_commit_every_promise_is_kept(command: str) -> None:
    assert walk_commit(command)["histories"] > 100


@pytest.mark.long
@pytest.mark.parametrize(("command", "rival"), first_of_each(product(CHANGING_COMMANDS, COMMANDS)))
def test_a_command_suspended_at_any_call_while_another_runs_keeps_every_promise(command: str, rival: str) -> None:
    assert walk_rivals(command, rival)["histories"] > 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("mutant", "command", "rival"),
    [(pins_are_read_for_the_plan_only, "prune w", "keep w"), (pins_look_for_no_removal, "keep w", "prune w")],
)
def test_a_pin_or_a_removal_that_does_not_look_for_the_other_is_caught(
    mutant: Callable[[], AbstractContextManager[object]], command: str, rival: str
) -> None:
    with mutant(), pytest.raises(PromiseBrokenError, match=": pinned: "):
        walk_rivals(command, rival)


def test_a_broken_promise_names_the_seed_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise AssertionError("settled: otherwise")

    monkeypatch.setattr("tests.simulation.repository_calm.check_create_runs", fail)
    with pytest.raises(PromiseBrokenError, match=r"^CUTLINE_SEED=77: settled: otherwise\n"):
        run_repository(77)
