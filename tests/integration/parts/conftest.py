"""The two servers that the tests of this folder share; each test drops what it restores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.parts.two_places import TwoPlaces, emptied, two_places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[TwoPlaces]:
    with two_places(tmp_path_factory.mktemp("parts"), spark) as servers:
        yield servers


@pytest.fixture
def places(servers: TwoPlaces) -> Iterator[TwoPlaces]:
    with emptied(servers.beside, servers.other):
        yield servers
