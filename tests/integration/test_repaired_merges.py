"""Chains with a merge whose objects are damaged: they are repaired, continued, merged again and copied.

Expected rows come from the live servers (COPY), and expected results of checks from what was done to the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.merge import rewriting
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.operation_records import VALID
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.repair_records import read_repairs
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.servers.dealt import start_fleet
from tests.servers.fleets import fleet_of
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PREFERRED = '[copies]\nbase = "prefer-standby"\n'
TABLES = (
    "DROP TABLE IF EXISTS seen, quiet",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
    "CREATE TABLE quiet (id int PRIMARY KEY, text text)",
    "INSERT INTO quiet SELECT n, 'quiet ' || n FROM generate_series(1, 50) n",
)


@dataclass
class Notes(Silent):
    lines: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    """A shard with two standbys, and an empty one to restore into."""
    folder = tmp_path_factory.mktemp("repaired")
    try:
        fleet = start_fleet(folder / "fleet", shards=1, backups=2)
        with fleet_of(folder / "target", [None]) as target:
            yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture
def more(request: pytest.FixtureRequest) -> str:
    """Further tables of fleet.toml."""
    return str(getattr(request, "param", ""))


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession, more: str
) -> Iterator[ChangingFleet]:
    source, target = servers
    key = tmp_path / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    more = more.replace("KEY", json.dumps(str(key)))
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=more)
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), tmp_path)
    found.execute("s1", *TABLES)
    for standby in ("s1-b1", "s1-b2"):
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        try:
            yield found
        finally:
            found.runs = Runs(fleet, Ready(spark))
            found.start("s1-b1")


def command(place: ChangingFleet, *words: str) -> dict[str, Any]:
    code, document = run_here(place.fleet, *words, spark=place.runs.spark.running)
    assert code == 0, document
    return document


def take(place: ChangingFleet, increments: int = 1) -> None:
    for _ in range(increments):
        place.write()
        place.increment()


@pytest.mark.parametrize("more", [f"{PREFERRED}[encryption]\nkey_file = KEY\n"], indirect=True, ids=["encrypted"])
def test_a_copy_that_is_away_keeps_its_rows_in_a_merge_of_an_encrypted_store(place: ChangingFleet) -> None:
    """Its objects are stored again, and encryption binds their bytes to the new keys."""
    place.runs.full("chain")
    place.stop("s1-b1")
    take(place)
    command(place, "merge", "chain")
    place.start("s1-b1")
    take(place)
    report = place.check()
    assert (report.result, report.conflicts) == (VALID, [])
    place.check_restores_without("s1", 2)
    key = place.folder / "second-key"
    key.write_text("22" * 32)
    key.chmod(0o600)
    text = f"[encryption]\nkey_file = {json.dumps(str(key))}\n"
    second: Fleet = configure_fleet(
        place.servers, place.folder / "second.toml", f"file://{place.folder}/second", more=text
    )
    command(place, "copy", "chain", "--to", str(second.path))
    code, checked = run_here(second, "check", "chain", spark=place.runs.spark.running)
    assert (code, checked["result"]) == (0, VALID), checked


def test_a_chain_goes_on_without_what_lies_before_its_merge(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The merge carries no object in which a row has changed.
    monkeypatch.setattr(rewriting, "DEAD_SHARE_MAX", 0)
    place.runs.full("chain")
    take(place, 2)
    command(place, "merge", "chain")
    chain = read_from_merge(place.fleet.store.open(), "chain")
    folder = place.folder / "store"
    # The next increment reads the last segment behind the cut.
    (folder / chain.segments("s1")[-1].key).unlink()
    (replaced,) = command(place, "repair", "chain", "--yes")["replaced"]
    assert replaced["from_copy"] == "s1-b1"
    take(place)
    needed = {entry.key for entry in chain.full.named}
    full = read_chain(place.fleet.store.open(), "chain", 0).full
    (folder / next(entry.key for entry in full.copied if entry.node == "s1" and entry.key not in needed)).unlink()
    assert command(place, "repair", "chain", "--yes")["damaged"] == []
    notes = Notes()
    place.write()
    create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, notes)
    assert any("snapshot merge chain --to 2 --drop-earlier" in line for line in notes.lines)
    place.states[4] = place.live_state()
    assert place.check().result == VALID
    place.check_restores(2, 3, 4)


def test_the_objects_of_a_repair_go_with_the_restore_points_that_need_them(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second store that lacks the repair keeps these restore points with its own objects."""
    monkeypatch.setattr(rewriting, "DEAD_SHARE_MAX", 0)
    place.runs.full("chain")
    take(place, 2)
    second = configure_fleet(place.servers, place.folder / "second.toml", f"file://{place.folder}/second")
    command(place, "copy", "chain", "--to", str(second.path))
    store, folder = place.fleet.store.open(), place.folder / "store"
    chain = read_chain(store, "chain")
    for key in (chain.base_entries("s1")[0].key, chain.segments("s1")[1].key):
        flip_byte(folder / key)
    command(place, "repair", "chain", "--yes")
    (repair,) = read_repairs(store, "chain")
    earlier = [entry.key for one in repair.replacements for entry in one.new]
    assert {key.split("/")[2] for key in earlier} == {"base", "wal"}
    bodies = {key: store.read(key) for key in earlier}
    command(place, "merge", "chain")
    flip_byte(folder / read_from_merge(store, "chain").base_entries("s1")[0].key)
    command(place, "repair", "chain", "--yes")
    (_, repair) = read_repairs(store, "chain")
    needed = [entry.key for one in repair.replacements for entry in one.new]
    take(place)
    command(place, "gc", "--grace", "0s", "--yes")
    assert all(map(store.exists, [*earlier, *needed]))
    command(place, "merge", "chain", "--to", "2", "--drop-earlier", "--yes")
    assert not any(map(store.exists, earlier))
    # A removal that died would have left them.
    for key, body in bodies.items():
        store.create(key, body)
    command(place, "gc", "--grace", "0s", "--yes")
    assert not any(map(store.exists, earlier))
    assert all(map(store.exists, needed))
    assert place.check().result == VALID
    place.check_restores(2, 3)
    command(place, "copy", "chain", "--to", str(second.path))
    for increment in ("1", "3"):
        code, checked = run_here(second, "check", "chain", "--increment", increment, spark=place.runs.spark.running)
        assert (code, checked["result"]) == (0, VALID), checked


