"""Shards join a chain and leave it: a restore has the shards that the chain had at its cut, as the servers were."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.baseline import BaselineChangedError, FleetTopologyError
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.operation_records import VALID
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of, sorted_copies
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEW, STANDBY = "s3", "s3-b1"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    folder = tmp_path_factory.mktemp("shards")
    try:
        fleet = start_fleet(folder / "fleet", shards=3, backups=1)
        target = start_fleet(folder / "target", shards=3, backups=0, like_shared=True)
        yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


@dataclass
class Place(ChangingFleet):
    """A fleet of three shards, some of which fleet.toml lists, and the rows of these shards at each cut."""

    whole: Fleet | None = None
    held: dict[int, dict[str, dict[str, bytes]]] = field(default_factory=dict)

    def list_shards(self, *shards: str, retired: tuple[str, ...] = (), listed: bool = True) -> None:
        """Write a fleet.toml with these shards; those that are retired may be listed as well."""
        assert self.whole is not None
        nodes = self.whole.nodes
        self.runs = Runs(
            replace(
                self.whole,
                nodes=tuple(node for node in nodes if node.shard in shards),
                retired=retired,
                retired_nodes=tuple(node for node in nodes if listed and node.shard in retired),
            ),
            self.runs.spark,
        )

    def next(self) -> Increment:
        self.write()
        commit = self.increment()
        assert isinstance(commit, Increment)
        self.held[commit.increment] = {node.id: sorted_copies(node.dsn) for node in self.fleet.primaries}
        return commit

    def check_held(self, *increments: int) -> None:
        """Restore each increment, and compare its rows with those of the shards that the chain had then."""
        databases = {node.id: node.dsn for node in self.target.primaries}
        for number in increments:
            self.runs.restore("chain", self.target, number, use_backup_copies=True)
            expected = self.held[number]
            assert {shard: sorted_copies(databases[shard]) for shard in expected} == expected


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[Place]:
    source, target = servers
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = Place(source, into, Runs(fleet, Ready(spark)), tmp_path, whole=fleet)
    for node in fleet.primaries:
        found.execute(
            node.id,
            "DROP TABLE IF EXISTS seen, own",
            "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
            "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
        )
    found.execute(NEW, "CREATE TABLE own (id serial PRIMARY KEY, n int)", "INSERT INTO own (n) VALUES (1), (2)")
    for standby in (node.id for node in fleet.nodes if node.backup_of):
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        found.list_shards("s1", "s2")
        yield found


def test_a_shard_joins_and_another_leaves(place: Place) -> None:
    place.runs.full("chain")
    place.next()
    place.list_shards("s1", "s2", NEW)
    joined = place.next()
    assert joined.renewed.keys() == {NEW, STANDBY}
    assert all(renewal.is_new for renewal in joined.renewed.values())
    assert place.check(since_last=True).result == VALID
    place.execute(NEW, "ALTER TABLE own ADD COLUMN more int DEFAULT 7", "INSERT INTO own (n) VALUES (3)")
    place.next()
    assert place.check(since_last=True).result == VALID
    place.list_shards("s1", NEW, retired=("s2",))
    left = place.next()
    assert left.retired == ("s2",)
    assert left.segments.keys() == {"s1", "s1-b1", NEW, STANDBY}
    for node in place.servers.nodes:
        assert len(slots_of(node.dsn())) == (0 if node.id.startswith("s2") else 1)
    place.list_shards("s1", NEW)
    place.next()
    assert place.check(since_last=True).result == VALID
    for increment in (None, 1, 2, 3, 4):
        assert place.check(increment).result == VALID
    place.check_held(1, 2, 3, 4, 5)
