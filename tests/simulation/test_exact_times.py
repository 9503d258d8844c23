"""The state at any moment between two cuts keeps the promises of docs/consistency.md, on random interleavings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import pyarrow as pa
import pytest

from cutline.fleet.lsn import Lsn
from cutline.wal.cut import exact_time
from tests.run.soak import SEED, SOAK_SECONDS
from tests.simulation.exact_moments import MOMENTS_PER_HISTORY, run_moments
from tests.simulation.mutants import no_raising
from tests.simulation.runs import PromiseBrokenError, check_not_vacuous, run_on_all_cores

HISTORIES = 60
LEAST_PER_THOUSAND = {
    "moments": 1000 * MOMENTS_PER_HISTORY,
    "early": 1000,
    "late": 10,
    "raised": 500,
    "undecided": 3000,
}
HISTORIES_MAX = 1500


def test_states_at_random_moments_keep_every_promise() -> None:
    check_not_vacuous(run_moments(SEED, HISTORIES), LEAST_PER_THOUSAND)


@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.skipif(SOAK_SECONDS == 0, reason="the long form runs for CUTLINE_SOAK seconds")
def test_states_at_random_moments_keep_every_promise_for_as_long_as_asked() -> None:
    check_not_vacuous(run_on_all_cores(SEED, None, SOAK_SECONDS, run_moments), LEAST_PER_THOUSAND)


def every_commit_that_is_not_later() -> AbstractContextManager[object]:
    """Take a node's position behind its last commit that is not later, also if a later commit precedes it."""

    def broken(events: pa.Table, earlier: Lsn, later: Lsn, microseconds: int) -> Lsn:
        rows = events.select(["op", "lsn", "end_lsn", "seq"]).to_pylist()
        ends = [
            row["end_lsn"]
            for row in rows
            if row["op"] in b"CK" and earlier <= row["lsn"] < later and row["seq"] <= microseconds
        ]
        return Lsn(max(ends, default=earlier))

    return patch.object(exact_time, "position_at", broken)


@pytest.mark.parametrize(
    ("mutant", "promise"),
    [(no_raising, "atomic"), (every_commit_that_is_not_later, "exact")],
    ids=["no raising", "the last commit that is not later"],
)
def test_a_broken_rule_is_caught(mutant: Callable[[], AbstractContextManager[object]], promise: str) -> None:
    for seed in range(SEED, SEED + HISTORIES_MAX):
        try:
            with mutant():
                run_moments(seed, 1)
        except PromiseBrokenError as error:
            if str(error).startswith(f"CUTLINE_SEED={seed}: {promise}"):
                run_moments(seed, 1)
                return
    pytest.fail(f"CUTLINE_SEED={SEED}: {HISTORIES_MAX} histories, and none broke {promise!r}")