def test_rows_are_rebuilt_from_whichever_copy_has_them(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.runs = Runs(
        replace(place.fleet, nodes=tuple(one for one in place.fleet.nodes if one.id != "s1-b1")), place.runs.spark
    )
    take(place)
    command(place, "merge", "chain")
    store = place.fleet.store.open()
    chain = read_from_merge(store, "chain")
    assert chain.absent["s1-b1"].has_ended
    assert not chain.base_entries("s1-b1")
    flip_byte(place.folder / "store" / chain.base_entries("s1")[0].key)
    (replaced,) = command(place, "repair", "chain", "--yes")["replaced"]
    assert replaced["from_copy"] == "s1-b2"
    assert not place.check().conflicts


def test_another_copy_is_tried_if_the_first_one_is_damaged(place: ChangingFleet) -> None:
    place.runs.full("chain")
    take(place)
    command(place, "merge", "chain")
    chain = read_from_merge(place.fleet.store.open(), "chain")
    key = chain.base_entries("s1")[0].key
    for entry in (*chain.base_entries("s1")[:1], *chain.base_entries("s1-b1")):
        flip_byte(place.folder / "store" / entry.key)
    # Only this object is read before.
    (replaced,) = command(place, "repair", "chain", "--object", key, "--yes")["replaced"]
    assert replaced["from_copy"] == "s1-b2"
    assert command(place, "repair", "chain", "--yes")["unrepaired"] == []
    assert place.check().result == VALID


@pytest.mark.parametrize("more", [PREFERRED], indirect=True, ids=["shared"])
@pytest.mark.parametrize("damaged", ["s1", "s1-b1"])
def test_rows_under_several_definitions_are_rebuilt(place: ChangingFleet, damaged: str) -> None:
    """The merge carries the primary's objects, and writes those of the standby anew, because both began with them."""
    place.runs = Runs(
        replace(place.fleet, nodes=tuple(one for one in place.fleet.nodes if one.id != "s1-b2")), place.runs.spark
    )
    place.execute("s1", "CREATE TABLE gone (id int PRIMARY KEY)", "INSERT INTO gone SELECT generate_series(1, 9)")
    place.runs.full("chain")
    place.execute("s1", "ALTER TABLE quiet ADD c int DEFAULT 7", "DROP TABLE gone")
    place.increment()
    command(place, "merge", "chain")
    chain = read_from_merge(place.fleet.store.open(), "chain")
    stored = {node: {number for entry in chain.base_entries(node) for number in entry.rows} for node in chain.present}
    assert stored["s1"] != stored["s1-b1"]
    for entry in chain.base_entries(damaged):
        (place.folder / "store" / entry.key).unlink()
    assert {one["from_copy"] for one in command(place, "repair", "chain", "--yes")["replaced"]} == {
        "s1-b1" if damaged == "s1" else "s1"
    }
    assert not place.check().conflicts
    place.check_restores(1)
    place.check_restores_without("s1", 1)
    take(place)
    command(place, "merge", "chain")
    assert not place.check().conflicts
    place.check_restores(2)


def test_no_row_is_rebuilt_from_a_copy_that_is_away(place: ChangingFleet) -> None:
    """What was updated while the standby is away is older there, and as many rows."""
    place.runs = Runs(
        replace(place.fleet, nodes=tuple(one for one in place.fleet.nodes if one.id != "s1-b2")), place.runs.spark
    )
    place.runs.full("chain")
    place.stop("s1-b1")
    place.execute("s1", "UPDATE seen SET text = 'newer'")
    assert place.increment().absent
    command(place, "merge", "chain")
    chain = read_from_merge(place.fleet.store.open(), "chain")
    for entry in chain.base_entries("s1"):
        flip_byte(place.folder / "store" / entry.key)
    code, document = run_here(place.fleet, "repair", "chain", "--yes", spark=place.runs.spark.running)
    assert (code, document["error"]) == (3, "nothing-repairable"), document
    assert "s1-b1 is away" in document["message"]
    place.start("s1-b1")
    place.increment()
    assert command(place, "repair", "chain", "--yes")["unrepaired"] == []
    assert not place.check().conflicts
    place.check_restores(1, 2)
