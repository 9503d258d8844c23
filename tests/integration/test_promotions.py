"""Promotions that follow each other, of a standby that followed a standby, under a running watch, and in a base copy.

Expected rows come from the servers that accept writes, at quiet moments (COPY).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.embedded.fleet import stop_fleet
from cutline.embedded.server import create_standby, delete_server, stop_server
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.snapshots.create.archive_ahead import AHEAD_BYTES_MIN, archive_ahead
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.commit import Increment, LostWal
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import SnapshotError, UnreachableError
from cutline.wal.drain import drain as draining
from cutline.wal.drain.slots import slot_state
from cutline.wal.segments.archive import segment_key
from tests.commands.changing_fleet import SEEN, ChangingFleet
from tests.commands.snapshot_runs import (
    Ready,
    Runs,
    configure_fleet,
    names_of_snapshots,
    run_command,
    slots_of,
    sorted_copies,
)
from tests.commands.watching import Reached, Watching
from tests.integration.promoting import PRIMARY, STANDBY, become_standby, fleet_with_chain, follow, prepare, promote
from tests.integration.test_falling_standbys import COPYING, Stopping
from tests.integration.test_watch import Watch, listed, time_of, wait_until
from tests.servers.dealt import start_fleet
from tests.servers.disasters import kill_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

THIRD = "s1-b2"


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[ChangingFleet]:
    """A shard with as many standbys as the test's parameter says, and the full snapshot `chain`."""
    with fleet_with_chain(tmp_path, spark, 1, getattr(request, "param", 2)) as found:
        yield found


def turn(place: ChangingFleet, node: str, leader: str) -> None:
    """Let a standby follow another server."""
    stop_server(place.servers.node(node))
    follow(place, node, leader)


def rebuild(place: ChangingFleet, node: str) -> None:
    """Copy the server that accepts writes into a new standby."""
    server = place.servers.node(node)
    delete_server(server)
    create_standby(place.servers._programs(server), server, place.servers.node(place.promoted[PRIMARY]))
    place.start(node)


def check_chain(place: ChangingFleet, *lacking: str) -> None:
    """All copies but these are compared, and every restore point has the rows that the primary had."""
    report = place.check()
    assert not report.conflicts
    assert {skipped.what for skipped in report.skipped if skipped.is_absent} == {
        f"the copy of {node}" for node in lacking
    }
    # If only one copy is left, there is none to compare with.
    assert {skipped.what for skipped in report.skipped if not skipped.is_absent} <= {"rows of shard s1"}
    assert report.result == (INCONCLUSIVE if lacking else VALID)
    place.check_restores(*place.states)


def test_two_failovers_to_other_servers_between_two_increments(place: ChangingFleet) -> None:
    place.write()
    place.await_replay(STANDBY)
    place.await_replay(THIRD)
    place.increment()
    place.write()
    prepare(place, "over-both")
    place.await_replay(STANDBY)
    place.await_replay(THIRD)
    kill_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    turn(place, THIRD, STANDBY)
    place.write()
    place.await_replay(THIRD)
    kill_server(place.servers.node(STANDBY))
    promote(place, THIRD)
    place.write()
    commit = place.increment()
    assert commit.timelines == {PRIMARY: 3}
    assert not commit.renewed
    assert commit.absent.keys() == {STANDBY, THIRD}
    place.execute(THIRD, "COMMIT PREPARED 'over-both'")
    place.write()
    place.increment()
    check_chain(place, STANDBY, THIRD)

    rebuild(place, PRIMARY)
    rebuild(place, STANDBY)
    place.write()
    place.await_replay(PRIMARY)
    place.await_replay(STANDBY)
    commit = place.increment()
    assert commit.renewed.keys() == {STANDBY, THIRD}
    assert not commit.absent
    check_chain(place)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_a_failover_and_its_way_back_between_two_increments(place: ChangingFleet) -> None:
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.write()
    place.await_replay(STANDBY)
    stop_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    place.write()
    follow(place, PRIMARY, STANDBY)
    place.write()
    place.await_replay(PRIMARY)
    stop_server(place.servers.node(STANDBY))
    promote(place, PRIMARY)
    place.write()
    follow(place, STANDBY, PRIMARY)
    place.write()
    place.await_replay(STANDBY)
    commit = place.increment()
    assert commit.timelines == {PRIMARY: 3, STANDBY: 3}
    assert not commit.renewed
    assert not commit.absent
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    check_chain(place)


