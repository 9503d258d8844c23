"""One chain for all tests of this folder, created once; each test damages a copy of its store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cutline.check.verify
from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import Ready
from tests.integration.damage.copied_chain import CopiedChain, copied_chain, copy_chain
from tests.integration.damage.stored_chain import StoredChain, copy_store, stored_chain
from tests.run.soak import SEED
from tests.servers.dealt import current_server
from tests.servers.fleets import SharedFleets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def shared_fleet(shared_fleets: SharedFleets) -> EmbeddedFleet:
    """The shared fleet of this folder's version: all its modules have the same."""
    return shared_fleets(current_server(standbys=True))


@pytest.fixture(autouse=True)
def reads_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives as small as these are read by the driver: in every other test, drawn by the seed, by jobs."""
    if random.Random(f"{SEED} {request.node.nodeid}").random() < 0.5:
        monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", 0)


@pytest.fixture(scope="package")
def original(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoredChain]:
    with stored_chain(shared_fleet, tmp_path_factory.mktemp("damage"), Ready(spark)) as found:
        yield found


@pytest.fixture
def stored(original: StoredChain, tmp_path: Path) -> StoredChain:
    return copy_store(original, tmp_path)


@pytest.fixture(scope="module")
def quiet(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CopiedChain]:
    with copied_chain(shared_fleet, tmp_path_factory.mktemp("copies"), Ready(spark)) as found:
        yield found


@pytest.fixture
def copied(quiet: CopiedChain, tmp_path: Path) -> Iterator[CopiedChain]:
    try:
        yield copy_chain(quiet, tmp_path)
    finally:
        quiet.drop_databases()
