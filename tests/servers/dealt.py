"""The PostgreSQL version of a test's fleets: dealt to modules by a fixed rule, the checksum of the module's name.

So each test runs on one version, and the tests as a whole on every version. A module, or a folder whose modules share
servers, always gets the same version; the report of a failed test names it. `SNAPSHOT_TEST_POSTGRESQL=15` chooses a
version for all tests. Standbys can decode from version 16 on, so the rule never deals 15 to a fleet with standbys. A
test that needs a certain version declares it:

    pytestmark = pytest.mark.postgresql(18, reason="15 to 17 lack …")
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.embedded.fleet import start_fleet as start_fleet_of_wheel
from tests.run.units import unit_of
from tests.servers.installed import MAJORS, SERVERS, Server

NEWEST = max(MAJORS)
# The first version in which a standby can decode its WAL.
DECODING_STANDBYS = 16
CHOSEN = int(os.environ.get("SNAPSHOT_TEST_POSTGRESQL", "0"))
_running: list[pytest.Item] = []


def dealt_version(unit: str, *, standbys: bool) -> int:
    """Return the version that the rule deals to a module or folder."""
    if CHOSEN:
        return CHOSEN
    versions = [version for version in MAJORS if version >= DECODING_STANDBYS or not standbys]
    return versions[zlib.crc32(unit.encode()) % len(versions)]


def version_for(item: pytest.Item, *, standbys: bool) -> int:
    """Return the version of a test's fleets: the newest if the dealt version is not installed."""
    marker = item.get_closest_marker("postgresql")
    version = int(marker.args[0]) if marker else dealt_version(unit_of(item.nodeid), standbys=standbys)
    return version if version in SERVERS else NEWEST


def standbys_decode() -> bool:
    """Return whether standbys can decode in this run: they can, unless an older version is chosen for all tests."""
    return not CHOSEN or CHOSEN >= DECODING_STANDBYS


def current_server(*, standbys: bool) -> Server | None:
    """Return the server for a fleet of the running test; None for the wheel's server, which has the newest version."""
    version = version_for(_running[-1], standbys=standbys) if _running else NEWEST
    return None if version == NEWEST else SERVERS[version]


def start_fleet(
    directory: Path,
    *,
    shards: int,
    backups: int,
    settings: Mapping[str, str] | None = None,
    schema: bool = True,
    like_shared: bool = False,
    programs: Path | None = None,
) -> EmbeddedFleet:
    """Start a fleet as `embedded.fleet.start_fleet` does, with the version dealt to the running test.

    `like_shared`: use the version of the shared fleet, which has standbys. `programs`: a copy of the server's programs.
    """
    server = current_server(standbys=backups > 0 or like_shared)
    folder = programs or (server.programs if server else None)
    of_nodes = {f"s{number}": folder for number in range(1, shards + 1)} if folder else {}
    return start_fleet_of_wheel(
        directory, shards=shards, backups=backups, settings=settings, schema=schema, programs=of_nodes
    )


@contextmanager
def fleet_and_target(folder: Path, shards: int) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    """Run a fleet whose shards have a standby each, and a fleet of the same version to restore into, in `folder`."""
    with ExitStack() as stack:
        fleets: list[EmbeddedFleet] = []
        for name, backups in (("fleet", 1), ("target", 0)):
            fleets.append(start_fleet(folder / name, shards=shards, backups=backups, like_shared=True))
            stack.callback(stop_fleet, folder / name, delete=True)
        fleet, target = fleets
        yield fleet, target


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "postgresql(version, reason): the version that the fleets of a test need, and why"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record the running test, so that every fixture that it sets up gets its version."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the dealt version to the report of a failed test."""
    report = yield
    if report.failed:
        versions = [version_for(item, standbys=standbys) for standbys in (False, True)]
        line = f"{versions[0]}, with standbys {versions[1]}; to choose: SNAPSHOT_TEST_POSTGRESQL={versions[0]}"
        report.sections.append(("PostgreSQL of this module", line))
    return report


@contextmanager
def start_pair(folder: Path) -> Generator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    """Run a fleet of two shards with a standby each, and two servers that it is restored to."""
    try:
        fleet = start_fleet(folder / "fleet", shards=2, backups=1)
        yield fleet, start_fleet(folder / "target", shards=2, backups=0, like_shared=True)
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)
