"""Cases that Hypothesis draws of a seed, in a process of their own.

Hypothesis also draws constants that it finds in the modules that are loaded. What a seed makes must not depend on what
else a test run has loaded: a case that failed has to be drawn again.
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
from tests.fuzz.script import Case, read, written

# Of these examples many are small, or hardly differ from one before.
EXAMPLES_MAX = 100
STATEMENTS_MIN = 40


class EnoughError(BaseException):
    """As many cases as were asked for; no failure of an example."""


@dataclass(slots=True)
class Chosen:
    """Which of Hypothesis's examples are run: large ones, mostly of statements that were in none before."""

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


def drawn(seed: int, count: int) -> Iterator[Case]:
    """As many cases of that seed; they are made at once, and run later."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.drawing", str(seed), str(count)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )
    yield from map(read, json.loads(done.stdout))


def _draw(seed: int, count: int) -> list[Case]:
    found: list[Case] = []
    chosen = Chosen()

    @seeded(seed)
    @settings(max_examples=EXAMPLES_MAX, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases())
    def draw(case: Case) -> None:
        if chosen.admits(case):
            found.append(case)
        if len(found) >= count:
            raise EnoughError

    with suppress(EnoughError):
        draw()
    return found


if __name__ == "__main__":
    drawn_cases = _draw(*map(int, sys.argv[1:]))
    assert all(read(written(case)) == case for case in drawn_cases)
    sys.stdout.write(json.dumps([written(case) for case in drawn_cases]))