@pytest.mark.parametrize("is_lossy", [False, True], ids=["whole", "lossy"])
def test_a_promotion_after_a_create_that_failed_on_the_timeline_before(place: ChangingFleet, *, is_lossy: bool) -> None:
    """The create archived WAL of the second of three servers, which no commit lists; the third may lack it."""
    place.write()
    place.await_replay(STANDBY)
    place.await_replay(THIRD)
    place.increment()
    kill_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    turn(place, THIRD, STANDBY)
    place.write()
    place.await_replay(THIRD)
    if is_lossy:
        place.stop(THIRD)
        place.execute(STANDBY, "INSERT INTO seen VALUES (7000, 'lost'), (7001, 'lost')")

    def fail_over(reached: Reached) -> None:
        if reached == Reached(CrashPoint.ARCHIVED, 1):
            if not is_lossy:
                place.await_replay(THIRD)
            kill_server(place.servers.node(STANDBY))
            place.servers.start_node(place.servers.node(THIRD))
            promote(place, THIRD)

    request = CreateRequest("chain", retries=0)
    with pytest.raises(UnreachableError):
        create_increment(place.fleet, request, place.runs.spark, Watching(fail_over))
    place.execute(THIRD, "INSERT INTO seen VALUES (7000, 'kept')")
    place.write()
    commit = place.increment()
    assert commit.renewed.keys() == ({PRIMARY} if is_lossy else set())
    assert commit.timelines == ({} if is_lossy else {PRIMARY: 3})
    place.write()
    assert not place.increment().renewed
    check_chain(place, STANDBY, THIRD)


def test_a_promotion_after_a_create_that_made_two_cuts_and_failed(place: ChangingFleet) -> None:
    """Both cuts have the same id, and so do their markers, which the promoted server has as well."""
    place.write()
    for standby in (STANDBY, THIRD):
        place.await_replay(standby)
    place.increment()
    # Its slot stays behind what the create archives.
    place.stop(STANDBY)
    place.write()

    def fail(reached: Reached) -> None:
        if reached == Reached(CrashPoint.FINISHES_WRITTEN, 1):
            place.stop(THIRD)
        if reached.point == CrashPoint.ARCHIVED:
            raise UnreachableError("the store is away")

    watching = Watching(fail)
    with pytest.raises(UnreachableError, match="the store is away"):
        create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, watching)
    assert Reached(CrashPoint.FINISHES_WRITTEN, 2) in watching.reached_points
    place.start(STANDBY)
    stop_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    place.write()
    assert PRIMARY not in place.increment().renewed
    check_chain(place, STANDBY, THIRD)


@pytest.mark.parametrize("place", [1], indirect=True)
@pytest.mark.parametrize("is_moved", [True, False], ids=["slot moved", "slot stays"])
def test_a_create_that_failed_after_a_promotion_is_repeated(place: ChangingFleet, *, is_moved: bool) -> None:
    """It has archived WAL of the new timeline, of which no commit knows, and perhaps not moved the slot there."""
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.write()
    place.await_replay(STANDBY)
    kill_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    place.write()

    (last,) = read_chain(place.fleet.store.open(), "chain").newest_segments(PRIMARY)[-1:]

    def fail(reached: Reached) -> None:
        if reached.point == CrashPoint.ARCHIVED:
            raise UnreachableError("the store is away")

    with ExitStack() as stack:
        if not is_moved:
            lost = psycopg.OperationalError("the server closed the connection")
            stack.enter_context(patch.object(draining, "advance_slot", side_effect=lost))
        stack.enter_context(
            pytest.raises(UnreachableError, match=r"the store is away|the server closed the connection")
        )
        create_increment(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, Watching(fail))
    assert place.fleet.store.open().exists(segment_key(last.key.rpartition("/")[0], last.number + 1))
    (slot,) = slots_of(place.fleet.node(STANDBY).dsn)
    with psycopg.connect(place.fleet.node(STANDBY).dsn, autocommit=True) as connection:
        state = slot_state(connection, slot)
    assert state is not None
    assert (state.confirmed > last.through) == is_moved
    place.write()
    commit = place.increment()
    assert not commit.renewed
    assert commit.timelines == {PRIMARY: 2}
    check_chain(place, STANDBY)


