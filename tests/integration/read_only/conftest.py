"""Servers for the tests of this folder only, which end sessions on them and make databases read-only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet, Node
from cutline.nodes.connections import connect
from cutline.nodes.publications import ensure_publications
from tests.commands.snapshot_runs import configure_fleet
from tests.integration.read_only.frozen_nodes import FLEET_ID
from tests.servers.dealt import start_fleet


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    directory = tmp_path_factory.mktemp("read-only") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=0)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture
def fleet(servers: EmbeddedFleet, tmp_path: Path) -> Fleet:
    """The servers as a fleet with the publications that `init` creates."""
    found = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    for one in found.primaries:
        with connect(one) as connection:
            ensure_publications(connection, FLEET_ID, [])
    return found


@pytest.fixture
def node(fleet: Fleet) -> Node:
    return fleet.primaries[0]
