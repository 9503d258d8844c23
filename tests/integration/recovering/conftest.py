"""The servers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.recovering.physical_place import PhysicalPlace, physical_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def physical(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[PhysicalPlace]:
    """Servers with WAL archives; each test takes the base backups that it needs."""
    with physical_place(tmp_path_factory.mktemp("recovering"), spark) as place:
        yield place