FAR = "SELECT pg_logical_emit_message(false, 'x', repeat('y', 400000)), pg_switch_wal()"


def switch_of(place: ChangingFleet, node: str, timeline: int) -> Lsn:
    """Where the timeline ended, according to the newest history file of the server."""
    files = sorted((place.servers.node(node).data_directory / "pg_wal").glob("*.history"))
    (position,) = re.findall(rf"(?m)^{timeline}\t(\S+)", files[-1].read_text())
    return Lsn.parse(position)


def test_a_timeline_with_the_number_of_another_servers_does_not_hide_what_is_lost(place: ChangingFleet) -> None:
    """Two standbys begin timeline 2; the chain has that of one, and the other one goes on, on timeline 3."""
    place.write()
    for standby in (STANDBY, THIRD):
        place.await_replay(standby)
    place.increment()
    place.stop(THIRD)
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    kill_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    place.write()
    assert place.increment().switches[PRIMARY] == {1: switch_of(place, STANDBY, 1)}
    place.execute(STANDBY, FAR, FAR)
    place.write()
    place.increment()
    kill_server(place.servers.node(STANDBY))
    place.servers.start_node(place.servers.node(THIRD))
    promote(place, THIRD)
    place.execute(THIRD, FAR)
    stop_server(place.servers.node(THIRD))
    become_standby(place, THIRD)
    promote(place, THIRD)
    place.write()
    # The second and the third increment are lost, too, although their cuts are before the end of the other timeline 2.
    chain = read_chain(place.fleet.store.open(), "chain")
    cuts = [chain.up_to(number).position(PRIMARY) for number in (2, 3, 4)]
    assert switch_of(place, THIRD, 1) < cuts[0] < cuts[1] < switch_of(place, THIRD, 2) < cuts[2]
    commit = place.increment()
    assert isinstance(commit, Increment)
    assert commit.renewed[PRIMARY].lost == LostWal(switch_of(place, THIRD, 1), 2)
    place.write()
    assert not place.increment().renewed
    check_chain(place, STANDBY, THIRD)


def test_a_slot_where_the_archive_ends_may_be_on_another_timeline_with_the_same_number(place: ChangingFleet) -> None:
    """A create that died may have moved the slot of a standby to where, on another server, a later cut ends."""
    place.write()
    for standby in (STANDBY, THIRD):
        place.await_replay(standby)
    place.increment()
    place.stop(THIRD)
    place.execute(PRIMARY, "INSERT INTO seen VALUES (7000, 'on one server')", FAR)
    place.await_replay(STANDBY)
    kill_server(place.servers.node(PRIMARY))
    place.stop(STANDBY)
    place.servers.start_node(place.servers.node(THIRD))
    promote(place, THIRD)
    place.write()
    assert place.increment().timelines == {PRIMARY: 2}
    (last,) = read_chain(place.fleet.store.open(), "chain").newest_segments(PRIMARY)[-1:]
    kill_server(place.servers.node(THIRD))
    place.servers.start_node(place.servers.node(STANDBY))
    (slot,) = slots_of(place.fleet.node(STANDBY).dsn)
    place.execute(STANDBY, f"SELECT pg_replication_slot_advance('{slot}', '{last.through}')")
    promote(place, STANDBY)
    place.write()
    commit = place.increment()
    assert isinstance(commit, Increment)
    switch = min(switch_of(place, node, 1) for node in (STANDBY, THIRD))
    assert commit.renewed[PRIMARY].lost == LostWal(switch, 2)
    check_chain(place, STANDBY, THIRD)


