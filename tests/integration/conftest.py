"""Real servers for the tests of this folder: PostgreSQL fleets and S3 servers, always stopped and deleted.

embedded/server.py bounds how long a start or a stop may take. The report of a failed test includes the last warnings
and errors in the logs of all running fleets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from cutline.embedded.fleet import EmbeddedFleet, is_fleet, stop_fleet
from cutline.embedded.server import EmbeddedNode, log_tail
from cutline.storage.errors import SnapshotError
from tests.integration.left_on_servers import check_nothing_left, revive
from tests.s3.kinds import NamedS3, named_s3
from tests.s3.minio import minio_server
from tests.s3.server import S3Server, s3_server
from tests.s3.versitygw import BUILDING, needs_versitygw, versitygw_server
from tests.servers.dealt import current_server, start_fleet
from tests.servers.fleets import SETTINGS, SharedFleets, fleet_of
from tests.servers.installed import MAJORS, Server, require_server
from tests.stores.azurite import azurite_server
from tests.stores.fake_gcs import fake_gcs_server
from tests.stores.place import StorePlace

SHARED_SHARDS = 2
SHARED_BACKUPS = 1
# A server logs much that nobody needs, so that of a failed test's report little else would be seen.
LOG_LINES_MAX, COMPLAINTS_MAX, COMPLAINT_CHARACTERS_MAX = 100, 5, 300
COMPLAINT = re.compile(r"\b(WARNING|ERROR|FATAL|PANIC):")
RUNNING = pytest.StashKey[list[EmbeddedFleet]]()
# Of these, the ones that tests share.
SHARED = pytest.StashKey[list[EmbeddedFleet]]()


class FleetFactory(Protocol):
    """Starts a fleet for one test, which may damage it; the fleet is deleted after the test."""

    def __call__(
        self,
        shards: int = 1,
        backups: int = 0,
        *,
        schema: bool = True,
        settings: Mapping[str, str] | None = None,
        programs: Path | None = None,
    ) -> EmbeddedFleet: ...


@pytest.fixture(scope="session")
def shared_fleets(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[SharedFleets]:
    """Return the shared fleet of a server; each is started once it is needed, and another if it is gone."""
    running, shared = pytestconfig.stash.setdefault(RUNNING, []), pytestconfig.stash.setdefault(SHARED, [])
    fleets: dict[Server | None, EmbeddedFleet] = {}
    folder, numbers = tmp_path_factory.mktemp("fleet"), itertools.count(1)

    with ExitStack() as stack:

        def fleet_of_server(server: Server | None) -> EmbeddedFleet:
            if server in fleets and fleets[server] not in shared:
                del fleets[server]
            if server not in fleets:
                directory = folder / f"shared-{server.major if server else 'wheel'}-{next(numbers)}"
                fleet = fleet_of(directory, [server] * SHARED_SHARDS, backups=SHARED_BACKUPS)
                fleets[server] = stack.enter_context(fleet)
                running.append(fleets[server])
                shared.append(fleets[server])
            return fleets[server]

        yield fleet_of_server
        for fleet in fleets.values():
            give_up(pytestconfig, fleet)


def give_up(config: pytest.Config, fleet: EmbeddedFleet) -> None:
    """Let no test use the fleet any more; the next that needs one gets another."""
    for fleets in (config.stash[RUNNING], config.stash[SHARED]):
        if fleet in fleets:
            fleets.remove(fleet)


def check_left_running(config: pytest.Config, who: str) -> None:
    """Fail if a server that tests share does not run, once it runs again; `who` is to blame."""
    found = []
    for fleet in [*config.stash.get(SHARED, [])]:
        try:
            found += revive(fleet)
        except SnapshotError as error:
            found.append(f"{fleet.directory.name} can't be used any more: {error}")
            give_up(config, fleet)
    assert not found, f"{who} left servers that others use: {', '.join(found)}"


@pytest.fixture(autouse=True)
def shared_servers_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a shared server stopped, instead of those that come after it."""
    yield
    check_left_running(request.config, request.node.nodeid)


