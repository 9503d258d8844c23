"""Counts and times of a run of cases."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.fuzz.servers import Shards


@dataclass(slots=True)
class Figures:
    """Counts of a run; `seconds` by step, `refused` by SQLSTATE, `failed_setup` the setup's refused statements."""

    cases: int = 0
    transactions: int = 0
    statements: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed_setup: list[str] = field(default_factory=list)
    increments: int = 0
    meanwhile: int = 0
    refusals: int = 0
    restored: int = 0
    rows: int = 0
    checked: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, shards: Shards) -> None:
        self.transactions += shards.transactions
        self.statements += shards.statements
        self.refused += shards.refused

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of the block to that of `what`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += round(time.monotonic() - began, 3)  # type: ignore[assignment]  # not a count

    def __str__(self) -> str:
        times = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in self.seconds.items())
        return (
            f"{self.cases} cases, {self.transactions} transactions, {self.meanwhile} of them while a create ran, "
            f"{self.statements} statements ({self.refused.total()} of them refused by PostgreSQL), "
            f"{self.increments} increments ({self.refusals} after a refusal); "
            f"{self.restored} states restored with {self.rows} rows, {self.checked} checked; {times}"
        )
