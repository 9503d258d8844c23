"""The ground that cases run on: two shards for all of them, with standbys or without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.embedded import is_fleet, start_fleet, stop_fleet
from tests.fuzz.run import Ground
from tests.snapshot_runs import described

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARDS = 2
# Nothing here outlives the test, and nothing may change a table's file but what a case says.
SETTINGS = {"fsync": "off", "autovacuum": "off"}


@contextmanager
def ground_in(directory: Path, spark: SparkSession, backups: int) -> Iterator[Ground]:
    """Start the shards, with so many standbys each, and delete them at the end."""
    place = directory / f"fleet-{backups}"
    try:
        embedded = start_fleet(place, shards=SHARDS, backups=backups, schema=False, settings=SETTINGS)
        fleet = described(embedded, directory / f"fleet-{backups}.toml", f"file://{directory}/store")
        yield Ground(fleet, spark, directory)
    finally:
        if is_fleet(place):
            stop_fleet(place, delete=True)