def test_a_server_that_is_promoted_before_a_switch_of_which_it_knows(place: ChangingFleet) -> None:
    """It has the history file of a timeline whose WAL it lacks, and continues that timeline, at an earlier position."""
    place.write()
    for standby in (STANDBY, THIRD):
        place.await_replay(standby)
    place.increment()
    place.stop(THIRD)
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    kill_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    kill_server(place.servers.node(STANDBY))
    wal = [place.servers.node(node).data_directory / "pg_wal" for node in (STANDBY, THIRD)]
    copied, owner = shutil.copy(wal[0] / "00000002.history", wal[1]), wal[1].stat()
    os.chown(copied, owner.st_uid, owner.st_gid)
    place.servers.start_node(place.servers.node(THIRD))
    promote(place, THIRD)
    place.execute(THIRD, FAR)
    place.write()
    assert switch_of(place, THIRD, 1) > switch_of(place, THIRD, 2)
    commit = place.increment()
    assert isinstance(commit, Increment)
    assert commit.renewed[PRIMARY].lost == LostWal(switch_of(place, THIRD, 2), 2)
    place.write()
    assert not place.increment().renewed
    check_chain(place, STANDBY, THIRD)


@pytest.mark.parametrize("middle", ["follows", "stopped", "waits"])
def test_a_cascading_standby_is_promoted(place: ChangingFleet, middle: str) -> None:
    """Of three servers in a row the last is promoted; the middle one follows it, is stopped, or waits for the first."""
    turn(place, THIRD, STANDBY)
    place.write()
    place.await_replay(THIRD)
    assert not place.increment().absent
    place.write()
    place.await_replay(THIRD)
    kill_server(place.servers.node(PRIMARY))
    if middle == "stopped":
        place.stop(STANDBY)
    promote(place, THIRD)
    place.write()
    if middle == "follows":
        turn(place, STANDBY, THIRD)
        place.await_replay(STANDBY)
    if middle == "waits":
        place.runs = Runs(replace(place.fleet, standby_wait_seconds=1), place.runs.spark)
    commit = place.increment()
    assert not commit.renewed
    lacking = {THIRD} if middle == "follows" else {STANDBY, THIRD}
    assert commit.absent.keys() == lacking
    assert commit.timelines[PRIMARY] == 2
    check_chain(place, *lacking)

    # The middle one follows at last, if it can, and its copy goes on.
    if middle == "stopped":
        place.servers.start_node(place.servers.node(STANDBY))
    if middle != "follows":
        turn(place, STANDBY, THIRD)
    place.write()
    place.await_replay(STANDBY)
    commit = place.increment()
    assert not commit.renewed
    assert commit.absent.keys() == {THIRD}
    check_chain(place, THIRD)


def test_the_middle_of_three_servers_in_a_row_is_promoted(place: ChangingFleet) -> None:
    """The last one stays connected, and follows it to the new timeline."""
    turn(place, THIRD, STANDBY)
    place.write()
    place.await_replay(THIRD)
    place.increment()
    place.write()
    place.await_replay(THIRD)
    kill_server(place.servers.node(PRIMARY))
    promote(place, STANDBY)
    place.write()
    place.await_replay(THIRD)
    commit = place.increment()
    assert commit.timelines == {PRIMARY: 2, THIRD: 2}
    assert not commit.renewed
    assert commit.absent.keys() == {STANDBY}
    check_chain(place, STANDBY)


@contextmanager
def failing_fleet(folder: Path, spark: SparkSession, more: str) -> Iterator[ChangingFleet]:
    """Run a shard with a standby, without a snapshot, whose servers need not run at the end."""
    try:
        servers = start_fleet(folder / "fleet", shards=1, backups=1)
        target = start_fleet(folder / "target", shards=1, backups=0, like_shared=True)
        fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=more)
        into = configure_fleet(target, folder / "target.toml", f"file://{folder}/other-store")
        place = ChangingFleet(servers, into, Runs(fleet, Ready(spark)), folder)
        place.execute(PRIMARY, *SEEN)
        place.await_replay(STANDBY)
        place.runs.init()
        yield place
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


