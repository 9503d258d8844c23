"""The simulation detects every deliberately broken protocol, by a promise that it breaks."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from tests.run.soak import SEED, first
from tests.simulation.repository_history import run_repository
from tests.simulation.repository_mutants import MUTANTS, Mutant
from tests.simulation.runs import PROCESSES_MAX, PromiseBrokenError

# The mutant that shows most rarely does so in one history of three hundred.
HISTORIES_MAX = 6000
TRIED_MAX = 3


def catching_seed(mutant: Mutant, first: int) -> int | None:
    """The first seed whose history detects the mutant; None if none of HISTORIES_MAX does.

    Raises PromiseBrokenError if that history breaks a promise even without the mutant.
    """
    promise = re.compile(rf"CUTLINE_SEED=\d+: ({MUTANTS[mutant]}):")
    for seed in range(first, first + HISTORIES_MAX):
        try:
            with mutant():
                run_repository(seed)
        except PromiseBrokenError as error:
            if promise.match(str(error)):
                run_repository(seed)
                return seed
    return None


@pytest.fixture(scope="module")
def caught(request: pytest.FixtureRequest) -> Iterator[Mapping[Mutant, Future[int | None]]]:
    """The searches for all mutants, in parallel processes: a mutant patches the code of its whole process."""
    processes = ProcessPoolExecutor(
        min(os.cpu_count() or 1, PROCESSES_MAX), mp_context=multiprocessing.get_context("spawn")
    )
    # Those of the run: `make test` has a few of them.
    callspecs = [getattr(item, "callspec", None) for item in request.session.items]
    tried = [found.params["mutant"] for found in callspecs if found and found.params.get("mutant") in MUTANTS]
    try:
        yield {mutant: processes.submit(catching_seed, mutant, SEED) for mutant in tried}
    finally:
        processes.shutdown(cancel_futures=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", first(MUTANTS, TRIED_MAX), ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_broken_protocol_is_caught(caught: Mapping[Mutant, Future[int | None]], mutant: Mutant) -> None:
    """The seed that catches the mutant must also keep every promise under the unbroken protocol."""
    assert caught[mutant].result() is not None, (
        f"CUTLINE_SEED={SEED}: {HISTORIES_MAX} histories, and none broke {MUTANTS[mutant]!r}"
    )
