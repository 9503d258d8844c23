"""Check clean chains of random databases: a check must find nothing in any of them.

The databases, their changes and the creates are those of the fuzzer (tests/fuzz); instead of a restore of each
snapshot and increment, there is a check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fuzz.drawing import draw_cases
from tests.fuzz.ground import Ground
from tests.fuzz.merging import merge_cases
from tests.fuzz.state import FoundError

# Cases are drawn in a process of its own, which takes a second.
CASES_DRAWN = 12


@dataclass(slots=True)
class CleanReport:
    """The snapshots and increments that were checked until now, the workloads they are of, and the alarms."""

    checked: int = 0
    workloads: int = 0
    alarms: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.checked} snapshots and increments of {self.workloads} workloads, {len(self.alarms)} alarms"


def check_clean(ground: Ground, seed: int, count: int, together: int) -> Iterator[CleanReport]:
    """Check at least `count` snapshots and increments on these shards; yield the report as it grows.

    `together` cases run at once, each on shards of its own.
    """
    report = CleanReport()
    before = ground.figures.checked, ground.figures.cases
    for round_seed in itertools.count(seed):
        cases = [*draw_cases(round_seed, CASES_DRAWN)]
        for at in range(0, len(cases), together):
            if report.checked >= count:
                return
            case = merge_cases(cases[at : at + together])
            # It starts a server for each shard.
            case.options.update(judge="check", restorable="no" if at else "yes")
            try:
                ground.run(case)
            except FoundError as error:
                report.alarms.append(f"CUTLINE_SEED={round_seed}: {error}")
            report.checked, report.workloads = ground.figures.checked - before[0], ground.figures.cases - before[1]
            yield report
