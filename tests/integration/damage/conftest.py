"""One chain for all tests of this folder, made once; each damages a copy of its store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.fleet import EmbeddedFleet
from tests.integration.damage.stored_chain import Stored, copied, stored_chain
from tests.snapshot_runs import Ready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def made(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stored]:
    with stored_chain(shared_fleet, tmp_path_factory.mktemp("damage"), Ready(spark)) as found:
        yield found


@pytest.fixture
def stored(made: Stored, tmp_path: Path) -> Stored:
    return copied(made, tmp_path)
