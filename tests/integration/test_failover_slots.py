"""A fleet that lists primaries only goes on over a failover, if PostgreSQL has synchronized the chain's slot.

The standby is not in fleet.toml: the dsn of the primary names the hosts of both servers. Expected rows come from the
surviving server (COPY), and the states of slots from pg_replication_slots.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.embedded.server import PORT, SUPERUSER, stop_server
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import News, Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.base_copy.copy_slots import insert_position
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.failover_slots import reading_failover_slots
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.wal.drain.slots import slot_name
from tests.commands.changing_fleet import SECONDS_MAX, SEEN, ChangingFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, run_command
from tests.commands.watching import Watching
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.postgresql(18, reason="before 18, FAILOVER and TWO_PHASE exclude each other")
PRIMARY, STANDBY = "s1", "s1-b1"
FAILOVER_SLOTS = "[copies]\nfailover_slots = true\n"
# The worker sleeps up to 30 s while no slot changes (slotsync.c).
WORKER_SECONDS_MAX, INCREMENT_SECONDS = 90.0, 3.0
WAIT_SECONDS, HELD_SECONDS_MAX = 3.0, 25.0
SLOT = "SELECT failover, synced, temporary, two_phase FROM pg_replication_slots WHERE slot_name = %s"


class Pair(ChangingFleet):
    """A shard whose standby is not in fleet.toml."""

    slot = ""

    def begin(self) -> None:
        """Make a table, and take the full snapshot `chain`."""
        self.execute(PRIMARY, *SEEN)
        self.runs.init()
        self.slot = slot_name(self.runs.full("chain").operation)

    def on(self, node: str, query: str, *values: object) -> list[tuple[object, ...]]:
        """Run a query on one of the servers, whichever role it has."""
        with psycopg.connect(self.servers.node(node).dsn(), autocommit=True) as connection:
            found = connection.execute(query.encode(), values)
            return found.fetchall() if found.description else []

    def synchronize(self) -> None:
        """Let the standby keep copies of failover slots."""
        ((conninfo,),) = self.on(STANDBY, "SELECT current_setting('primary_conninfo')")
        quoted = str(conninfo).replace("'", "''")
        self.on(STANDBY, f"ALTER SYSTEM SET primary_conninfo = '{quoted} dbname=postgres'")
        self.on(STANDBY, "ALTER SYSTEM SET sync_replication_slots = on")
        self.on(STANDBY, "SELECT pg_reload_conf()")

    def await_synchronized(self) -> None:
        """Wait until the standby keeps a copy of the slot.

        The slot has to move after the worker has first seen it, which may take half a minute: take increments until
        then.
        """
        deadline = time.monotonic() + WORKER_SECONDS_MAX
        while self.on(STANDBY, SLOT, self.slot) != [(True, True, False, True)]:
            assert time.monotonic() < deadline
            self.take_and_replay()
            time.sleep(INCREMENT_SECONDS)

    def stop_synchronizing(self) -> None:
        """End the worker; copies of slots stay."""
        self.on(STANDBY, "ALTER SYSTEM SET sync_replication_slots = off")
        self.on(STANDBY, "SELECT pg_reload_conf()")
        workers = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'slotsync worker'"
        await_true(lambda: not self.on(STANDBY, workers))

    def take_and_replay(self) -> None:
        """Take an increment of new rows, which the standby replays as well."""
        self.write()
        self.increment()
        self.replay()

    def replay(self) -> None:
        """Wait until the standby has replayed what the primary has written."""
        ((position,),) = self.on(PRIMARY, "SELECT pg_current_wal_insert_lsn()::text FROM pg_switch_wal()")
        await_true(lambda: self.on(STANDBY, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", position) == [(True,)])

    def fail_over(self) -> None:
        """Stop the primary at once, and promote the standby."""
        stop_server(self.servers.node(PRIMARY), immediate=True)
        self.on(STANDBY, "SELECT pg_promote(true, 60)")


def await_true(holds: Callable[[], bool], seconds_max: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds_max
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A shard of two servers that has one node in fleet.toml, with both hosts; or the fleet of the test's parameter.

    `listed`: its standby is a node as well. `mixed`: a second shard has a standby that is a node.
    """
    kind = getattr(request, "param", "unlisted")
    try:
        source = start_fleet(tmp_path / "fleet", shards=2 if kind == "mixed" else 1, backups=1)
        target = start_fleet(tmp_path / "target", shards=1, backups=0, like_shared=True)
        into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
        fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=FAILOVER_SLOTS)
        if kind != "listed":
            fleet = list_hosts(source, fleet)
        yield Pair(source, into, Runs(fleet, Ready(spark)), tmp_path)
    finally:
        stop_fleet(tmp_path / "fleet", delete=True)
        stop_fleet(tmp_path / "target", delete=True)