def name_all_hosts(fleet: Fleet) -> None:
    """Write both servers of the shard into the dsn of each node in fleet.toml; libpq finds the one for its role."""
    hosts = ",".join(str(conninfo_to_dict(node.dsn)["host"]) for node in fleet.nodes)
    text = fleet.path.read_text()
    for node in fleet.nodes:
        kind = "standby" if node.backup_of else "primary"
        dsn = make_conninfo(node.dsn, host=hosts, port="5432,5432", target_session_attrs=kind)
        assert text.count(json.dumps(node.dsn)) == 1
        text = text.replace(json.dumps(node.dsn), json.dumps(dsn))
    fleet.path.write_text(text)


def await_increment(place: ChangingFleet) -> int:
    """Wait until the watch has taken an increment whose cut is after now; return its number."""
    began = datetime.now(UTC).timestamp()
    found: list[int] = []

    def is_taken() -> bool:
        (snapshot,) = listed(place.fleet)
        found[:] = [one["number"] for one in snapshot["increments"] if time_of(one["cut_at"]) > began]
        return bool(found)

    wait_until(is_taken, lambda: "the watch takes an increment")
    return found[-1]


@pytest.mark.parametrize("roles", ["found by commands", "found by libpq"])
def test_a_watch_goes_on_after_a_promotion(tmp_path: Path, spark: SparkSession, roles: str) -> None:
    """With two nodes in fleet.toml, or with both servers in the dsn of each; nobody edits the file."""
    with failing_fleet(tmp_path, spark, '[watch]\nevery = "10s"\ncheck = "never"\n') as place:
        fleet, into = place.fleet, place.target
        if roles == "found by libpq":
            name_all_hosts(fleet)
        watch = Watch(fleet, tmp_path / "watch.log")
        try:
            watch.await_text("full snapshot watch-")
            first = await_increment(place)
            place.write()
            place.await_replay(STANDBY)
            kill_server(place.servers.node(PRIMARY))
            watch.await_text("node s1")
            promote(place, STANDBY)
            place.write()
            number = await_increment(place)
            # Another one, after it has taken its lock on the promoted server.
            place.write()
            await_increment(place)
            (snapshot,) = listed(fleet)
            assert watch.stop()[0] == 0
        finally:
            if watch.process.poll() is None:
                watch.process.kill()
                watch.process.wait()
        chain = read_chain(fleet.store.open(), snapshot["name"])
        assert first < number < chain.commits[-1].increment
        assert chain.commits[-1].timelines == {PRIMARY: 2}
        assert not any(commit.renewed for commit in chain.increments)
        assert place.check(name=snapshot["name"]).result == INCONCLUSIVE
        place.runs.restore(snapshot["name"], into, use_backup_copies=True)
        assert [sorted_copies(node.dsn) for node in into.primaries] == place.live_state()


POINTS = [CrashPoint.SLOT_MADE, COPYING, CrashPoint.BASE_COPIED, CrashPoint.STARTS_WRITTEN, CrashPoint.ARCHIVED]


