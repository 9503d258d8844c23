"""Check clean chains of random databases: a check must find nothing in any of them.

The databases, their changes and the creates are those of the fuzzer (tests/fuzz); instead of a restore of each
snapshot and increment, there is a check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.drawing import draw_cases
from tests.fuzz.ground import CASES_AT_ONCE, ground_in
from tests.fuzz.merging import merge_cases
from tests.fuzz.script import format_case
from tests.fuzz.state import FoundError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Cases are drawn in a process of its own, which takes a second.
CASES_DRAWN = 12


@dataclass(slots=True)
class CleanReport:
    """The snapshots and increments that were checked until now, the workloads they are of, and the alarms."""

    checked: int = 0
    workloads: int = 0
    alarms: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.checked} snapshots and increments of {self.workloads} workloads", *self.alarms])


def check_clean(folder: Path, spark: SparkSession, seed: int, count: int, standbys: int) -> Iterator[CleanReport]:
    """Check at least `count` snapshots and increments of shards with so many standbys; yield the report as it grows."""
    report = CleanReport()
    together = CASES_AT_ONCE[standbys]
    with ground_in(folder, spark, standbys) as ground:
        for round_seed in itertools.count(seed):
            cases = [*draw_cases(round_seed, CASES_DRAWN)]
            for at in range(0, len(cases), together):
                if report.checked >= count:
                    return
                case = merge_cases(cases[at : at + together])
                case.options.update(judge="check")
                try:
                    ground.run(case)
                except FoundError as error:
                    report.alarms.append(f"seed {round_seed}: {error}\n{format_case(case)}")
                report.checked = ground.figures.checked
                report.workloads = ground.figures.cases
                yield report