@pytest.fixture(scope="module")
def shared_fleet(shared_fleets: SharedFleets) -> EmbeddedFleet:
    """Two shards with one standby each and the bank's tables, for tests that leave them as they found them."""
    return shared_fleets(current_server(standbys=True))


@pytest.fixture(scope="session")
def mixed_fleet(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[EmbeddedFleet]:
    """A primary of each version that Cutline supports: s1 runs the oldest, the last one the newest; with the bank.

    Any pair of versions is a source and a target of `restore --node`. Tests leave it as they found it.
    """
    running, shared = pytestconfig.stash.setdefault(RUNNING, []), pytestconfig.stash.setdefault(SHARED, [])
    servers = [require_server(major) for major in MAJORS]
    with fleet_of(tmp_path_factory.mktemp("mixed") / "fleet", servers) as fleet:
        running.append(fleet)
        shared.append(fleet)
        yield fleet
        give_up(pytestconfig, fleet)


@pytest.fixture(scope="module", autouse=True)
def shared_fleet_left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the module that leaves something on the shared fleet; otherwise some later module would fail.

    The modules of a folder below this one may share a chain.
    """
    yield
    check_left_running(request.config, request.node.nodeid)
    if request.path.parent == Path(__file__).parent:
        for fleet in request.config.stash.get(RUNNING, []):
            check_nothing_left(fleet)


@pytest.fixture
def fleet_factory(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[FleetFactory]:
    """Start new fleets for this test alone."""
    running = pytestconfig.stash.setdefault(RUNNING, [])
    directories: list[Path] = []

    def make(
        shards: int = 1,
        backups: int = 0,
        *,
        schema: bool = True,
        settings: Mapping[str, str] | None = None,
        programs: Path | None = None,
    ) -> EmbeddedFleet:
        directory = tmp_path / f"fleet-{len(directories) + 1}"
        directories.append(directory)
        given = {**SETTINGS, **(settings or {})}
        fleet = start_fleet(directory, shards=shards, backups=backups, schema=schema, settings=given, programs=programs)
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
    """moto's server. Every test creates its own bucket, here and on the next two servers."""
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw() -> Iterator[S3Server]:
    """A real S3 server, not a test double. The test is skipped on a machine without Go."""
    with versitygw_server() as server:
        yield server


@pytest.fixture(scope="session")
def minio() -> Iterator[S3Server]:
    """MinIO's server. The test is skipped where `make stores` has not installed it."""
    with minio_server() as server:
        yield server


@pytest.fixture(scope="session")
def gs() -> Iterator[StorePlace]:
    """fake-gcs-server. The test is skipped where `make stores` has not installed it."""
    with fake_gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def az() -> Iterator[StorePlace]:
    """Azurite. The test is skipped where `make stores` has not installed it."""
    with azurite_server() as server:
        yield server


@pytest.fixture(scope="session", name="named_s3")
def named_s3_server() -> Iterator[NamedS3]:
    """The server that SNAPSHOT_TEST_S3 names."""
    with named_s3() as server:
        yield server


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build versitygw if a test needs it: the build takes longer than most tests."""
    if not session.config.option.collectonly and any(map(needs_versitygw, session.items)):
        BUILDING.begin()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the build before the test's timeout starts to run."""
    if needs_versitygw(item):
        BUILDING.wait()
    return (yield)


def pytest_sessionfinish() -> None:
    """End the build if it is still running."""
    BUILDING.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the servers complained of last to the report of a failed test."""
    report = yield
    if report.failed:
        for fleet in item.config.stash.get(RUNNING, []):
            for node in fleet.nodes:
                report.sections.append((f"log of {fleet.directory.name} {node.id}", _complaints(node)))
    return report


def _complaints(node: EmbeddedNode) -> str:
    lines = log_tail(node, LOG_LINES_MAX)
    complaints = [line[:COMPLAINT_CHARACTERS_MAX] for line in lines if COMPLAINT.search(line)]
    return "\n".join(complaints[-COMPLAINTS_MAX:]) or f"(none in the last {len(lines)} lines)"


def _delete(directory: Path) -> None:
    # There is none if its start failed, which deletes it, or if the test has deleted it.
    if is_fleet(directory):
        stop_fleet(directory, delete=True)