def list_hosts(servers: EmbeddedFleet, fleet: Fleet) -> Fleet:
    """Write both hosts of the first shard into the dsn of its primary, and no node for its standby."""
    hosts = ",".join(quote(str(servers.node(node).socket_folder), "") for node in (PRIMARY, STANDBY))
    dsn = f"postgresql://{SUPERUSER}@/bank?host={hosts}&port={PORT},{PORT}"
    beginning, *nodes = re.split(r"(?m)^(?=\[\[node\]\])", fleet.path.read_text())
    kept = [node for node in nodes if f'id = "{STANDBY}"' not in node]
    # The tables after the nodes are in the part of the last node.
    if kept[-1] != nodes[-1]:
        kept.append(re.sub(r"(?s)^\[\[node\]\].*?(?=^\[)", "", nodes[-1], flags=re.MULTILINE))
    kept[0] = re.sub("(?m)^dsn = .*$", f'dsn = "{dsn}"', kept[0])
    fleet.path.write_text(beginning + "".join(kept))
    return load_fleet(fleet.path)


def prepare(place: Pair, gid: str, row: int) -> None:
    """Leave a prepared transaction with a row."""
    with psycopg.connect(place.fleet.node(PRIMARY).dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute(f"INSERT INTO seen VALUES ({row}, 'prepared')".encode())
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())


def test_a_chain_goes_on_with_the_slot_that_the_standby_has_synchronized(place: Pair) -> None:
    place.synchronize()
    place.begin()
    assert place.on(PRIMARY, SLOT, place.slot) == [(True, False, False, True)]
    prepare(place, "before a cut", 9001)
    prepare(place, "rolled back", 9002)
    place.await_synchronized()
    place.take_and_replay()
    prepare(place, "after all cuts", 9003)
    place.write()
    place.replay()
    place.fail_over()
    last = max(place.states)

    place.execute(PRIMARY, "COMMIT PREPARED 'before a cut'", "ROLLBACK PREPARED 'rolled back'")
    place.write()
    commit = place.increment()
    assert (commit.renewed, commit.timelines, commit.increment) == ({}, {PRIMARY: 2}, last + 1)
    place.execute(PRIMARY, "COMMIT PREPARED 'after all cuts'")
    place.write()
    assert place.increment().renewed == {}
    report = place.check()
    assert not report.conflicts
    assert not report.gaps
    place.check_restores(*place.states)
    # The promoted server's slot is `synced`, and a slot like any other.
    assert place.on(STANDBY, SLOT, place.slot) == [(True, True, False, True)]
    assert run_command(place.fleet, "end", "chain", "--yes")[0] == 0
    assert place.on(STANDBY, SLOT, place.slot) == []


def test_a_copy_of_the_slot_that_is_behind_is_enough(place: Pair) -> None:
    """Its WAL is decoded again from an earlier position, which the archive has."""
    place.synchronize()
    place.begin()
    place.await_synchronized()
    place.stop_synchronizing()
    prepare(place, "decoded twice", 9001)
    place.take_and_replay()
    place.take_and_replay()
    place.fail_over()
    place.execute(PRIMARY, "COMMIT PREPARED 'decoded twice'")
    place.write()
    commit = place.increment()
    assert (commit.renewed, commit.timelines) == ({}, {PRIMARY: 2})
    assert not place.check().conflicts
    place.check_restores(*place.states)


def test_a_shard_whose_slot_was_not_synchronized_is_copied_again(place: Pair) -> None:
    place.begin()
    place.take_and_replay()
    prepare(place, "over the failover", 9001)
    place.replay()
    place.fail_over()
    place.execute(PRIMARY, "COMMIT PREPARED 'over the failover'")
    place.write()
    commit = place.increment()
    assert commit.renewed[PRIMARY].reason.endswith(f"slot {place.slot} does not exist")
    # The new copy's slot is one that standbys may copy, too.
    assert place.on(STANDBY, SLOT, place.slot) == [(True, False, False, True)]
    place.write()
    assert place.increment().renewed == {}
    assert not place.check().conflicts
    place.check_restores(*place.states)


