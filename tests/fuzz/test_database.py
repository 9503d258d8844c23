"""Random databases with random changes: every increment restores the state that its source had.

The short form runs a few cases. With CUTLINE_SOAK there are as many as there is time for, on fleets with and without
standbys: a case that fails is reduced and stored in found/, and the run continues. CUTLINE_SEED=N repeats the cases of
a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.damage_matrix.clean import check_clean
from tests.fuzz.drawing import draw_cases
from tests.fuzz.figures import Figures
from tests.fuzz.ground import CASES_AT_ONCE, Ground, ground_in
from tests.fuzz.merging import merge_cases
from tests.fuzz.reduce import reduce_case
from tests.fuzz.script import Case, format_case, parse_case
from tests.fuzz.state import FoundError, signature
from tests.run.soak import SEED, SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CASES = CASES_AT_ONCE[0]
# Snapshots and increments that are only checked, on shards with standbys and without.
CHECKED = 8
RUNS_OF_ROUND = 3
REDUCE_SECONDS = 300.0
ROUNDS_OF_FLEET = 6
SHORT_SECONDS_MAX = 900
FILES = sorted(Path(__file__).with_name("cases").glob("*.sql"))
KNOWN = [FILES[start : start + CASES] for start in range(0, len(FILES), CASES)]
FOUND = Path(__file__).with_name("found")


@pytest.mark.timeout(SHORT_SECONDS_MAX)
def test_random_databases_come_back(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    print(f"CUTLINE_SEED={SEED}")  # noqa: T201  # shown when the test fails
    case = merge_cases([*draw_cases(SEED, CASES)])
    # Only the long form judges every state of a run, and checks it.
    case.options.update(judge="last", check="no")
    try:
        ground.run(case)
    except FoundError as error:
        print(format_case(case))  # noqa: T201  # to be put into cases/, for good
        raise FoundError(f"CUTLINE_SEED={SEED}: {error}") from error
    figures = ground.figures
    with capsys.disabled():
        print(f"\nCUTLINE_SEED={SEED}: {figures}")  # noqa: T201  # what was run differs from run to run
    assert figures.cases == CASES
    assert figures.restored > 0
    assert sum(figures.refused.values()) < figures.statements / 2
    assert figures.rows > CASES


@pytest.mark.parametrize("paths", KNOWN, ids=lambda paths: "+".join(path.stem for path in paths))
def test_cases_that_failed_once_come_back(ground: Ground, paths: Sequence[Path]) -> None:
    ground.run(merge_cases([parse_case(path.read_text()) for path in paths]))


@pytest.mark.timeout(SHORT_SECONDS_MAX)
def test_a_check_of_clean_chains_finds_nothing(ground: Ground, tmp_path: Path, spark: SparkSession) -> None:
    """`python -m tests.damage_matrix --clean N` checks more of them."""
    *_, report = check_clean(ground, SEED, CHECKED, CASES)
    assert report.alarms == []
    with ground_in(tmp_path, spark, 1) as with_standbys:
        *_, report = check_clean(with_standbys, SEED + 1, CHECKED, CASES_AT_ONCE[1])
    assert report.alarms == []


@dataclass(slots=True)
class Soak:
    """A long run: failures by signature, each with its first error and how often it came."""

    deadline: float
    failures: dict[str, tuple[str, int]] = field(default_factory=dict)

    def round(self, ground: Ground, seed: int, together: int) -> None:
        cases = [*draw_cases(seed, RUNS_OF_ROUND * together)]
        for number in range(0, len(cases), together):
            if time.monotonic() > self.deadline:
                return
            case = merge_cases(cases[number : number + together])
            try:
                ground.run(case)
            except FoundError as error:
                self.note(ground, case, f"{seed}-{number}", error)
            print(".", end="", flush=True)  # noqa: T201  # a case may take a minute on a busy machine

    def note(self, ground: Ground, case: Case, name: str, error: FoundError) -> None:
        kind = signature(error)
        text, count = self.failures.get(kind, ("", 0))
        if not count:
            text = f"{name}: {error}"
            print(f"\n{text}", flush=True)  # noqa: T201  # at once: hours may follow

            def fails(smaller: Case) -> bool:
                try:
                    ground.run(smaller)
                except FoundError as found:
                    return signature(found) == kind
                return False

            FOUND.mkdir(exist_ok=True)
            (FOUND / f"{name}.whole.sql").write_text(f"{error}\n{format_case(case)}")
            # The runs that reduce a case don't count as cases.
            counted, ground.figures = ground.figures, Figures()
            small = reduce_case(case, fails, REDUCE_SECONDS)
            ground.figures = counted
            (FOUND / f"{name}.sql").write_text(f"{error}\n{format_case(small)}")
        self.failures[kind] = text, count + 1


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: make fuzz")
@pytest.mark.timeout(SOAK_SECONDS + 1200)
def test_random_databases_come_back_for_hours(
    tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = Soak(time.monotonic() + SOAK_SECONDS)
    seed = SEED
    while time.monotonic() < soak.deadline:
        for backups, together in CASES_AT_ONCE.items():
            directory = tmp_path / f"from-{seed}-{backups}"
            directory.mkdir()
            with capsys.disabled(), ground_in(directory, spark, backups) as ground:
                for _ in range(ROUNDS_OF_FLEET):
                    soak.round(ground, seed, together)
                    print(f"\nto CUTLINE_SEED={seed}, {backups} standbys: {ground.figures}", flush=True)  # noqa: T201
                    seed += 1
    assert not soak.failures, "\n\n".join(f"{count} times: {text}" for text, count in soak.failures.values())
