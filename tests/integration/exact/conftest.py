"""The chain of tables of every kind, and a shard of another PostgreSQL version than the wheel's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.chains.exact_chain import History, exact_history
from tests.commands.snapshot_runs import Ready
from tests.run.soak import SOAK_SECONDS
from tests.servers.fleets import SharedFleets, fleet_of
from tests.servers.installed import MORE_FOLDERS, find_server, id_of
from tests.servers.packages import WHOLE, WITH_ICU, Package

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The builds of the other shard: one with ICU, XML and TLS, in the long form every build.
BUILDS: tuple[Package | Path, ...] = (*WITH_ICU[:1], *(WHOLE + WITH_ICU[1:]) * bool(SOAK_SECONDS), *MORE_FOLDERS)


@pytest.fixture(scope="package")
def shared_fleet(shared_fleets: SharedFleets) -> EmbeddedFleet:
    """The shared fleet of the wheel, which has the newest types; another shard runs the other versions."""
    return shared_fleets(None)


@pytest.fixture(scope="package", params=BUILDS, ids=id_of)
def build(request: pytest.FixtureRequest) -> Package | Path:
    """What the other shard runs, if it is installed."""
    chosen: Package | Path = request.param
    return chosen


@pytest.fixture(scope="package")
def mixed(build: Package | Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet | None]:
    """A shard of the wheel's version and one of the other version, each with a standby, without the bank."""
    other = find_server(build)
    if other is None:
        yield None
        return
    directory = tmp_path_factory.mktemp("mixed") / "fleet"
    with fleet_of(directory, [None, other], backups=1, schema=False) as fleet:
        yield fleet


@pytest.fixture(scope="package")
def history(
    shared_fleet: EmbeddedFleet,
    mixed: EmbeddedFleet | None,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[History]:
    """The chain, created and restored."""
    other = mixed.primaries[1] if mixed else None
    nodes = (other, *mixed.backups_of(other)) if mixed and other else ()
    with exact_history(shared_fleet, nodes, tmp_path_factory.mktemp("exact"), Ready(spark)) as chain:
        yield chain
