"""The chain that the tests of this folder share; each test drops its targets' databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import stop_fleet
from tests.commands.snapshot_runs import dropping_slots
from tests.integration.routing.routed_place import SHARDS, RoutedPlace, make_routed_place
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def made_place(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[RoutedPlace]:
    """Servers of their own: other tests' databases would be in the way."""
    folder = tmp_path_factory.mktemp("routing")
    servers = start_fleet(folder / "fleet", shards=SHARDS, backups=0, settings={"fsync": "off"})
    try:
        place = make_routed_place(servers, folder, spark)
        with dropping_slots(place.runs.fleet):
            yield place
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture
def place(made_place: RoutedPlace) -> Iterator[RoutedPlace]:
    """The place without any target's database."""
    yield made_place
    made_place.drop_targets()
