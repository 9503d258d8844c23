"""What operators see of chains and servers: current roles after a failover, lost slots, and how a chain is ended.

Servers are stopped, promoted and robbed of slots as failover managers do it; expected rows come from COPY.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.cli.watch.turn as turn_module
from cutline.check.live.run import LiveRequest, check_live
from cutline.cli.watch.turn import take_turn
from cutline.embedded.fleet import stop_fleet
from cutline.embedded.server import stop_server
from cutline.fleet.progress import Silent
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics_gathering import MetricsGatherer
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, slots_of
from tests.integration.promoting import PRIMARY, STANDBY, follow, promote
from tests.servers.dealt import start_fleet
from tests.unit.metric_values import of, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIVE_SECONDS_MAX = 50.0
# Enough WAL to fill several segments, which are 1 MB here or more.
SWITCHES = ("SELECT pg_logical_emit_message(false, 'x', repeat('y', 100000)), pg_switch_wal()",) * 4


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[ChangingFleet]:
    """A fleet of one shard with one standby, or with as many as the test's parameter says."""
    try:
        source = start_fleet(tmp_path / "fleet", shards=1, backups=getattr(request, "param", 1))
        target = start_fleet(tmp_path / "target", shards=1, backups=0, like_shared=True)
        fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
        into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
        found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), tmp_path)
        found.execute(
            PRIMARY,
            "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
            "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
        )
        found.await_replay(STANDBY)
        found.runs.init()
        found.runs.full("chain")
        found.write()
        found.await_replay(STANDBY)
        found.increment()
        yield found
    finally:
        stop_fleet(tmp_path / "fleet", delete=True)
        stop_fleet(tmp_path / "target", delete=True)


def command(place: ChangingFleet, *words: str) -> dict[str, Any]:
    code, document = run_here(place.fleet, *words)
    assert code == 0, document
    return document


def nodes_of(place: ChangingFleet) -> dict[str, dict[str, Any]]:
    return {node["node"]: node for node in command(place, "status", "--nodes")["nodes"]}


def listed(place: ChangingFleet) -> dict[str, Any]:
    (snapshot,) = command(place, "list")["snapshots"]
    return snapshot


def gathered(place: ChangingFleet) -> dict[str, dict[str, float]]:
    return read(MetricsGatherer().gather(place.fleet).samples)


