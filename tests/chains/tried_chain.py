"""A chain of one shard whose schema changes during a create, or between two attempts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.connections import with_database
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.commit import Commit, DefinitionChanges
from cutline.storage.errors import SnapshotError
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.refusing import execute
from tests.run.soak import SEED, SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESTORED = "tried_back"
GROUPS = '[groups]\ninclude = ["tried.*"]\n'
SCHEMA = (
    "CREATE SCHEMA tried",
    "CREATE TABLE tried.t (id int PRIMARY KEY, a text)",
    "INSERT INTO tried.t SELECT n, 'a' || n FROM generate_series(1, 20) AS n",
    "CREATE TABLE tried.bag (a text, n int)",
    "ALTER TABLE tried.bag REPLICA IDENTITY FULL",
    "INSERT INTO tried.bag SELECT 'b' || n % 3, n % 2 FROM generate_series(1, 20) AS n",
)


class GivenUpError(SnapshotError):
    """Ends an attempt."""


@dataclass(slots=True)
class Interrupt(Silent):
    """Calls `then` when the point is reached or the step begins, at most `times` times."""

    point: CrashPoint | str
    then: Callable[[], None]
    times: int = 1

    def reached(self, point: str, *, node: str = "") -> None:
        if point == self.point and self.times:
            self.times -= 1
            self.then()

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.reached(name)


@dataclass(slots=True)
class Tried:
    """A chain of one shard with its standby; `states` are the source's states by snapshot name and increment."""

    runs: Runs
    name: str
    notes: list[str] = field(default_factory=list)
    states: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)

    @property
    def fleet(self) -> Fleet:
        return self.runs.fleet

    def run(self, *statements: str) -> None:
        execute(self.fleet.primaries[0].dsn, *statements)

    def create(self, point: CrashPoint | str, then: Callable[[], None], *, full: bool = False) -> Commit:
        noting = Noting(Interrupt(point, then))
        try:
            work = create_full if full else create_increment
            return work(self.fleet, CreateRequest(self.name), self.runs.spark, noting)
        finally:
            self.notes = noting.notes

    def fail(self, point: CrashPoint = CrashPoint.RESOLVED) -> None:
        """Run an increment that fails at the point; its archived WAL stays."""

        def give_up() -> None:
            raise GivenUpError("it ends here")

        with pytest.raises(GivenUpError):
            self.create(point, give_up)

    def increment(self) -> DefinitionChanges:
        """Create the next increment and record its state; return its changes of definitions."""
        commit = self.runs.increment(self.name)
        self.note(commit.increment)
        assert commit.definition_changes
        return commit.definition_changes

    def note(self, increment: int) -> None:
        """Record the current state of the source, which a restore must reproduce."""
        self.states[self.name, increment] = self.copies(self.fleet.primaries[0].dsn)

    def compare(self) -> None:
        """Restore and compare the last and a random recorded state, in the long form all of them."""
        (primary,) = self.fleet.primaries
        target = replace(self.fleet, nodes=(with_database(primary, RESTORED),))
        noted = list(self.states)
        for name, increment in noted if SOAK_SECONDS else {random.Random(SEED).choice(noted), noted[-1]}:
            self.runs.restore(name, target, increment)
            assert self.copies(target.primaries[0].dsn) == self.states[name, increment], (name, increment)

    def copies(self, dsn: str) -> dict[str, bytes]:
        """Return the rows of the chain's tables."""
        return {name: text for name, text in sorted_copies(dsn).items() if name.startswith("tried.")}


@pytest.fixture
def tried(
    shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Iterator[Tried]:
    directory = tmp_path_factory.mktemp("tried")
    fleet = configure_fleet(shared_fleet, directory / "fleet.toml", f"file://{directory}/store", more=GROUPS)
    fleet = replace(fleet, nodes=tuple(node for node in fleet.nodes if node.shard == "s1"))
    with dropping_slots(fleet):
        try:
            execute(fleet.primaries[0].dsn, *SCHEMA)
            made = Tried(Runs(fleet, Ready(spark)), "tried")
            made.runs.init()
            yield made
        finally:
            execute(fleet.primaries[0].dsn, "DROP SCHEMA IF EXISTS tried CASCADE")
            with psycopg.connect(with_database(fleet.primaries[0], "postgres").dsn, autocommit=True) as server:
                server.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())
