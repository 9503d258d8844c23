"""The chain of every kind of table, and a shard of another version of PostgreSQL than the wheel's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.fleet import EmbeddedFleet, is_fleet, start_fleet, stop_fleet
from tests.chains.exact_chain import History, made_history
from tests.other_servers import OTHERS
from tests.snapshot_runs import Ready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", params=OTHERS, ids=str)
def programs(request: pytest.FixtureRequest) -> Path:
    """The programs of the other version; there may be none in the folder."""
    return Path(request.param)


@pytest.fixture(scope="session")
def mixed(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet | None]:
    """A shard of the wheel's version and one of that, each with a standby, without the bank."""
    if not (programs / "postgres").exists():
        yield None
        return
    directory = tmp_path_factory.mktemp("mixed") / "fleet"
    try:
        how = {"settings": {"fsync": "off"}, "programs": {"s2": programs}}
        yield start_fleet(directory, shards=2, backups=1, schema=False, **how)
    finally:
        if is_fleet(directory):
            stop_fleet(directory, delete=True)


@pytest.fixture(scope="session")
def history(
    shared_fleet: EmbeddedFleet,
    mixed: EmbeddedFleet | None,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[History]:
    """The chain, taken and restored."""
    other = mixed.primaries[1] if mixed else None
    nodes = (other, *mixed.backups_of(other)) if mixed and other else ()
    with made_history(shared_fleet, nodes, tmp_path_factory.mktemp("exact"), Ready(spark)) as made:
        yield made
