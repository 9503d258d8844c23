"""The chain that all drills restore, on the shared fleet; a drill itself reaches none of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.drill.drilled import CHANGES, NAME, TABLES, Drilled, listening
from tests.integration.refusing import execute
from tests.run.quick_spark import with_spark
from tests.servers.dealt import current_server
from tests.servers.fleets import SharedFleets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMED_AS_OURS = ("cutline_drill", "cutline_drill_reader")


@pytest.fixture(scope="package")
def shared_fleet(shared_fleets: SharedFleets) -> EmbeddedFleet:
    """The shared fleet of this folder's version: all its modules have the same."""
    return shared_fleets(current_server(standbys=True))


@pytest.fixture(scope="module")
def drilled(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drilled]:
    folder = tmp_path_factory.mktemp("drill")
    fleet = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store")
    runs = Runs(fleet, Ready(spark))
    try:
        for dsn in shared_fleet.dsns():
            execute(dsn, TABLES)
            # No name is a drill's own.
            for role in NAMED_AS_OURS:
                execute(dsn, f"CREATE ROLE {role}", f"GRANT SELECT ON item TO {role}")
        with dropping_slots(fleet):
            runs.init()
            runs.full(NAME, only_primary=True)
            for dsn in shared_fleet.dsns():
                execute(dsn, CHANGES)
            runs.increment(NAME)
            rows = [sum(lines.count(b"\n") for lines in sorted_copies(dsn).values()) for dsn in shared_fleet.dsns()]
    finally:
        for dsn in shared_fleet.dsns():
            execute(dsn, "DROP VIEW IF EXISTS who", "DROP TABLE IF EXISTS item", "DROP FUNCTION IF EXISTS rude")
            execute(dsn, *(f"DROP ROLE IF EXISTS {role}" for role in NAMED_AS_OURS))
    with listening() as (port, connections):
        nodes = "".join(
            f'\n[[node]]\nid = "{one}"\ndsn = "host=127.0.0.1 port={port} dbname={one}"\n' for one in ("s1", "s2")
        )
        text = f'name = "demo"\nstore = "file://{folder}/store"\n{nodes}\n{with_spark("")}\n'
        yield Drilled(text, rows, spark, connections)
