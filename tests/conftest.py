"""One Spark session for all tests of a process, and the plugins that order, interrupt and time a run.

A process can have only one session at a time, and tests in several folders need it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.terminal import TerminalReporter

from cutline.spark.session_folder import claimed_folder, delete_dead_sessions
from cutline.spark.start import start_spark_at
from tests.programs.lacking import lacking_line
from tests.run.quick_spark import SETTINGS
from tests.run.soak import SEED
from tests.servers import extensions, installed
from tests.servers.installed import check_required

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = [
    "tests.run.failures",
    "tests.run.selection",
    "tests.run.folding",
    "tests.run.interrupts",
    "tests.run.memory_folder",
    "tests.run.order",
    "tests.run.process_state",
    "tests.run.times",
    "tests.servers.dealt",
]


def pytest_configure() -> None:
    """Export the seed, so that started programs, the run's other processes and its repeated parts draw the same."""
    os.environ["CUTLINE_SEED"] = str(SEED)
    check_required()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the setting that repeats the draws of this run, and the servers that it uses.

    pytest's own header, with what pytest_report_header returns, is left out by -q.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for line in (f"CUTLINE_SEED={SEED}", *installed.header(), *extensions.header()):
            reporter.write_line(line)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say how many tests were skipped for lack of which program."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple)]
    if line := lacking_line(reasons):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session at local[2]; stopped, JVM included, after the last test."""
    parent = Path(tempfile.gettempdir())
    delete_dead_sessions(parent)
    with claimed_folder(parent) as folder:
        # pytest's own temporary folders stay where they are: those of failed tests are kept.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder))
            start = start_spark_at("local[2]", SETTINGS, "tests")
        with start:
            yield start.session()
