"""Report how long a run took, by folder of tests, and its slowest tests.

The process that reports the run has the reports of all processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from _pytest.terminal import TerminalReporter

from tests.run.order import LONG
from tests.run.units import unit_of

SLOWEST, SLOW_SECONDS = 40, 5.0
# A unit that takes longer than this should begin early.
LONG_SECONDS = 40
# A run of few tests needs no table; use --durations.
RUN_TESTS_MIN = 100


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    tests: dict[str, float] = defaultdict(float)
    for report in _reports(terminalreporter):
        tests[report.nodeid] += report.duration
    if len(tests) < RUN_TESTS_MIN:
        return
    folders: dict[str, float] = defaultdict(float)
    units: dict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        folders[_folder_of(test)] += seconds
        units[unit_of(test)] += seconds
    counts = Counter(map(_folder_of, tests))
    terminalreporter.section("what the tests took")
    for folder, seconds in _longest(folders):
        terminalreporter.write_line(f"{seconds:8.1f} s  {counts[folder]:5} tests  {folder}")
    terminalreporter.write_line(f"{sum(folders.values()):8.1f} s  {sum(counts.values()):5} tests  in all; the slowest:")
    for test, seconds in _longest(tests)[:SLOWEST]:
        if seconds > SLOW_SECONDS:
            terminalreporter.write_line(f"{seconds:8.1f} s  {test}")
    late = [
        f"{name} ({seconds:.0f} s)" for name, seconds in _longest(units) if seconds > LONG_SECONDS and name not in LONG
    ]
    if late:
        terminalreporter.write_line(f"add to tests/run/order.py: {', '.join(late)}")


def _reports(terminalreporter: TerminalReporter) -> Iterator[pytest.TestReport]:
    """Yield up to three reports per test: setup, call and teardown."""
    for reports in terminalreporter.stats.values():
        yield from (report for report in reports if isinstance(report, pytest.TestReport))


def _longest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda one: -one[1])


def _folder_of(test: str) -> str:
    return str(PurePosixPath(test.partition("::")[0]).parent)
