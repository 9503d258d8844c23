"""Retained WAL is bounded: past half of a node's limit commands warn, past the limit its slots there are dropped.

The tests ask PostgreSQL itself how much WAL a node retains.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import cutline.snapshots.operations.slot_guard as module
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Silent
from cutline.fleet.units import size_text
from cutline.nodes.connections import with_database
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full, preview_full
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.listing.listing import Listing, list_store
from cutline.snapshots.operations.slot_guard import guard_nodes
from cutline.wal.drain.slots import create_exported_slot, drop_slot, slot_name
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.faults.ports import HOST, free_ports
from tests.held.retained_wal import FILLER_BYTES, GuardedFleet, Notes
from tests.integration.refusing import NoSpark, execute
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOREIGN, STRAY = "somebody_elses", "cutline_of_no_snapshot_here"
LIST_SECONDS_MAX = 10  # 2 s for the nodes; the rest is for a busy machine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """Servers of this module only: nothing else writes or retains WAL there."""
    directory = tmp_path_factory.mktemp("retained") / "fleet"
    try:
        yield start_fleet(directory, shards=1, backups=1)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture
def guarded(servers: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[GuardedFleet]:
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    found = GuardedFleet(fleet, Ready(spark))
    with dropping_slots(fleet):
        found.runs.init()
        yield found


def with_settings(fleet: Fleet, more: str, path: Path) -> Fleet:
    """Write a copy of fleet.toml with `more` appended, and return the fleet with that path."""
    path.write_text(f"{fleet.path.read_text()}\n{more}\n")
    return replace(fleet, path=path)


def test_a_chain_past_half_of_the_limit_is_warned_about_and_past_it_goes_on_with_a_gap(
    guarded: GuardedFleet, tmp_path: Path
) -> None:
    chains = {name: guarded.runs.full(name).chain for name in ("first", "second")}
    guarded.increment("second", Notes())
    before = max(size for chain in chains.values() for size in guarded.retained_bytes(chain).values())
    guarded.write_filler()
    kept = {name: guarded.retained_bytes(chain) for name, chain in chains.items()}
    assert kept["first"]["s1"] > FILLER_BYTES > before / 2
    assert_warned(guarded, kept, chains, tmp_path)
    assert_another_chain_loses_only_its_slots(guarded, kept, chains)
    assert_the_other_chain_goes_on(guarded, chains["first"])
    assert_the_continued_chain_is_copied_again(guarded, chains["second"])


def assert_warned(
    guarded: GuardedFleet, kept: dict[str, dict[str, int]], chains: dict[str, str], tmp_path: Path
) -> None:
    """Create and list both name the node, the chain and the amount; no chain is given up."""
    limit = 2 * min(size for found in kept.values() for size in found.values()) - FILLER_BYTES // 8
    assert limit > max(size for found in kept.values() for size in found.values())
    slots = guarded.slots()
    limited = guarded.with_limit(limit)
    notes = Notes()
    preview_full(limited.fleet, CreateRequest("third"), notes)
    for name in chains:
        text = notes.find_one(f"snapshot {name},")
        assert "more than half its limit" in text
        assert f"snapshot create {name} --incremental" in text
    fleet = with_settings(guarded.fleet, f"[wal]\nmax_retained_wal = {limit}", tmp_path / "limited.toml")
    code, document = run_here(fleet, "list")
    after = {name: guarded.retained_bytes(chain) for name, chain in chains.items()}
    assert (code, document["not_asked"], len(document["warnings"])) == (0, [], 2)
    for entry in document["snapshots"]:
        name = entry["name"]
        assert (entry["state"], entry["ended"]) == ("complete", None)
        assert entry["retained_wal"].keys() == kept[name].keys() == {"s1", "s1-b1"}
        for node, size in entry["retained_wal"].items():
            assert kept[name][node] <= size <= after[name][node]
    code, document = run_here(fleet, "create", "third", "--dry-run")
    assert (code, len(document["warnings"])) == (0, 2)
    notes = Notes()
    limited.increment("second", notes)
    assert notes.find_one("snapshot first,", "more than half")
    assert limited.list_states() == {"first": "complete", "second": "complete"}
    assert guarded.slots() == slots


def assert_another_chain_loses_only_its_slots(
    guarded: GuardedFleet, kept: dict[str, dict[str, int]], chains: dict[str, str]
) -> None:
    """A create of one chain drops the slots of another; the limit is between the WAL that the two retain."""
    limit = kept["first"]["s1"] - 1
    limited = guarded.with_limit(limit)
    assert max(guarded.retained_bytes(chains["second"]).values()) < limit
    preview, notes = Notes(), Notes()
    preview_full(limited.fleet, CreateRequest("third"), preview)
    will = preview.find_one("snapshot first", "the next create will drop its slot on s1, s1-b1")
    assert will.endswith("snapshot create first --incremental; if nobody continues this chain: snapshot end first")
    limited.increment("second", notes)
    warned = notes.find_one("of WAL for snapshot first, more than its limit", "its slot is dropped on s1, s1-b1")
    assert "no time between the full snapshot and that increment can be restored" in warned
    assert guarded.slots() == [{slot_name(chains["second"])}] * 2
    assert limited.list_states() == {"first": "slot-lost", "second": "complete"}


def assert_the_other_chain_goes_on(guarded: GuardedFleet, chain: str) -> None:
    """Its next increment copies the shard anew, with a gap that is named; earlier restore points stay."""
    noted = Notes()
    limited = guarded.with_limit(FILLER_BYTES).fleet
    commit = create_increment(limited, CreateRequest("first"), guarded.spark, noted)
    assert commit.renewed.keys() == {"s1", "s1-b1"}
    for node, renewal in commit.renewed.items():
        done = "written" if node == "s1" else "replayed"
        why = rf"slot {slot_name(chain)} does not exist; since the last increment, the node has {done} \S+ MiB of WAL"
        limit = re.escape(f"({size_text(FILLER_BYTES)}): a create of any snapshot may have dropped it")
        assert re.fullmatch(f"{why}, more than max_retained_wal {limit}", renewal.reason), renewal.reason
    noted.find_one("primary s1 is copied again", "between the full snapshot and this increment can be restored")
    assert slot_name(chain) in guarded.slots()[0] & guarded.slots()[1]
    assert guarded.list_states() == {"first": "complete", "second": "complete"}
    gap = "no time between the full snapshot and increment 1 can be restored: primary s1 was copied again"
    assert f"snapshot first: {gap}" in read_output(guarded.fleet, "list")
    execute(guarded.fleet.primaries[0].dsn, "CREATE TABLE again (id int PRIMARY KEY)", "INSERT INTO again VALUES (1)")
    assert guarded.runs.increment("first").renewed == {}
    for increment in (0, 1, 2):
        assert guarded.runs.check_one("first", increment).result == "valid"
    target = replace(guarded.fleet, nodes=(with_database(guarded.fleet.primaries[0], "back"),))
    guarded.runs.restore("first", target)
    (restored,) = (node.dsn for node in target.nodes)
    assert sorted_copies(restored) == sorted_copies(guarded.fleet.primaries[0].dsn)
    execute(guarded.fleet.primaries[0].dsn, "DROP DATABASE back WITH (FORCE)", "DROP TABLE again")


def assert_the_continued_chain_is_copied_again(guarded: GuardedFleet, chain: str) -> None:
    """The limit also applies to the chain that the command continues, but ends only the copies of the nodes past it."""
    limited = guarded.with_limit(max(guarded.retained_bytes(chain).values()) + FILLER_BYTES)
    guarded.write_filler(2 * FILLER_BYTES)
    guarded.retained_bytes(chain)
    slots, notes = guarded.slots(), Notes()
    preview_increment(limited.fleet, CreateRequest("second"), notes)
    notes.find_one("keeps", "the increment will drop its slot on s1, s1-b1", "and copy s1, s1-b1 again")
    (listed,) = [text for text in list_store(limited.fleet).warnings if "snapshot second" in text]
    assert "the next increment copies s1, s1-b1 again: snapshot create second --incremental; " in listed
    assert guarded.slots() == slots
    commit = Runs(limited.fleet, guarded.spark).increment("second")
    assert commit.renewed.keys() == {"s1", "s1-b1"}
    # The commit says why nobody finds the slot any more.
    for node, limit in ((node, size_text(node.retained_wal_bytes_max)) for node in limited.fleet.nodes):
        why = rf"it kept \S+ MiB of WAL for the chain, more than max_retained_wal \({limit}\), so its slot was dropped"
        assert re.fullmatch(why, commit.renewed[node.id].reason), commit.renewed[node.id].reason
    # The other chain is past the limit, too, and nobody has continued it.
    assert guarded.slots() == [{slot_name(chain)}] * 2
    assert limited.list_states()["second"] == "complete"
    assert guarded.runs.check_one("second").result == "valid"


def test_the_next_create_finishes_a_guard_that_died(guarded: GuardedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    chain = guarded.runs.full("first").chain
    guarded.write_filler()
    slots = guarded.slots()
    assert slots == [{slot_name(chain)}] * 2
    # The standby has its own limit, which applies although `--only-primary` opens no session to it, and also if
    # fleet.toml requires it.
    limited = guarded.with_limit(guarded.retained_bytes(chain)["s1-b1"] - 1, only="s1-b1")
    limited = replace(limited, fleet=replace(limited.fleet, standbys_min=None))
    monkeypatch.setattr(module, "drop_slots", die)
    with pytest.raises(KeyboardInterrupt):
        create_full(limited.fleet, CreateRequest("second", only_primary=True), NoSpark(), Silent())
    monkeypatch.undo()
    assert guarded.slots() == slots
    assert any("the next create will drop its slot on s1-b1" in text for text in list_store(limited.fleet).warnings)
    with pytest.raises(AssertionError, match="Spark"):
        create_full(limited.fleet, CreateRequest("second", only_primary=True), NoSpark(), Silent())
    assert guarded.slots() == [{slot_name(chain)}, set()]
    assert guarded.list_states() == {"first": "complete"}
    assert guarded.runs.increment("first").renewed.keys() == {"s1-b1"}
    assert guarded.runs.check_one("first").result == "valid"


def test_a_standby_past_its_limit_ends_only_its_copy(guarded: GuardedFleet) -> None:
    chain = guarded.runs.full("first").chain
    guarded.write_filler()
    limited = guarded.with_limit(guarded.retained_bytes(chain)["s1-b1"] - 1, only="s1-b1")
    slots, notes = guarded.slots(), Notes()
    preview_increment(limited.fleet, CreateRequest("first"), notes)
    notes.find_one("node s1-b1 keeps", "the increment will drop its slot on s1-b1, which ends only the copy of this")
    assert guarded.slots() == slots
    commit = Runs(limited.fleet, guarded.spark).increment("first")
    assert commit.renewed.keys() == {"s1-b1"}
    assert guarded.slots() == [{slot_name(chain)}] * 2
    assert guarded.list_states() == {"first": "complete"}
    assert guarded.runs.check_one("first").result == "valid"


def test_slots_without_a_snapshot_are_named_and_dropped_and_foreign_ones_stay(guarded: GuardedFleet) -> None:
    primary = guarded.fleet.primaries[0]
    for name in (STRAY, FOREIGN):
        create_exported_slot(primary, primary, name, 30).connection.close()
    noted = Notes()
    initialise(guarded.fleet, noted)
    assert noted.find_one(STRAY, "not part of a snapshot", "drop it on s1: SELECT pg_drop_replication_slot(")
    assert not any(FOREIGN in text for text in noted.texts)
    guarded.write_filler()
    limited = guarded.with_limit(FILLER_BYTES // 2)
    listing: Listing = list_store(limited.fleet)
    (warning,) = listing.warnings
    assert STRAY in warning
    assert warning.endswith(": the next create will drop its slots")
    store, notes = guarded.fleet.store.open(), Notes()
    with open_sessions(limited.fleet, limited.fleet.primaries) as sessions:
        guard_nodes(store, sessions, notes)
    assert notes.find_one(STRAY, "node s1", "not part of a snapshot")
    assert notes.find_one(STRAY, "was dropped")
    with psycopg.connect(primary.dsn) as connection:
        query = "SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical'"
        assert connection.execute(query).fetchall() == [(FOREIGN,)]
    assert drop_slot(primary, FOREIGN)
    assert store.list("snapshots") == []


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose server accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_list_works_with_all_nodes_down_and_names_them(guarded: GuardedFleet, silent_port: int, tmp_path: Path) -> None:
    guarded.runs.full("first")
    text = guarded.fleet.path.read_text()
    ports = dict(zip(("s1", "s1-b1"), (*free_ports(1), silent_port), strict=True))
    for node in guarded.fleet.nodes:
        text = text.replace(node.dsn, with_port(node, ports[node.id]))
    path = tmp_path / "down.toml"
    path.write_text(text)
    fleet = replace(guarded.fleet, path=path)
    began = time.monotonic()
    code, document = run_here(fleet, "list")
    assert time.monotonic() - began < LIST_SECONDS_MAX
    assert code == 0
    assert {one["node"] for one in document["not_asked"]} == {"s1", "s1-b1"}
    (entry,) = document["snapshots"]
    assert (entry["state"], entry["retained_wal"]) == ("complete", {})
    shown = read_output(fleet, "list")
    assert "node s1: retained WAL is unknown" in shown
    assert "node s1-b1: retained WAL is unknown" in shown


def with_port(node: Node, port: int) -> str:
    return make_conninfo(node.dsn, host=HOST, port=port)


def read_output(fleet: Fleet, *words: str) -> str:
    """Run a command, and return what it prints without --json."""
    code, out = run_and_capture(fleet, *words)
    assert code == 0
    return out
