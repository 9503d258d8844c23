"""The servers that cases run on: one set of shards for all of them, with or without standbys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import psycopg
from msgspec import structs

from cutline.embedded.fleet import is_fleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.fuzz.databases import (
    SOURCE,
    TARGET,
    await_database,
    create_database,
    create_roles,
    drop_databases,
    drop_slots,
    in_database,
)
from tests.fuzz.figures import Figures
from tests.fuzz.merging import options_on
from tests.fuzz.run import Run, named_step
from tests.fuzz.schemas import APPEND_ONLY_PATTERN
from tests.fuzz.script import Case
from tests.fuzz.small_sizes import short_waits, small_sizes
from tests.fuzz.tables import SHARDS
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How many cases run at once, by the number of standbys per shard: a run with standbys costs more.
CASES_AT_ONCE = {0: 3, 1: 2}
# Nothing here outlives the test, and only a case's statements may change a table's file.
SETTINGS = {"fsync": "off", "autovacuum": "off"}


@dataclass(slots=True)
class Ground:
    """Shards that run cases, one after the other, each in new databases and a new store."""

    fleet: Fleet
    spark: SparkSession
    directory: Path
    figures: Figures = field(default_factory=Figures)

    def run(self, case: Case) -> None:
        """Run one case; raise FoundError if a restored state differs from the source, or a command fails."""
        # Not one that is emptied: a process that knew a store's folder does not make it again.
        store = Path(mkdtemp(prefix="store-", dir=self.directory))
        rules = structs.replace(self.fleet.groups, append_only=(APPEND_ONLY_PATTERN,))
        source = in_database(replace(self.fleet, store=StoreLocation(f"file://{store}"), groups=rules), SOURCE)
        with self.figures.timed("databases"):
            self.clear()
            for shard, node in enumerate(source.primaries):
                create_database(with_database(node, "postgres").dsn, options_on(case.options, shard))
            for node in source.nodes:
                await_database(node.dsn)
        try:
            with (
                named_step("case"),
                short_waits(),
                small_sizes() if case.options.get("sizes") == "small" else nullcontext(),
            ):
                Run(case, Runs(source, Ready(self.spark)), in_database(self.fleet, TARGET), self.figures).run()
        finally:
            shutil.rmtree(store)
            self.figures.cases += count_cases(case)
            with self.figures.timed("databases"):
                self.clear()

    def clear(self) -> None:
        """Drop what cases leave on the servers."""
        for node in self.fleet.nodes:
            with suppress(psycopg.OperationalError):
                drop_slots(with_database(node, "postgres").dsn)
        for node in self.fleet.primaries:
            drop_databases(with_database(node, "postgres").dsn, with_database(node, SOURCE).dsn)


def count_cases(case: Case) -> int:
    """The number of cases that were merged into this one."""
    shards = {shard for on, _ in case.setup for shard in on}
    return len({shard // len(SHARDS) for shard in shards})


@contextmanager
def ground_in(directory: Path, spark: SparkSession, backups: int) -> Iterator[Ground]:
    """Start the shards, with `backups` standbys each, and delete them at the end."""
    place = directory / f"fleet-{backups}"
    try:
        embedded = start_fleet(
            place, shards=len(SHARDS) * CASES_AT_ONCE[backups], backups=backups, schema=False, settings=SETTINGS
        )
        fleet = configure_fleet(embedded, directory / f"fleet-{backups}.toml", f"file://{directory}/store")
        for node in fleet.primaries:
            create_roles(with_database(node, "postgres").dsn)
        yield Ground(fleet, spark, directory)
    finally:
        if is_fleet(place):
            stop_fleet(place, delete=True)
