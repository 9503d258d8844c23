"""Show each error as soon as a test fails: a run of several processes takes hours, and lists errors at its end."""

from __future__ import annotations

import pytest
from _pytest.terminal import TerminalReporter


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin in the process that reports the run, if there are others: only that one has a terminal."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, TerminalReporter) and session.config.getoption("numprocesses", None):
        session.config.pluginmanager.register(_Failures(terminal))


class _Failures:
    def __init__(self, terminal: TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr).partition("\n")[0]
            self.terminal.ensure_newline()
            self.terminal.write_line(f"{report.when} of {report.nodeid} failed: {reason}")
