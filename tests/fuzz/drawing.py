"""Cases that Hypothesis draws from a seed, in a separate process.

Hypothesis also draws constants that it finds in loaded modules. The cases of a seed must not depend on what else a test
run has loaded, so that a case that failed can be drawn again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.cases import cases
from tests.fuzz.script import Case, format_case, parse_case

# Many of these examples are small, or hardly differ from an earlier one.
EXAMPLES_MAX = 100
STATEMENTS_MIN = 40


class EnoughError(BaseException):
    """Enough cases are drawn; not a failure of an example."""


@dataclass(slots=True)
class Selection:
    """Selects the examples of Hypothesis to run: large ones, mostly of statements that no earlier one had."""

    seen: set[str] = field(default_factory=set)

    def admits(self, case: Case) -> bool:
        statements = [
            statement.sql
            for interval in case.intervals
            for one in interval
            for _, part in one.parts
            for statement in part
        ]
        fresh = {statement for statement in statements if statement not in self.seen}
        self.seen |= fresh
        return len(statements) >= STATEMENTS_MIN and len(fresh) > len(statements) // 2


def draw_cases(seed: int, count: int) -> Iterator[Case]:
    """Draw `count` cases from the seed, all of them before the first is run."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.drawing", str(seed), str(count)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )
    yield from map(parse_case, json.loads(completed.stdout))


def _draw(seed: int, count: int) -> list[Case]:
    found: list[Case] = []
    selection = Selection()

    @seeded(seed)
    @settings(max_examples=EXAMPLES_MAX, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases())
    def draw(case: Case) -> None:
        if selection.admits(case):
            found.append(case)
        if len(found) >= count:
            raise EnoughError

    with suppress(EnoughError):
        draw()
    return found


if __name__ == "__main__":
    drawn_cases = _draw(*map(int, sys.argv[1:]))
    assert all(parse_case(format_case(case)) == case for case in drawn_cases)
    sys.stdout.write(json.dumps([format_case(case) for case in drawn_cases]))