@pytest.mark.parametrize("more", ["", '[copies]\nresume_from = "1 KiB"\n'], ids=["again", "resumed"])
@pytest.mark.parametrize("is_lossy", [False, True], ids=["whole", "lossy"])
@pytest.mark.parametrize("at", POINTS)
def test_a_failover_in_a_full_snapshot(
    tmp_path: Path, spark: SparkSession, at: str, more: str, *, is_lossy: bool
) -> None:
    """What the old primary alone has had is in no restore point, whether or not the snapshot was to be resumed."""
    with failing_fleet(tmp_path, spark, more) as place:
        if is_lossy:
            place.stop(STANDBY)
            place.execute(PRIMARY, "INSERT INTO seen VALUES (7000, 'lost'), (7001, 'lost')")

        def fail_over() -> None:
            if not is_lossy:
                place.await_replay(STANDBY)
            kill_server(place.servers.node(PRIMARY))
            place.servers.start_node(place.servers.node(STANDBY))
            promote(place, STANDBY)

        progress = Stopping(at=at, act=fail_over)
        with pytest.raises(SnapshotError) as raised:
            create_full(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
        assert progress.is_over
        assert raised.value.exit_code == UnreachableError.exit_code, raised.value
        assert names_of_snapshots(place.fleet) == []

        place.execute(STANDBY, "INSERT INTO seen VALUES (7000, 'kept')")
        create_full(place.fleet, CreateRequest("chain"), place.runs.spark, Silent())
        place.states[0] = place.live_state()
        # The slot of the attempt that failed is gone.
        assert len(slots_of(place.fleet.node(STANDBY).dsn)) == 1
        place.write()
        assert not place.increment().renewed
        report = place.check()
        assert not report.conflicts
        assert report.result == INCONCLUSIVE
        place.check_restores(0, 1)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_wal_that_was_archived_ahead_and_lost_is_found_before_a_terminal_snapshot_ends_writes(
    place: ChangingFleet,
) -> None:
    """No commit lists this WAL, as is usual under a watch, and the promoted server lacks it."""
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.await_replay(STANDBY)
    place.stop(STANDBY)
    place.execute(PRIMARY, "INSERT INTO seen VALUES (7000, 'lost')", *[FAR] * 3)
    assert archive_ahead(place.fleet, "chain", Silent()).bytes > AHEAD_BYTES_MIN
    kill_server(place.servers.node(PRIMARY))
    place.servers.start_node(place.servers.node(STANDBY))
    promote(place, STANDBY)
    place.execute(STANDBY, "INSERT INTO seen VALUES (7001, 'kept')")
    lost = rf"on timeline 2, which left timeline 1 at {switch_of(place, STANDBY, 1)}, .* a failover lost transactions"
    create = ("create", "chain", "--incremental")
    code, document = run_command(place.fleet, *create, "--dry-run")
    assert code == 0, document
    assert re.search(rf"{PRIMARY} will be copied again: .*{lost}", "\n".join(document["warnings"]))
    code, document = run_command(place.fleet, *create, "--terminal")
    assert code == 0, document
    assert [renewed["node"] for renewed in document["renewed"]] == [PRIMARY]
    assert re.search(lost, document["renewed"][0]["reason"])
    place.states[2] = place.live_state()
    check_chain(place, STANDBY)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_a_drain_stores_no_wal_of_a_timeline_that_began_after_the_cut(place: ChangingFleet) -> None:
    """The dsn leads to the promoted server by itself, which writes past the end of the cut and lacks WAL before it."""
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.await_replay(STANDBY)
    place.stop(STANDBY)
    place.write()
    hosts = ",".join(str(place.servers.node(node).socket_folder) for node in (PRIMARY, STANDBY))
    dsn = make_conninfo(place.fleet.node(PRIMARY).dsn, host=hosts, port="5432,5432", target_session_attrs="read-write")
    following = replace(place.fleet, nodes=(replace(place.fleet.node(PRIMARY), dsn=dsn), place.fleet.node(STANDBY)))

    def fail_over(reached: Reached) -> None:
        if reached == Reached(CrashPoint.FINISHES_WRITTEN, 1):
            kill_server(place.servers.node(PRIMARY))
            place.servers.start_node(place.servers.node(STANDBY))
            promote(place, STANDBY)
            place.execute(STANDBY, *[FAR] * 3)

    (last,) = read_chain(place.fleet.store.open(), "chain").newest_segments(PRIMARY)[-1:]
    with pytest.raises(UnreachableError, match=f"{PRIMARY}: its server was promoted: its timeline was 1 and is 2"):
        create_increment(following, CreateRequest("chain", retries=0), place.runs.spark, Watching(fail_over))
    assert not place.fleet.store.open().exists(segment_key(last.key.rpartition("/")[0], last.number + 1))
    assert not place.increment().renewed
    check_chain(place, STANDBY)
