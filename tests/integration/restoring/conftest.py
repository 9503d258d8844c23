"""The place that the tests of this folder share; each test makes and drops its target's databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Node
from tests.commands.snapshot_runs import configure_fleet, dropping_slots
from tests.integration.restoring.filled import tables_to_fill
from tests.integration.restoring.target_place import SHARDS, Place, make_place
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Place]:
    """Servers of their own: other tests' databases would be in the way."""
    folder = tmp_path_factory.mktemp("restoring")
    servers = start_fleet(folder / "fleet", shards=SHARDS, backups=0, settings={"fsync": "off"})
    try:
        fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
        place = make_place(servers, fleet, spark)
        with dropping_slots(place.fleet):
            yield place
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture(scope="module")
def node(place: Place) -> Iterator[Node]:
    """A target with tables to fill, without the event trigger that would refuse other DDL."""
    with tables_to_fill(place, "DROP EVENT TRIGGER refuse"):
        yield place.target.primaries[0]


@pytest.fixture
def filled(place: Place) -> Iterator[Node]:
    """The second target, where all have tables to fill."""
    with tables_to_fill(place):
        yield place.target.primaries[1]
