"""Measurements, comparisons and failures as plain values, independent of the tools."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

SCHEMA = "cutline/bench/1"
Result = TypeVar("Result")


@dataclass(slots=True)
class Measurement:
    """The runs of one task by one tool, in order; `sizes_bytes` is filled if the task stores something."""

    seconds: list[float] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)

    def median(self, unit: str) -> float | None:
        """Return the median of the runs in `unit` ("seconds" or "bytes"); None if there are no runs."""
        found = self.seconds if unit == "seconds" else self.sizes_bytes
        return statistics.median(found) if found else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of `task` to `peer` in `unit`, or the figure itself if `peer` is None; `aim` is the upper bound."""

    task: str
    peer: str | None
    unit: str
    aim: float | None


COMPARISONS = (
    Comparison("create", "pg_dump", "seconds", 1.5),
    Comparison("create", "pg_dump", "bytes", None),
    Comparison("increment", "pg_recvlogical", "seconds", 0.75),
    Comparison("increment", "pg_basebackup --incremental", "seconds", None),
    Comparison("increment", "pg_basebackup --incremental", "bytes", 0.02),
    Comparison("restore", "pg_restore", "seconds", 1.0),
    Comparison("restore of 50 increments", "restore", "seconds", 1.1),
    Comparison("check", "create", "seconds", 0.4),
    Comparison("encrypted create", "plain create", "seconds", 1.1),
    Comparison("encrypted check", "plain check", "seconds", 1.1),
    Comparison("encrypted restore", "plain restore", "seconds", 1.1),
    Comparison("encrypted create", "plain create", "bytes", None),
    Comparison("cold increment", None, "seconds", 4.0),
)


@dataclass(frozen=True, slots=True)
class BenchmarkFailure:
    """A failed step, which has no figure."""

    task: str
    problem: str


@dataclass(frozen=True, slots=True)
class BenchmarkVerdict:
    """The result of a comparison; `value` is None if either side was not measured."""

    comparison: Comparison
    value: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the aim is met; None if there is no aim or no value."""
        aim = self.comparison.aim
        return None if aim is None or self.value is None else self.value <= aim


@dataclass(slots=True)
class Results:
    """All results of a run."""

    measurements: dict[str, Measurement] = field(default_factory=dict)
    failures: list[BenchmarkFailure] = field(default_factory=list)

    def measure(
        self, task: str, work: Callable[[], Result], size: Callable[[Result], int] | None = None
    ) -> Result | None:
        """Time `work` as one run of `task`; if it fails, record the failure and return None."""
        began = time.perf_counter()
        result = self.attempt(task, work)
        seconds = time.perf_counter() - began
        if result is not None:
            self.add(task, seconds, size(result) if size else None)
        return result

    def attempt(self, task: str, work: Callable[[], Result]) -> Result | None:
        """Run `work` without timing it; if it fails, record the failure and return None."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # reported with the figures, and makes the run fail
            self.failures.append(BenchmarkFailure(task, f"{type(error).__name__}: {error}"))
            return None

    def add(self, task: str, seconds: float, size_bytes: int | None = None) -> None:
        """Add one run."""
        measurement = self.measurements.setdefault(task, Measurement())
        measurement.seconds.append(seconds)
        if size_bytes is not None:
            measurement.sizes_bytes.append(size_bytes)

    def median(self, task: str, unit: str) -> float | None:
        """Return the median of a task's runs; None if there are no runs."""
        found = self.measurements.get(task)
        return found.median(unit) if found else None

    def verdicts(self) -> list[BenchmarkVerdict]:
        """Return every comparison with its value."""
        return [BenchmarkVerdict(comparison, self._value(comparison)) for comparison in COMPARISONS]

    def _value(self, comparison: Comparison) -> float | None:
        ours = self.median(comparison.task, comparison.unit)
        if ours is None or comparison.peer is None:
            return ours
        theirs = self.median(comparison.peer, comparison.unit)
        return ours / theirs if theirs else None
