"""Servers that the tests of this folder share and nobody else: sessions are ended on them, and databases read-only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from fleet.config import Fleet, Node
from fleet.nodes.connections import connect
from fleet.tables.publications import ensure_publications
from tests.integration.read_only.frozen_nodes import FLEET_ID
from tests.snapshot_runs import described


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    directory = tmp_path_factory.mktemp("read-only") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=0)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture
def fleet(servers: EmbeddedFleet, tmp_path: Path) -> Fleet:
    """The servers as a fleet whose publications are there, as `init` leaves them."""
    found = described(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    for one in found.primaries:
        with connect(one) as connection:
            ensure_publications(connection, FLEET_ID, [])
    return found


@pytest.fixture
def node(fleet: Fleet) -> Node:
    return fleet.primaries[0]