def test_wal_that_the_failover_lost_is_not_continued_with_a_synchronized_slot(place: Pair) -> None:
    place.synchronize()
    place.begin()
    place.await_synchronized()
    stop_server(place.servers.node(STANDBY))
    place.write()
    place.increment()
    stop_server(place.servers.node(PRIMARY), immediate=True)
    place.servers.start_node(place.servers.node(STANDBY))
    place.on(STANDBY, "SELECT pg_promote(true, 60)")
    assert place.on(STANDBY, SLOT, place.slot) == [(True, True, False, True)]
    place.write()
    assert "a failover lost transactions" in place.increment().renewed[PRIMARY].reason
    place.write()
    assert place.increment().renewed == {}
    assert not place.check().conflicts
    place.check_restores(*place.states)


@pytest.mark.parametrize("place", ["listed"], indirect=True)
def test_a_shard_with_listed_standbys_has_no_failover_slots(place: Pair) -> None:
    """Its standbys have slots of the same name, which would end their slot synchronization."""
    place.begin()
    assert [place.on(node, SLOT, place.slot) for node in (PRIMARY, STANDBY)] == [[(False, False, False, True)]] * 2
    (warning,) = initialise(place.fleet, Silent()).warnings
    assert (warning.name, warning.nodes) == ("failover-slots-unused", (PRIMARY,))


@pytest.mark.postgresql(17, reason="before 18, FAILOVER and TWO_PHASE exclude each other")
def test_an_older_server_has_no_failover_slots(place: Pair) -> None:
    place.begin()
    assert place.on(PRIMARY, SLOT, place.slot) == [(False, False, False, True)]
    (warning,) = initialise(place.fleet, Silent()).warnings
    assert (warning.name, warning.nodes) == ("failover-slots-unused", (PRIMARY,))


@pytest.mark.parametrize("place", ["mixed"], indirect=True)
def test_a_standby_that_is_listed_later_is_copied_once_it_has_no_copy_of_the_slot(place: Pair) -> None:
    place.execute("s2", *SEEN)
    place.synchronize()
    place.begin()
    assert [place.on(node, SLOT, place.slot)[0][0] for node in (PRIMARY, "s2", "s2-b1")] == [True, False, False]
    place.await_synchronized()
    store = f"file://{place.folder}/store"
    listed = configure_fleet(place.servers, place.folder / "listed.toml", store, more=FAILOVER_SLOTS)
    place.runs = replace(place.runs, fleet=listed)
    place.write()
    (left_out,) = place.increment().left_out
    assert left_out.name == STANDBY
    assert f"its slot {place.slot} is synchronized from the primary's" in left_out.why
    warnings = {warning.name: warning.nodes for warning in initialise(listed, Silent()).warnings}
    assert warnings == {"failover-slot": (PRIMARY,), "failover-slots-unused": (PRIMARY, "s2")}
    for words in (["list"], ["status", "--nodes"], ["gc", "--yes"]):
        assert run_command(listed, *words)[0] == 0
    # As the reason and the warning say.
    with psycopg.connect(make_conninfo(listed.node(PRIMARY).dsn, replication="database"), autocommit=True) as session:
        session.execute(f'ALTER_REPLICATION_SLOT "{place.slot}" (FAILOVER false)'.encode())
    await_true(lambda: place.on(STANDBY, SLOT, place.slot) == [], WORKER_SECONDS_MAX)
    place.write()
    commit = place.increment()
    assert (commit.renewed.keys(), commit.absent) == ({STANDBY}, {})
    assert place.on(STANDBY, SLOT, place.slot) == [(False, False, False, True)]
    assert not place.check().conflicts


def test_after_a_switchover_the_old_primary_copies_the_slot_once_its_own_is_dropped(place: Pair) -> None:
    place.synchronize()
    place.begin()
    place.await_synchronized()
    place.write()
    stop_server(place.servers.node(PRIMARY))
    place.on(STANDBY, "SELECT pg_promote(true, 60)")
    place.write()
    assert place.increment().renewed == {}
    old, leader = place.servers.node(PRIMARY), place.servers.node(STANDBY)
    with (old.data_directory / "postgresql.auto.conf").open("a") as settings:
        conninfo = f"host={leader.socket_folder} port={PORT} user={SUPERUSER} dbname=postgres"
        settings.write(f"primary_conninfo = '{conninfo}'\nprimary_slot_name = 'back'\nsync_replication_slots = on\n")
    (old.data_directory / "standby.signal").touch()
    place.on(STANDBY, "SELECT pg_create_physical_replication_slot('back')")
    place.servers.start_node(old)
    await_true(lambda: f'same name slot "{place.slot}" already exists' in old.log_file.read_text(), WORKER_SECONDS_MAX)
    place.write()
    assert place.increment().renewed == {}
    # As docs/fleet-file.md says.
    place.on(PRIMARY, "SELECT pg_drop_replication_slot(%s)", place.slot)

    def is_synchronized() -> bool:
        place.write()
        assert place.increment().renewed == {}
        time.sleep(2)
        return place.on(PRIMARY, SLOT, place.slot) == [(True, True, False, True)]

    await_true(is_synchronized, WORKER_SECONDS_MAX)
    stop_server(leader)
    place.on(PRIMARY, "SELECT pg_promote(true, 60)")
    place.write()
    commit = place.increment()
    assert (commit.renewed, commit.timelines) == ({}, {PRIMARY: 3})
    assert not place.check().conflicts
    place.check_restores(max(place.states))