def test_after_a_failover_servers_are_shown_in_their_current_roles(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(turn_module, "ANSWER_SECONDS", 30.0)
    with take_turn(place.fleet, lambda text, **_: said.append(text)) as turn:
        assert turn.keep()
        stop_server(place.servers.node(PRIMARY))
        promote(place, STANDBY)
        turn._renewed_at = -turn_module.RENEW_SECONDS
        # The watch starts over, and then takes its lock on the promoted server.
        assert not turn.keep()
        assert f"{STANDBY} as {PRIMARY}" in said[-1]
    with take_turn(place.fleet, lambda *_, **__: None):
        nodes = nodes_of(place)
        assert nodes[PRIMARY]["watch"]["command"] == "watch"
    assert (nodes[PRIMARY]["role"], nodes[PRIMARY]["server"], nodes[PRIMARY]["problem"]) == ("primary", STANDBY, None)
    assert (nodes[STANDBY]["role"], nodes[STANDBY]["server"]) == ("standby", PRIMARY)
    assert nodes[STANDBY]["problem"] is not None
    assert [slot["slot"] for slot in nodes[PRIMARY]["slots"]] == slots_of(place.fleet.node(STANDBY).dsn)
    assert listed(place)["retained_wal"].keys() == {PRIMARY}
    found = gathered(place)
    assert of(metrics.NODE_UP, found) == {f"{PRIMARY}/primary": 1, f"{STANDBY}/standby": 0}
    assert of(metrics.PROMOTED, found) == {PRIMARY: 1}

    place.write()
    place.increment()
    follow(place, PRIMARY, STANDBY)
    found = gathered(place)
    assert of(metrics.NODE_IN_RECOVERY, found) == {PRIMARY: 0, STANDBY: 1}
    assert of(metrics.REPLAY_LAG, found) == {STANDBY: 0}
    document = command(place, "show", "chain")
    assert document["timelines"] == [{}, {}, {PRIMARY: 2}]
    assert [sorted(absent) for absent in document["absent"]] == [[], [], [STANDBY]]
    # The other way round, everything is as in fleet.toml again.
    stop_server(place.servers.node(STANDBY))
    promote(place, PRIMARY)
    assert nodes_of(place)[PRIMARY]["server"] == PRIMARY
    assert of(metrics.PROMOTED, gathered(place)) == {PRIMARY: 0}


def test_a_chain_without_its_slot_is_seen_and_ended_by_command(place: ChangingFleet) -> None:
    (slot,) = slots_of(place.fleet.node(PRIMARY).dsn)
    assert listed(place)["state"] == "complete"
    place.execute(PRIMARY, f"SELECT pg_drop_replication_slot('{slot}')")
    snapshot = listed(place)
    assert (snapshot["state"], snapshot["slot_problems"]) == ("slot-lost", {PRIMARY: f"slot {slot} does not exist"})
    assert of(metrics.SNAPSHOTS, gathered(place))["slot-lost"] == 1
    assert nodes_of(place)[STANDBY]["slots"][0]["chain_state"] == "slot-lost"

    plan = command(place, "end", "chain", "--dry-run")
    assert [one["node"] for one in plan["slots"]] == [STANDBY]
    assert listed(place)["state"] == "slot-lost"
    ended = command(place, "end", "chain", "--yes")
    assert ended["ended"]["slot_problem"] == f"slot {slot} does not exist"
    assert slots_of(place.fleet.node(STANDBY).dsn) == []
    assert listed(place)["state"] == "ended"
    assert command(place, "end", "chain", "--yes")["ended_before"]
    code, refused = run_here(place.fleet, "create", "chain", "--incremental")
    assert (code, refused["error"]) == (3, "chain-ended")
    place.check_restores(1)


def test_an_ended_chain_keeps_the_slot_of_a_server_that_is_away_until_it_is_back(place: ChangingFleet) -> None:
    place.stop(STANDBY)
    code, ended = run_here(place.fleet, "end", "chain", "--yes")
    assert (code, ended["slots_left"]) == (6, [STANDBY])
    assert listed(place)["state"] == "ended"
    place.start(STANDBY)
    assert slots_of(place.fleet.node(STANDBY).dsn) != []
    assert nodes_of(place)[STANDBY]["slots"][0]["chain_state"] == "ended"
    assert command(place, "end", "chain", "--yes")["slots_left"] == []
    assert slots_of(place.fleet.node(STANDBY).dsn) == []


def test_an_invalidated_slot_is_shown_and_its_limit_was_warned_of(place: ChangingFleet) -> None:
    assert command(place, "init")["surroundings"] == []
    place.execute(
        PRIMARY,
        "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'",
        "SELECT pg_reload_conf()",
    )
    with psycopg.connect(place.fleet.node(PRIMARY).dsn, application_name="Patroni heartbeat"):
        document = command(place, "init")
    found = {one["warning"]: one for one in document["surroundings"]}
    assert found.keys() == {"patroni", "slot-wal-limit"}
    assert {node for one in found.values() for node in one["nodes"]} == {PRIMARY}
    assert "ignore_slots: [{type: logical, plugin: pgoutput, database: " in found["patroni"]["action"]
    assert len(document["warnings"]) >= len(found)
    (slot,) = slots_of(place.fleet.node(PRIMARY).dsn)
    place.execute(PRIMARY, *SWITCHES, "CHECKPOINT")
    (shown,) = nodes_of(place)[PRIMARY]["slots"]
    assert (shown["slot"], shown["wal_status"], shown["retained_bytes"]) == (slot, "lost", 0)
    assert "wal_removed" in shown["problem"]
    assert shown["snapshot"] == "chain"
    assert listed(place)["slot_problems"].keys() == {PRIMARY}
    assert of(metrics.SLOT_UNUSABLE, gathered(place))[f"{PRIMARY}/{slot}"] == 1


@pytest.mark.parametrize("place", [2], indirect=True)
def test_a_live_check_does_not_wait_long_for_the_standby_of_a_dead_primary(place: ChangingFleet) -> None:
    place.stop(PRIMARY)
    promote(place, STANDBY)
    place.write()
    began = time.monotonic()
    report = check_live(place.fleet, LiveRequest(), place.runs.spark, Silent())
    assert time.monotonic() - began < LIVE_SECONDS_MAX
    assert report.unreachable.keys() == {STANDBY}
    assert [skipped.what for skipped in report.skipped] == ["standby s1-b2"]
