"""A chain whose nodes have changed is refused, and its hint begins a new chain. The servers are not shared."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.cli.output.restore_report import lines_of
from cutline.embedded.bank import create_bank
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.embedded.server import DEFAULT_SETTINGS, EmbeddedNode, start_server, stop_server
from cutline.fleet.config import Node, load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.programs import Programs, run_as, server_programs
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.listing.listing import list_store
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.end_marks import ChainEndedError
from cutline.snapshots.removal.deletion import DeletionPlan, delete_snapshot
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation
from cutline.wal.drain.slots import check_slot, slot_name, slot_state
from tests.commands.in_process import run_and_capture
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.ended_chains import assert_refused, assert_renewed, begin_chain, continue_chain
from tests.integration.refusing import create, execute, refused, take_increment
from tests.servers.dealt import start_fleet
from tests.servers.disasters import rebuild_shard
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS_MAX = 30
TOLD = """
SELECT coalesce((SELECT bool_and(flush_lsn >= %(lsn)s::pg_lsn) FROM pg_stat_replication), false)
   AND NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_type = 'physical' AND restart_lsn < %(lsn)s::pg_lsn)
"""
# Keep the tables small: these tests are about nodes, not rows.
ROWS_KEPT = "DELETE FROM account WHERE id > 100"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    directory = tmp_path_factory.mktemp("nodes") / "fleet"
    try:
        fleet = start_fleet(directory, shards=1, backups=1)
        execute(fleet.dsns()[0], ROWS_KEPT)
        # A standby that loses its primary asks for it again at once, not after five seconds.
        retry = "ALTER SYSTEM SET wal_retrieve_retry_interval = '50ms'"
        execute(fleet.node("s1-b1").dsn(), retry, "SELECT pg_reload_conf()")
        yield fleet
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture(scope="module")
def runs(embedded: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("nodes-store")
    return Runs(configure_fleet(embedded, directory / "fleet.toml", f"file://{directory}/store"), Ready(spark))


def restart_primary(embedded: EmbeddedFleet) -> None:
    stop_server(embedded.node("s1"))
    embedded.start_node(embedded.node("s1"))
    await_standby(embedded)


def await_standby(embedded: EmbeddedFleet) -> None:
    """Wait until the standby streams and has replayed what the primary has written, and the primary knows."""
    primary, standby = (embedded.node(node).dsn("postgres") for node in ("s1", "s1-b1"))
    with (
        psycopg.connect(primary, autocommit=True) as on_primary,
        psycopg.connect(standby, autocommit=True) as on_standby,
    ):
        (lsn,) = on_primary.execute("SELECT pg_current_wal_lsn()::text").fetchone() or ("",)
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn AND EXISTS (SELECT FROM pg_stat_wal_receiver)"
        while on_standby.execute(query, (lsn,)).fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # Under a limit it removes the WAL that a standby has not said it has.
        while on_primary.execute(TOLD, {"lsn": lsn}).fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_lowered_wal_level_is_named_before_the_slot_it_invalidated(embedded: EmbeddedFleet, runs: Runs) -> None:
    chain = continue_chain(runs)
    primary, standby = runs.fleet.node("s1"), runs.fleet.node("s1-b1")
    slot = slot_name(chain.operation)
    # With a logical slot, PostgreSQL would not start at a lower wal_level.
    execute(primary.dsn, f"SELECT pg_drop_replication_slot('{slot}')", "ALTER SYSTEM SET wal_level = replica")
    restart_primary(embedded)
    with refused(runs.fleet, "node-unfit") as errors:
        take_increment(runs.fleet, chain.snapshot)
    assert errors[0].message.startswith("node s1: wal_level is replica")
    with refused(runs.fleet, "node-unfit"):
        create(runs.fleet, "another")
    statement, _, rest = errors[0].hint.partition(";")
    assert "restart the server" in rest
    execute(primary.dsn, statement)
    restart_primary(embedded)
    with psycopg.connect(standby.dsn) as connection:
        state = slot_state(connection, slot)
    with pytest.raises(SnapshotError, match=r"s1-b1: slot \S+ was invalidated by the server.*wal_level_insufficient"):
        check_slot("s1-b1", slot, state, 1 << 62)
    assert_renewed(runs, chain.snapshot, "s1", f"slot {slot} does not exist")
    begin_chain(runs)


def lost_slots(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT slot_name FROM pg_replication_slots WHERE wal_status = 'lost'")
        return [name for (name,) in rows]


def test_a_shard_whose_slot_the_server_invalidated_is_copied_again(embedded: EmbeddedFleet, runs: Runs) -> None:
    chain = continue_chain(runs)
    dsn = runs.fleet.node("s1").dsn
    fill = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 17000000)), pg_switch_wal()"
    execute(dsn, fill, fill, fill)
    # Under the limit a lagging standby would also lose the WAL that it needs.
    await_standby(embedded)
    try:
        execute(dsn, "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
        # The checkpointer reads the settings some time later.
        while slot_name(chain.operation) not in lost_slots(dsn):
            execute(dsn, "CHECKPOINT")
        assert_renewed(runs, chain.snapshot, "s1", r"slot \S+ was invalidated by the server.*wal_removed")
    finally:
        execute(dsn, "ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
    await_standby(embedded)
    begin_chain(runs)


def test_a_recreated_database_is_copied_again_once_its_tables_are_published(
    embedded: EmbeddedFleet, runs: Runs
) -> None:
    chain = continue_chain(runs)
    primary = embedded.node("s1")
    execute(primary.dsn("postgres"), "DROP DATABASE bank WITH (FORCE)", "CREATE DATABASE bank")
    create_bank(primary.dsn(), shard=0)
    execute(primary.dsn(), ROWS_KEPT)
    await_standby(embedded)
    with pytest.raises(SnapshotError, match=r"node s1: publication cutline_\w+ does not exist"):
        runs.increment(chain.snapshot)
    runs.init()
    commit = runs.increment(chain.snapshot)
    assert isinstance(commit, Increment)
    assert commit.renewed["s1"].reason == "database bank was dropped and created again, or a restore replaced it"
    begin_chain(runs)


def test_slots_on_a_standby_that_is_down_are_named_only_if_a_chain_has_some(
    embedded: EmbeddedFleet, runs: Runs, tmp_path: Path
) -> None:
    """A database beside the chain has no slots, so none is left; the slot of the chain has the same name there."""
    chain = continue_chain(runs)
    side = tmp_path / "side.toml"
    side.write_text(runs.fleet.path.read_text().replace("/bank?", "/side?"))
    runs.restore(chain.snapshot, load_fleet(side))
    stop_server(embedded.node("s1-b1"))
    try:
        beside = runs.restore(chain.snapshot, load_fleet(side))
        replaced = runs.restore(chain.snapshot, runs.fleet)
    finally:
        embedded.start_node(embedded.node("s1-b1"))
    await_standby(embedded)
    slot = slot_name(chain.operation)
    assert beside.aside
    assert (beside.slots_dropped, beside.slots_left) == ([], [])
    assert (replaced.slots_dropped, replaced.slots_left) == ([f"s1: {slot}"], [f"s1-b1: {slot}"])
    line, statement = [text for text in lines_of(replaced) if slot in text][-2:]
    assert line.endswith("run as a superuser on s1-b1 (if it is down, once it is back):")
    execute(runs.fleet.node("s1-b1").dsn, statement)
    begin_chain(runs)


def test_a_restore_on_the_fleet_ends_its_chains_and_releases_their_slots(embedded: EmbeddedFleet, runs: Runs) -> None:
    chain = continue_chain(runs)
    slot = slot_name(chain.operation)
    report = runs.restore(chain.snapshot, runs.fleet)
    assert sorted(report.slots_dropped) == [f"s1-b1: {slot}", f"s1: {slot}"]
    assert report.slots_left == []
    await_standby(embedded)
    for node in runs.fleet.nodes:
        with psycopg.connect(node.dsn) as connection:
            query = "SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical'"
            assert connection.execute(query).fetchall() == []
    aside = f"restore {report.operation} set aside its database on node s1"
    with pytest.raises(ChainEndedError, match=f"can't be continued after increment 1: {aside}"):
        runs.increment(chain.snapshot)
    (entry,) = [one for one in list_store(runs.fleet).entries if one.name == chain.snapshot]
    assert (entry.state, entry.remark.partition(": ")[2]) == ("ended", aside)
    code, listed = run_and_capture(runs.fleet, "list")
    assert code == 0
    assert f"\nsnapshot {chain.snapshot}: can't be continued after increment 1: {aside}\n" in listed
    begin_chain(runs)


def test_two_servers_that_accept_writes_are_refused_and_one_without_a_slot_is_copied(
    embedded: EmbeddedFleet, runs: Runs
) -> None:
    chain = continue_chain(runs)
    alone = Runs(replace(runs.fleet, nodes=runs.fleet.primaries), runs.spark)
    of_primaries = begin_chain(alone)
    promoted = runs.fleet.node("s1-b1")
    execute(promoted.dsn, "SELECT pg_promote()")
    # Still listed as a standby. The hint's first remedy needs another server.
    with refused(runs.fleet, "fleet-topology") as errors:
        take_increment(runs.fleet, chain.snapshot)
    assert re.search(r"node s1-b1 is not a standby, .* both accept writes", errors[0].message), errors[0].message
    # Listed as another primary, which is the hint's third remedy.
    as_primary = Runs(replace(runs.fleet, nodes=(*runs.fleet.primaries, Node("s1-b1", promoted.dsn))), runs.spark)
    assert_refused(as_primary, chain.snapshot, "baseline-changed", "node s1-b1: it was a standby of s1")
    # In place of the primary, but the promoted server has no slot of this chain.
    in_its_place = Runs(replace(runs.fleet, nodes=(Node("s1", promoted.dsn),)), runs.spark)
    assert_renewed(in_its_place, of_primaries.snapshot, "s1", "does not exist")
    for current in (in_its_place, alone):
        begin_chain(current)


def test_a_primary_that_was_reset_to_an_old_copy_is_copied_and_one_that_was_replaced_ends_a_chain(
    embedded: EmbeddedFleet, runs: Runs
) -> None:
    alone = Runs(replace(runs.fleet, nodes=runs.fleet.primaries), runs.spark)
    chain = continue_chain(alone)
    node = embedded.node("s1")
    copy = node.folder / "copy"
    stop_server(node)
    shutil.copytree(node.data_directory, copy, symlinks=True)
    embedded.start_node(node)
    execute(node.dsn(), "UPDATE account SET balance = balance + 1")
    alone.increment(chain.snapshot)
    stop_server(node, immediate=True)
    shutil.rmtree(node.data_directory)
    copy.rename(node.data_directory)
    owned = node.folder.stat()
    subprocess.run(["chown", "-R", f"{owned.st_uid}:{owned.st_gid}", node.data_directory], check=True, timeout=60)
    embedded.start_node(node)
    assert_renewed(alone, chain.snapshot, "s1", "its WAL ends at .* before the end of the last cut")
    chain = begin_chain(alone)
    rebuild_shard(embedded, node)
    execute(node.dsn("postgres"), "CREATE DATABASE bank")
    create_bank(node.dsn(), shard=0)
    assert_refused_until_recorded(alone, chain.snapshot)
    assert_refused(alone, chain.snapshot, "baseline-changed", "node s1: its system identifier was .* different server")
    begun, plans = begin_chain(alone), list[DeletionPlan]()
    for one, left in ((chain, ["the earlier server of s1"]), (begun, [])):
        done = delete_snapshot(alone.fleet, one.snapshot, Silent(), plans.append, force=True)
        assert done.removed is not None
        assert list(plans[-1].left_behind.values()) == left
        assert done.removed.slots_unknown == [f"{slot_name(one.operation)} on {server}" for server in left]


def assert_refused_until_recorded(alone: Runs, name: str) -> None:
    """A fleet of one server that is another one now: only an operator can say that it is the fleet."""
    with refused(alone.fleet, "other-servers"):
        alone.increment(name)
    with refused(alone.fleet, "other-servers"):
        alone.init()
    initialise(alone.fleet, Silent(), forgets_nodes=True)


@pytest.fixture
def upgraded(tmp_path: Path) -> Iterator[tuple[EmbeddedNode, EmbeddedNode, Programs, Programs]]:
    """A running PostgreSQL 15 server, the node to upgrade it to, and the programs of both versions."""
    new = server_programs()
    old = Programs(require_server(15).programs, new.account)
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/cutline-upgrade-XXXXXX"], text=True).strip())
    folder.chmod(0o711)
    nodes = [EmbeddedNode("s1", folder / name) for name in ("15", "18")]
    try:
        for node in nodes:
            node.folder.mkdir(mode=0o700)
            if new.account:
                os.chown(node.folder, new.account.uid, new.account.gid)
        create_cluster(old, nodes[0])
        start_server(old, nodes[0])
        yield nodes[0], nodes[1], old, new
    finally:
        for node in nodes:
            stop_server(node, immediate=True)
        shutil.rmtree(folder)


def create_cluster(programs: Programs, node: EmbeddedNode, *options: str) -> None:
    """Do what `create_primary` does, with an initdb too old to accept settings."""
    identity = ["--encoding=UTF8", "--locale=C", "--auth=trust", "--username=postgres", *options]
    programs.run("initdb", "--no-sync", *identity, f"--pgdata={node.data_directory}")
    with (node.data_directory / "postgresql.conf").open("a") as file:
        file.writelines(f"{name} = '{value}'\n" for name, value in DEFAULT_SETTINGS.items())


def test_an_upgraded_server_is_copied_again_once_init_has_recorded_it(
    upgraded: tuple[EmbeddedNode, EmbeddedNode, Programs, Programs], runs: Runs, tmp_path: Path
) -> None:
    node, after, old, new = upgraded
    execute(node.dsn("postgres"), "CREATE DATABASE bank")
    create_bank(node.dsn(), shard=0)
    execute(node.dsn(), ROWS_KEPT)
    fleet = replace(runs.fleet, store=StoreLocation(f"file://{tmp_path}/store"), nodes=(Node("s1", node.dsn()),))
    before = Runs(fleet, runs.spark)
    chain = continue_chain(before)
    # pg_upgrade keeps no logical slots from before 17. It needs a stopped server and a new cluster of the same kind.
    stop_server(node)
    create_cluster(new, after, "--no-data-checksums")
    places = ["-b", str(old.bin_directory), "-B", str(new.bin_directory)]
    places += ["-d", str(node.data_directory), "-D", str(after.data_directory), "--socketdir", str(after.folder)]
    # pg_upgrade writes into its working directory.
    command = shlex.join([str(new.bin_directory / "pg_upgrade"), "--username=postgres", "--no-sync", *places])
    done = run_as(new.account, ["/bin/sh", "-c", f"cd {after.folder} && exec {command}"], seconds_max=120)
    assert done.returncode == 0, done.stdout
    start_server(new, after)
    upgraded_fleet = Runs(replace(before.fleet, nodes=(Node("s1", after.dsn()),)), runs.spark)
    assert_refused_until_recorded(upgraded_fleet, chain.snapshot)
    commit = upgraded_fleet.increment(chain.snapshot)
    assert isinstance(commit, Increment)
    assert commit.renewed["s1"].reason == "its server was upgraded from PostgreSQL 15 to 18"
    begin_chain(upgraded_fleet)
