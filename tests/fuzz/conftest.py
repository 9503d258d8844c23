"""One set of shards for all cases of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.fuzz.ground import Ground, ground_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Ground]:
    with ground_in(tmp_path_factory.mktemp("fuzz"), spark, 0) as made:
        yield made
