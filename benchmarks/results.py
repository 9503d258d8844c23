"""Measurements, comparisons and failures as plain values, independent of the tools."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

SCHEMA = "cutline/bench/1"
Result = TypeVar("Result")


@dataclass(slots=True)
class Measurement:
    """The runs of one task by one tool, in order; `sizes_bytes` is filled if the task stores something.

    `cpu_seconds` and `peak_bytes`, the most memory by kind of process, are known of commands that were processes of
    their own.
    """

    seconds: list[float] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def runs(self, unit: str) -> Sequence[float]:
        """Return the figures of the runs in `unit`: "seconds", "bytes" or "cpu"."""
        return {"seconds": self.seconds, "bytes": self.sizes_bytes, "cpu": self.cpu_seconds}[unit]

    def median(self, unit: str) -> float | None:
        """Return the median of the runs in `unit`; None if there are no runs."""
        found = self.runs(unit)
        return statistics.median(found) if found else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of `task` to `peer` in `unit`, or the figure itself if `peer` is None; `aim` is the upper bound.

    It is the ratio of the medians, or the median of the ratios of the first runs, of the second, and so on, if that is
    higher. So an aim is met only if both hold.
    """

    task: str
    peer: str | None
    unit: str
    aim: float | None


# The users' case first: every command is a process of its own, and the rows are realistic.
COMPARISONS = (
    Comparison("create", "pg_dump", "seconds", 1.0),
    Comparison("create", "pg_dump", "bytes", None),
    Comparison("create", "pg_basebackup", "seconds", None),
    Comparison("create", "pgBackRest full", "seconds", None),
    Comparison("increment", "pgBackRest incr", "seconds", 0.7),
    Comparison("increment", "pgBackRest incr", "bytes", None),
    Comparison("check of increment 2", "create of the same state", "seconds", 0.8),
    Comparison("restore of increment 2", "pg_restore", "seconds", 1.0),
    Comparison("restore of the full snapshot", "pg_restore", "seconds", 0.9),
    Comparison("small: create", None, "seconds", 2.5),
    Comparison("small: check", None, "seconds", 2.0),
    Comparison("small: restore", None, "seconds", 3.0),
    Comparison("tables: create", "tables: pg_dump", "seconds", 1.5),
    Comparison("tables: increment", None, "seconds", 3.0),
    Comparison("tables: restore", "tables: pg_restore", "seconds", 1.2),
    Comparison("changes: check of lines added", "changes: check of updates", "seconds", 1.5),
    Comparison("changes: check of lines updated", "changes: check of updates", "seconds", 1.5),
    Comparison("changes: check of values left out", "changes: check of updates", "seconds", None),
    Comparison("changes: restore of lines added", "changes: restore of updates", "seconds", 1.5),
    Comparison("changes: restore of lines updated", "changes: restore of updates", "seconds", 1.5),
    Comparison("changes: restore of values left out", "changes: restore of updates", "seconds", None),
    Comparison("writers: p99.9 during create", "writers: p99.9 alone", "seconds", 1.1),
    Comparison("writers: p99.9 during increments", "writers: p99.9 alone", "seconds", 1.1),
    Comparison("writers: p99.9 during create with a limit", "writers: p99.9 alone", "seconds", 1.1),
    Comparison("writers: p99.9 during create", "writers: p99.9 during pg_dump", "seconds", None),
    Comparison("writers: p50 during create", "writers: p50 alone", "seconds", None),
    Comparison("writers: p50 during increments", "writers: p50 alone", "seconds", None),
    Comparison("cluster: create on one worker", "cluster: create on one core", "seconds", None),
    Comparison("cluster: check on one worker", "cluster: check on one core", "seconds", None),
    Comparison("cluster: restore on one worker", "cluster: restore on one core", "seconds", None),
    Comparison("cluster: create on two workers", "cluster: create on one worker", "seconds", None),
    Comparison("cluster: check on two workers", "cluster: check on one worker", "seconds", None),
    Comparison("cluster: restore on two workers", "cluster: restore on one worker", "seconds", None),
    Comparison("cluster: work of create on one worker", "cluster: work of create on one core", "seconds", 1.1),
    Comparison("cluster: work of check on one worker", "cluster: work of check on one core", "seconds", 1.1),
    Comparison("cluster: work of restore on one worker", "cluster: work of restore on one core", "seconds", 1.1),
    Comparison("cluster: work of create on two workers", "cluster: work of create on one worker", "seconds", None),
    Comparison("cluster: work of check on two workers", "cluster: work of check on one worker", "seconds", None),
    Comparison("cluster: work of restore on two workers", "cluster: work of restore on one worker", "seconds", None),
    Comparison("workers: create on two workers", "workers: create on one worker", "seconds", None),
    Comparison("workers: check on two workers", "workers: check on one worker", "seconds", None),
    Comparison("workers: restore on two workers", "workers: restore on one worker", "seconds", None),
    Comparison("warm create", "warm pg_dump", "seconds", 1.5),
    Comparison("warm create", "warm pg_dump", "bytes", None),
    Comparison("warm increment", "pg_recvlogical", "seconds", 0.75),
    Comparison("warm increment", "pg_basebackup --incremental", "seconds", None),
    Comparison("warm increment", "pg_basebackup --incremental", "bytes", 0.02),
    Comparison("warm restore", "warm pg_restore", "seconds", 1.0),
    Comparison("warm restore of 50 increments", "warm restore", "seconds", 1.1),
    Comparison("warm check", "warm create", "seconds", 0.4),
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

    def note_size(self, task: str, size_bytes: int) -> None:
        """Add the number of bytes that the last run stored."""
        self.measurements[task].sizes_bytes.append(size_bytes)

    def note_processes(self, task: str, cpu_seconds: float, peak_bytes: Mapping[str, int]) -> None:
        """Add the processor time and the memory of the last run's processes."""
        measurement = self.measurements[task]
        measurement.cpu_seconds.append(cpu_seconds)
        for kind, size in peak_bytes.items():
            measurement.peak_bytes[kind] = max(measurement.peak_bytes.get(kind, 0), size)

    def verdicts(self) -> list[BenchmarkVerdict]:
        """Return every comparison with its value."""
        return [BenchmarkVerdict(comparison, self._value(comparison)) for comparison in COMPARISONS]

    def _value(self, comparison: Comparison) -> float | None:
        ours = self._runs(comparison.task, comparison.unit)
        if not ours or comparison.peer is None:
            return statistics.median(ours) if ours else None
        theirs = self._runs(comparison.peer, comparison.unit)
        if not theirs or not all(theirs):
            return None
        ratio = statistics.median(ours) / statistics.median(theirs)
        if len(ours) != len(theirs):
            return ratio
        # Most of them took turns, and between two rounds, the machine may become a third slower.
        return max(ratio, statistics.median(one / other for one, other in zip(ours, theirs, strict=True)))

    def _runs(self, task: str, unit: str) -> Sequence[float]:
        found = self.measurements.get(task)
        return found.runs(unit) if found else ()