def test_a_standby_in_synchronized_standby_slots_that_is_down_does_not_hold_an_increment(place: Pair) -> None:
    """Reading a failover slot waits for it without a limit; the slot is read without the property instead."""
    place.begin()
    place.on(PRIMARY, "ALTER SYSTEM SET synchronized_standby_slots = 's1_b1'")
    place.on(PRIMARY, "SELECT pg_reload_conf()")
    await_true(lambda: bool(initialise(place.fleet, Silent()).warnings))
    (warning,) = initialise(place.fleet, Silent()).warnings
    assert (warning.name, warning.nodes) == ("failover-slots-wait", (PRIMARY,))
    fleet = replace(place.fleet, standby_wait_seconds=WAIT_SECONDS)
    place.write()
    noted = Watching()
    create_increment(fleet, CreateRequest("chain"), place.runs.spark, noted)
    assert not [note for note in noted.notes if "failover property" in note]

    stop_server(place.servers.node(STANDBY))
    place.write()
    progress, began = Watching(), time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(create_increment, fleet, CreateRequest("chain"), place.runs.spark, progress)
        try:
            commit = future.result(HELD_SECONDS_MAX)
        finally:
            # Otherwise it would not end.
            place.on(PRIMARY, "ALTER SYSTEM RESET synchronized_standby_slots")
            place.on(PRIMARY, "SELECT pg_reload_conf()")
    assert time.monotonic() - began > WAIT_SECONDS
    assert commit.renewed == {}
    (note,) = [note for note in progress.notes if "failover property" in note]
    assert not isinstance(note, News)
    assert f"node s1: slot {place.slot} is read without" in note
    assert "because s1_b1 (inactive) in synchronized_standby_slots did not confirm the WAL within 3 s" in note
    assert place.on(PRIMARY, SLOT, place.slot) == [(True, False, False, True)]
    place.states[commit.increment] = place.live_state()
    place.check_restores(commit.increment)
    # Of a process that died meanwhile, the slot is left without the property.
    with psycopg.connect(place.servers.node(PRIMARY).dsn(), autocommit=True) as connection:
        replication = make_conninfo(connection.info.dsn, password=connection.info.password, replication="database")
    with psycopg.Connection.connect(replication, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        connection.execute(f'ALTER_REPLICATION_SLOT "{place.slot}" (FAILOVER false)'.encode())
    place.write()
    assert place.increment().renewed == {}
    assert place.on(PRIMARY, SLOT, place.slot) == [(True, False, False, True)]


@pytest.mark.parametrize("place", ["mixed"], indirect=True)
def test_a_slot_gets_its_property_back_if_the_session_of_another_node_is_lost(place: Pair) -> None:
    place.execute("s2", *SEEN)
    place.begin()
    place.on(PRIMARY, "ALTER SYSTEM SET synchronized_standby_slots = 'nowhere'")
    place.on(PRIMARY, "SELECT pg_reload_conf()")
    await_true(lambda: place.on(PRIMARY, "SHOW synchronized_standby_slots") == [("nowhere",)])
    progress, primaries = Watching(), place.fleet.primaries
    with open_sessions(place.fleet, primaries) as sessions:
        positions = sessions.ask_primaries(insert_position)
        place.on("s2", "SELECT pg_terminate_backend(%s, 30000)", sessions.connections["s2"].info.backend_pid)
        with (
            pytest.raises(NodeUnreachableError, match="node s2"),
            reading_failover_slots(sessions, place.slot, positions, 1, progress),
        ):
            pytest.fail("the session of s2 is lost")
    assert [note for note in progress.notes if f"node s1: slot {place.slot} is read without" in note]
    assert place.on(PRIMARY, SLOT, place.slot) == [(True, False, False, True)]
