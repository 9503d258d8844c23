"""The chain of tables of every kind, and a shard of another PostgreSQL version than the wheel's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.fleet import EmbeddedFleet, is_fleet, start_fleet, stop_fleet
from tests.chains.exact_chain import History, exact_history
from tests.commands.snapshot_runs import Ready
from tests.other_servers import OTHERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package", params=OTHERS, ids=str)
def programs(request: pytest.FixtureRequest) -> Path:
    """The folder of the other version's programs, which may be empty."""
    return Path(request.param)


@pytest.fixture(scope="package")
def mixed(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet | None]:
    """A shard of the wheel's version and one of the other version, each with a standby, without the bank."""
    if not (programs / "postgres").exists():
        yield None
        return
    directory = tmp_path_factory.mktemp("mixed") / "fleet"
    try:
        options = {"settings": {"fsync": "off"}, "programs": {"s2": programs}}
        yield start_fleet(directory, shards=2, backups=1, schema=False, **options)
    finally:
        if is_fleet(directory):
            stop_fleet(directory, delete=True)


@pytest.fixture(scope="package")
def history(
    shared_fleet: EmbeddedFleet,
    mixed: EmbeddedFleet | None,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[History]:
    """The chain, created and restored."""
    other = mixed.primaries[1] if mixed else None
    nodes = (other, *mixed.backups_of(other)) if mixed and other else ()
    with exact_history(shared_fleet, nodes, tmp_path_factory.mktemp("exact"), Ready(spark)) as chain:
        yield chain
