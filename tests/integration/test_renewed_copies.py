"""Copies that can't be continued begin again in their chain: a restore equals the live servers at each cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.embedded.server import create_standby, delete_server
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from tests.commands.changing_fleet import ChangingFleet, absent_names
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBY, OTHER = "s1-b1", "s2-b1"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    folder = tmp_path_factory.mktemp("renewed")
    try:
        fleet = start_fleet(folder / "fleet", shards=2, backups=1)
        target = start_fleet(folder / "target", shards=2, backups=0, like_shared=True)
        yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest
) -> Iterator[ChangingFleet]:
    source, target = servers
    more = getattr(request, "param", "")
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=more)
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), tmp_path)
    for node in ("s1", "s2"):
        found.execute(
            node,
            "DROP TABLE IF EXISTS seen, empty",
            "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
            "CREATE TABLE empty (id int PRIMARY KEY)",
            "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
        )
    for standby in (STANDBY, OTHER):
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        yield found


def drop_slot(place: ChangingFleet, node: str) -> str:
    (slot,) = slots_of(place.fleet.node(node).dsn)
    place.execute(node, f"SELECT pg_drop_replication_slot('{slot}')")
    return slot


def rebuild(place: ChangingFleet, standby: str) -> None:
    """Replace the standby's server by a new base backup of its primary."""
    node, shard = place.servers.node(standby), place.fleet.node(standby).shard
    delete_server(node)
    place.execute(shard, f"SELECT pg_drop_replication_slot('{node.slot}')")
    create_standby(place.servers._programs(node), node, place.servers.node(shard))
    place.start(standby)


def next_increment(place: ChangingFleet) -> Increment:
    place.write()
    commit = place.increment()
    assert isinstance(commit, Increment)
    return commit


@pytest.mark.parametrize("place", ["", '[copies]\nrequire = "all"\n'], indirect=True, ids=["spared", "required"])
def test_a_standby_that_lost_its_slot_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    slot = drop_slot(place, STANDBY)
    second = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    assert slot in second.renewed[STANDBY].reason
    assert not second.absent
    assert absent_names(second) == set()
    assert slots_of(place.fleet.node(STANDBY).dsn) == [slot]
    assert place.check(since_last=True).result == VALID
    third = next_increment(place)
    assert not third.renewed
    assert place.check(since_last=True).result == VALID
    assert place.check().result == VALID
    assert place.check(1).result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)


def test_a_rebuilt_standby_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    rebuild(place, STANDBY)
    first = next_increment(place)
    assert first.renewed.keys() == {STANDBY}
    # Twice in a row.
    rebuild(place, STANDBY)
    second = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    third = next_increment(place)
    assert not third.renewed
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)


def test_a_standby_that_was_added_is_copied(place: ChangingFleet) -> None:
    whole = place.fleet
    fewer = replace(whole, nodes=tuple(node for node in whole.nodes if node.id != STANDBY))
    place.runs = Runs(fewer, place.runs.spark)
    place.runs.full("chain")
    next_increment(place)
    place.runs = Runs(whole, place.runs.spark)
    second = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    next_increment(place)
    assert place.check(1).result == INCONCLUSIVE
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 2, 3)


def test_a_primary_that_lost_its_slot_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    drop_slot(place, "s1")
    second = next_increment(place)
    assert second.renewed.keys() == {"s1"}
    assert place.check(since_last=True).result == VALID
    next_increment(place)
    assert place.check(since_last=True).result == VALID
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without("s1", 1, 2, 3)


def test_a_shard_that_lost_all_slots_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    drop_slot(place, "s1")
    drop_slot(place, STANDBY)
    second = next_increment(place)
    assert second.renewed.keys() == {"s1", STANDBY}
    place.execute("s1", "ALTER TABLE seen ADD COLUMN more int DEFAULT 7", "CREATE TABLE later (id int PRIMARY KEY)")
    next_increment(place)
    place.execute("s1", "DROP TABLE later")
    drop_slot(place, STANDBY)
    fourth = next_increment(place)
    assert fourth.absent.keys() == {STANDBY}
    assert next_increment(place).renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1, 2, 3, 4, 5)
    place.check_restores_without("s1", 2, 3, 5)
