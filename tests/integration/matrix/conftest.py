"""The chains of the matrix: one of all versions, and one of each version by that version's own programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.integration.matrix.chains import Matrix, matrix_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def matrix(
    mixed_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    with matrix_on(mixed_fleet, tmp_path_factory.mktemp("matrix"), spark) as matrix:
        yield matrix
