"""A server that pg_rewind has made a standby again has no slot: the next increment copies it, and the chain goes on.

Expected rows come from the servers that accept writes, at quiet moments (COPY).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.server import PORT, SUPERUSER, stop_server
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.snapshot_runs import run_command, slots_of
from tests.integration.promoting import (
    PRIMARY,
    STANDBY,
    become_standby,
    fleet_with_chain,
    follow,
    promote,
    switch_over,
    take_replayed_increment,
)
from tests.servers.disasters import kill_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    """A shard with a standby; pg_rewind needs checksums or hints in the WAL, and WAL from before the promotion."""
    with fleet_with_chain(tmp_path, spark, 1, 1, {"wal_log_hints": "on", "wal_keep_size": "1GB"}) as found:
        yield found


def rewind(place: ChangingFleet, node: str, leader: str) -> None:
    """Let pg_rewind make a server that was stopped a standby of the one that accepts writes, and start it."""
    server, source = place.servers.node(node), place.servers.node(leader)
    (server.data_directory / "postmaster.pid").unlink(missing_ok=True)
    place.servers._programs(server).run(
        "pg_rewind",
        f"--target-pgdata={server.data_directory}",
        f"--source-server=host={source.socket_folder} port={PORT} user={SUPERUSER} dbname=postgres",
        seconds_max=120,
    )
    follow(place, node, leader)
    assert slots_of(place.fleet.node(node).dsn) == []


def fail_over(place: ChangingFleet, *, is_archived: bool) -> None:
    """Kill the primary while it has commits that the standby lacks, and promote that; the chain may have them."""
    place.stop(STANDBY)
    place.write()
    place.execute(PRIMARY, "INSERT INTO seen VALUES (7000, 'lost'), (7001, 'lost')")
    if is_archived:
        assert place.increment().absent.keys() == {STANDBY}
    kill_server(place.servers.node(PRIMARY))
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    place.execute(STANDBY, "INSERT INTO seen VALUES (7000, 'kept')")


def check_chain(place: ChangingFleet) -> None:
    """Both copies are compared from now on, and every restore point has the rows that the primary had."""
    code, document = run_command(place.fleet, "check", "chain")
    assert code == 0, document
    report = place.check()
    assert report.result == VALID
    assert {one.what for one in report.uncompared_points} == {f"the copy of {STANDBY}", "rows of shard s1"}
    place.check_restores(*place.states)


@pytest.mark.parametrize("is_archived", [False, True], ids=["not archived", "archived"])
def test_a_rewound_primary_is_copied_again_and_may_take_its_place(place: ChangingFleet, *, is_archived: bool) -> None:
    take_replayed_increment(place)
    fail_over(place, is_archived=is_archived)
    place.write()
    between = place.increment()
    assert between.renewed.keys() == ({PRIMARY} if is_archived else set())
    assert between.absent.keys() == {STANDBY}
    # Until it is back, a check names its copy, with which the shard's rows would be compared, and nothing else.
    report = place.check()
    assert report.result == INCONCLUSIVE
    assert {skipped.what for skipped in report.skipped} == {f"the copy of {STANDBY}", "rows of shard s1"}

    rewind(place, PRIMARY, STANDBY)
    place.write()
    place.await_replay(PRIMARY)
    commit = place.increment()
    assert commit.renewed.keys() == {STANDBY}
    assert not commit.absent
    place.write()
    assert not place.increment().renewed
    check_chain(place)

    # Its copy goes on as the shard's when it is the primary again.
    place.await_replay(PRIMARY)
    switch_over(place, STANDBY, PRIMARY)
    commit = place.increment()
    assert commit.timelines == {PRIMARY: 3, STANDBY: 3}
    assert not commit.renewed
    assert not commit.absent
    check_chain(place)


@pytest.mark.parametrize("is_archived", [False, True], ids=["not archived", "archived"])
def test_a_primary_that_is_rewound_before_the_next_increment(place: ChangingFleet, *, is_archived: bool) -> None:
    take_replayed_increment(place)
    fail_over(place, is_archived=is_archived)
    rewind(place, PRIMARY, STANDBY)
    place.write()
    place.await_replay(PRIMARY)
    commit = place.increment()
    assert commit.renewed.keys() >= {PRIMARY if is_archived else STANDBY}
    assert is_archived or PRIMARY not in commit.renewed
    assert not commit.absent
    place.write()
    commit = place.increment()
    assert not commit.renewed
    assert not commit.absent
    assert place.check().result == VALID
    place.check_restores(*place.states)


def test_a_rewound_server_that_is_promoted_before_it_was_copied(place: ChangingFleet) -> None:
    """It accepts writes and has no slot, so the shard is copied again."""
    take_replayed_increment(place)
    fail_over(place, is_archived=False)
    rewind(place, PRIMARY, STANDBY)
    place.write()
    place.await_replay(PRIMARY)
    switch_over(place, STANDBY, PRIMARY)
    assert PRIMARY in place.increment().renewed
    place.write()
    commit = place.increment()
    assert not commit.renewed
    assert not commit.absent
    assert place.check().result == VALID
    place.check_restores(*place.states)


def test_a_stray_standby_that_was_rewound_is_copied_again(place: ChangingFleet) -> None:
    """It was promoted by mistake and wrote something, while its primary went on."""
    take_replayed_increment(place)
    place.stop(STANDBY)
    become_standby(place, STANDBY)
    place.execute(STANDBY, "SELECT pg_promote(true, 60)", "INSERT INTO seen VALUES (5000, 'stray')")
    stop_server(place.servers.node(STANDBY))
    place.write()
    assert place.increment().absent.keys() == {STANDBY}
    rewind(place, STANDBY, PRIMARY)
    place.write()
    place.await_replay(STANDBY)
    commit = place.increment()
    assert commit.renewed.keys() == {STANDBY}
    assert not commit.absent
    place.write()
    assert not place.increment().renewed
    check_chain(place)
