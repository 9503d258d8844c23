"""Real servers for the tests of this folder: PostgreSQL fleets and an S3 server, always stopped and deleted.

Starting and stopping have bounds of their own (fleet/embedded_server.py). When a test fails, the ends of the
logs of all fleets that run are part of its report.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from fleet.embedded import EmbeddedFleet, is_fleet, start_fleet, stop_fleet
from fleet.embedded_server import log_tail
from tests.s3_server import S3Server, s3_server

SHARED_SHARDS = 2
SHARED_BACKUPS = 1
LOG_LINES_MAX = 30
RUNNING = pytest.StashKey[list[EmbeddedFleet]]()


class FleetFactory(Protocol):
    """Makes a running fleet for one test, which may do to it what it likes; deleted after the test."""

    def __call__(
        self,
        shards: int = 1,
        backups: int = 0,
        *,
        schema: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> EmbeddedFleet: ...


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[EmbeddedFleet]:
    """Two shards with one standby each and the bank's tables, for the tests that leave them whole."""
    directory = tmp_path_factory.mktemp("fleet") / "shared"
    running = pytestconfig.stash.setdefault(RUNNING, [])
    try:
        fleet = start_fleet(directory, shards=SHARED_SHARDS, backups=SHARED_BACKUPS)
        running.append(fleet)
        yield fleet
        running.remove(fleet)
    finally:
        _delete(directory)


@pytest.fixture
def fleet_factory(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[FleetFactory]:
    """Make fresh fleets for this test alone."""
    running = pytestconfig.stash.setdefault(RUNNING, [])
    directories: list[Path] = []

    def make(
        shards: int = 1,
        backups: int = 0,
        *,
        schema: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> EmbeddedFleet:
        directory = tmp_path / f"fleet-{len(directories) + 1}"
        directories.append(directory)
        fleet = start_fleet(directory, shards=shards, backups=backups, schema=schema, settings=settings)
        running.append(fleet)
        return fleet

    try:
        yield make
    finally:
        running[:] = [fleet for fleet in running if fleet.directory not in directories]
        for directory in directories:
            _delete(directory)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server; take a bucket of your own from it."""
    with s3_server() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the servers' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for fleet in item.config.stash.get(RUNNING, []):
            for node in fleet.nodes:
                report.sections.append(
                    (f"log of {fleet.directory.name} {node.id}", _log_text(log_tail(node, LOG_LINES_MAX)))
                )
    return report


def _log_text(lines: list[str]) -> str:
    return "\n".join(lines) or "(empty, or the server is deleted)"


def _delete(directory: Path) -> None:
    # A fleet that could not be made whole has deleted itself; one that a test deleted is gone.
    if is_fleet(directory):
        stop_fleet(directory, delete=True)
