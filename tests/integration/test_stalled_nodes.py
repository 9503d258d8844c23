"""If a node stops answering at any step, the command ends in time and names it, and the next command succeeds.

`make test` has the first step of every kind, `make all` every step.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.nodes.connections
import cutline.nodes.watch
import cutline.wal.drain.slots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import resume_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.restore_point import create_restore_point
from cutline.snapshots.operations.open_operations import document_names, open_operation_ids
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import read_commit
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError
from tests.commands.changing_fleet import absent_names
from tests.commands.in_process import run_here
from tests.commands.in_processes import BEGUN, COMMAND, IN_PROCESSES, ROOT
from tests.commands.snapshot_runs import (
    Ready,
    Runs,
    configure_fleet,
    dropping_slots,
    names_of_snapshots,
    slots_of,
    sorted_copies,
)
from tests.commands.watching import Reached, Watching
from tests.faults.pg_proxy import Mode, PgProxy, pg_proxy, route_through
from tests.run.by_spark import archiving_by_spark
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
from tests.faults.stalled_network import SILENCE_SECONDS, Network, execute, rows_of

# What may follow the silence: dropping slots, unlocking, and the time that Spark gives a waiting task to end.
END_SECONDS_MAX = 20.0
PRIMARY, STANDBY = "s2", "s2-b1"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice silence within seconds."""
    monkeypatch.setattr(cutline.nodes.watch, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(cutline.nodes.watch, "ANSWER_SECONDS_MAX", 1.0)
    monkeypatch.setattr(cutline.nodes.watch, "SILENCE_SECONDS_MAX", SILENCE_SECONDS)
    monkeypatch.setattr(cutline.nodes.connections, "CONNECT_SECONDS_MAX", 2)
    monkeypatch.setattr(cutline.wal.drain.slots, "DROP_CONNECT_SECONDS_MAX", 2)


@pytest.fixture(scope="module")
def network(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Network]:
    """A chain to be continued, and the second shard behind proxies."""
    folder = tmp_path_factory.mktemp("silent")
    direct = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store")
    runs = Runs(direct, Ready(spark))
    runs.init()
    with (
        dropping_slots(direct),
        pg_proxy(shared_fleet.node(PRIMARY)) as primary,
        pg_proxy(shared_fleet.node(STANDBY)) as standby,
    ):
        proxies = {PRIMARY: primary, STANDBY: standby}
        network = Network(direct, route_through(proxies, direct, folder / "proxied.toml"), proxies, Ready(spark))
        runs.full("chain")
        yield network


# Grouped by what talks to the node: sessions of the command itself, its tasks, pg_dump.
FULL_STEPS = (
    (
        ("slot of a primary", PRIMARY, b"CREATE_REPLICATION_SLOT"),
        ("slot of a standby", STANDBY, b"CREATE_REPLICATION_SLOT"),
    ),
    (("copy of a primary", PRIMARY, b"COPY ("), ("copy of a standby", STANDBY, b"COPY (")),
    (("DDL", PRIMARY, b"LOCK TABLE"), ("sequences", PRIMARY, b"has_sequence_privilege")),
)
INCREMENT_STEPS = (
    (
        ("first question", PRIMARY, b"pg_control_system"),
        ("lock", PRIMARY, b"pg_try_advisory_lock"),
        ("marker", PRIMARY, b"pg_logical_emit_message"),
        ("replay", STANDBY, b"pg_last_wal_replay_lsn"),
    ),
    (
        ("drain of a primary", PRIMARY, b"pg_logical_slot_peek_binary_changes('"),
        ("drain of a standby", STANDBY, b"pg_logical_slot_peek_binary_changes('"),
        ("advance", PRIMARY, b"pg_replication_slot_advance($1"),
    ),
)
# The last one is in one of the processes that a pg_restore has started.
RESTORE_STEPS = (
    (("rows", PRIMARY, b"FROM STDIN"), ("table", PRIMARY, b"CREATE TABLE")),
    (("key", PRIMARY, b"PRIMARY KEY"),),
)
# A restore point drains in the command's own process.
POINT_STEPS = (
    (("drain", PRIMARY, b"pg_logical_slot_peek_binary_changes('"),),
    (("slot of a point", PRIMARY, b"CREATE_REPLICATION_SLOT"), ("advance", PRIMARY, b"pg_replication_slot_advance($1")),
)
Kind = tuple[tuple[str, str, bytes], ...]


def choose_steps(kinds: tuple[Kind, ...]) -> list[Any]:
    """Return node and statement of all steps, of which `make test` has the first of every kind."""
    params = [[pytest.param(node, trigger, id=name) for name, node, trigger in kind] for kind in kinds]
    return [case for kind in params for case in first(kind)]


def assert_ends_in_time(network: Network, node: str, trigger: bytes, command: Callable[[], object]) -> None:
    """Check that the command ends within the bound, names the node, and leaves nothing once the node answers again."""
    proxy = network.proxies[node]
    ended = threading.Event()
    proxy.stall_after = trigger
    with ThreadPoolExecutor(1) as threads:
        stalling = threads.submit(stalled_seconds, proxy, ended)
        try:
            with pytest.raises(SnapshotError) as raised:
                command()
        finally:
            ended.set()
    assert 0 < stalling.result() < SILENCE_SECONDS + END_SECONDS_MAX
    error = raised.value
    assert error.exit_code == UnreachableError.exit_code, error.message
    noticed = [f"node {node}: no answer for "]
    if trigger in (b"COPY (", b"FROM STDIN"):
        # Another task may be connecting, and notice it before the watch does.
        noticed.append(f"node {node}: connection timeout expired")
    assert error.message.startswith(tuple(noticed)), error.message
    assert error.hint
    network.assert_nothing_is_left()


def goes_on(network: Network, trigger: bytes, name: str = "chain", *, full: bool = False) -> Commit:
    """Take an increment or full snapshot during which the standby falls silent; return its commit."""
    proxy = network.proxies[STANDBY]
    ended = threading.Event()
    proxy.stall_after = trigger
    with ThreadPoolExecutor(1) as threads:
        stalling = threads.submit(stalled_seconds, proxy, ended)
        try:
            commit, _ = network.create(name, full=full)
        finally:
            ended.set()
    assert 0 < stalling.result() < SILENCE_SECONDS + END_SECONDS_MAX
    network.assert_nothing_is_left()
    return commit


def stalled_seconds(proxy: PgProxy, ended: threading.Event) -> float:
    """Return how long the proxy stalled until the command ended, and let it pass again then, or after too long."""
    began = 0.0
    while not ended.wait(0.01):
        if proxy.mode is Mode.STALL:
            began = began or time.monotonic()
            if time.monotonic() - began > SILENCE_SECONDS + END_SECONDS_MAX:
                break
    seconds = time.monotonic() - began if began else 0.0
    proxy.set(Mode.PASS)
    return seconds


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("by_spark", [False, True], ids=["by_itself", "by_spark"])
@pytest.mark.parametrize(("node", "trigger"), choose_steps(FULL_STEPS))
def test_a_stalled_full_create_ends_and_the_next_create_settles_it(
    network: Network, node: str, trigger: bytes, *, by_spark: bool
) -> None:
    before = {one.id: slots_of(one.dsn) for one in network.direct.nodes}
    working = network if by_spark else network.working_in_driver()
    if node == STANDBY:
        # The snapshot goes on without it, and keeps what it has copied on the others.
        name = f"without-{'copy' if trigger == b'COPY (' else 'slot'}-{by_spark}".lower()
        commit = goes_on(working, trigger, name, full=True)
        assert absent_names(commit) == {STANDBY}
        code, document = run_here(network.direct, "delete", name, "--yes")
        assert code == 0, document
        return
    assert_ends_in_time(network, node, trigger, lambda: working.create("stalled", full=True))
    assert names_of_snapshots(network.direct) == ["chain"]
    # The slots that it left are dropped by the next command, an increment of another chain.
    _, notes = network.create("chain", full=False)
    after = {one.id: slots_of(one.dsn) for one in network.direct.nodes}
    assert after == before
    settled = [note for note in notes if "ended without committing snapshot stalled" in note]
    assert len(settled) == 1, notes


# As the fixture `impatient`.
IMPATIENT = f"""
import cutline.nodes.connections, cutline.nodes.watch, cutline.wal.drain.slots
cutline.nodes.watch.PROBE_SECONDS, cutline.nodes.watch.ANSWER_SECONDS_MAX = 0.3, 1.0
cutline.nodes.watch.SILENCE_SECONDS_MAX = {SILENCE_SECONDS}
cutline.nodes.connections.CONNECT_SECONDS_MAX = cutline.wal.drain.slots.DROP_CONNECT_SECONDS_MAX = 2
"""


@pytest.mark.parametrize("node", [PRIMARY, STANDBY])
def test_a_copy_in_processes_ends_if_its_node_is_silent(network: Network, node: str) -> None:
    proxy, ended, name = network.proxies[node], threading.Event(), f"processes-{node}"
    program = [sys.executable, "-c", IMPATIENT + IN_PROCESSES + COMMAND]
    words = ["--fleet", str(network.proxied.path), "--json", "create", name]
    proxy.stall_after = b"COPY ("
    with ThreadPoolExecutor(1) as threads:
        stalling = threads.submit(stalled_seconds, proxy, ended)
        done = subprocess.run([*program, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        ended.set()
    assert 0 < stalling.result() < SILENCE_SECONDS + END_SECONDS_MAX
    assert BEGUN in done.stderr
    document = json.loads(done.stdout)
    if node == STANDBY:
        # The snapshot goes on without it; the processes copied the others' tables.
        assert done.returncode == 0, document
        full = read_commit(network.direct.store.open(), name, 0)
        assert absent_names(full) == {STANDBY}
        code, document = run_here(network.direct, "delete", name, "--yes")
        assert code == 0, document
    else:
        assert done.returncode == UnreachableError.exit_code, document
        assert document["message"].startswith(f"node {node}: "), document
    network.assert_nothing_is_left()
    assert names_of_snapshots(network.direct) == ["chain"]
    network.create("chain", full=False)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("by_spark", [False, True], ids=["by_itself", "by_spark"])
@pytest.mark.parametrize(("node", "trigger"), choose_steps(INCREMENT_STEPS))
def test_a_stalled_increment_ends_and_the_next_one_succeeds(
    network: Network, node: str, trigger: bytes, *, by_spark: bool
) -> None:
    before = network.numbers("chain")
    slots = {one.id: slots_of(one.dsn) for one in network.direct.nodes}
    execute(network.direct.node(PRIMARY).dsn, "UPDATE account SET balance = balance WHERE id % 100 = 0")
    with archiving_by_spark(wanted=by_spark):
        if node == STANDBY:
            # The increment goes on without it.
            commit = goes_on(network, trigger)
            assert commit.absent.keys() == {STANDBY}
        else:
            assert_ends_in_time(network, node, trigger, lambda: network.create("chain", full=False))
            assert network.numbers("chain") == before
            commit, _ = network.create("chain", full=False)
    assert commit.increment == before[-1] + 1
    assert commit.counts["changes"] > 0
    following, _ = network.create("chain", full=False)
    assert not following.absent
    assert {one.id: slots_of(one.dsn) for one in network.direct.nodes} == slots


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
def test_a_silent_standby_is_not_asked_for_slots_that_were_never_made(
    network: Network, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """An increment that goes on without the standby, and copies no table; an error of another kind leaves nothing."""
    asked: list[str] = []
    drop = cutline.wal.drain.slots.drop_slot

    def record(node: Node, name: str) -> bool:
        asked.append(name)
        return drop(node, name)

    def fail(reached: Reached) -> None:
        if fails and reached.point == CrashPoint.SEQUENCES_READ:
            raise RefusedError("this increment ends here")

    monkeypatch.setattr(cutline.wal.drain.slots, "drop_slot", record)
    execute(network.direct.node(PRIMARY).dsn, "UPDATE account SET balance = balance WHERE id % 100 = 0")
    working, ended, proxy = network.working_in_driver(), threading.Event(), network.proxies[STANDBY]
    proxy.stall_after = b"pg_logical_slot_peek_binary_changes('"
    with ThreadPoolExecutor(1) as threads:
        stalling = threads.submit(stalled_seconds, proxy, ended)
        try:
            with pytest.raises(RefusedError, match="ends here") if fails else nullcontext():
                create_increment(network.proxied, CreateRequest("chain"), working.spark, Watching(fail))
        finally:
            ended.set()
    assert stalling.result() > 0
    store = network.direct.store.open()
    assert open_operation_ids(store, document_names(store)) == []
    assert asked == []
    network.assert_nothing_is_left()


@contextmanager
def targets(fleet: Fleet, database: str) -> Iterator[Fleet]:
    """The fleet's primaries with another database, dropped at the end."""
    try:
        yield replace(fleet, nodes=tuple(with_database(node, database) for node in fleet.primaries))
    finally:
        for node in fleet.primaries:
            execute(with_database(node, "postgres").dsn, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")


def end_restore(network: Network, target: Fleet) -> None:
    """Do what the stalled restore has not done: go on with it, or begin again if it had made nothing."""
    try:
        resume_restore(network.direct, target, RestoreRequest("chain"), network.spark, Silent())
    except UnfinishedRestoreError:
        Runs(network.direct, network.spark).restore("chain", target)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("by_spark", [False, True], ids=["by_itself", "by_spark"])
@pytest.mark.parametrize(("node", "trigger"), choose_steps(RESTORE_STEPS))
def test_a_stalled_restore_ends_and_the_next_one_has_every_row(
    network: Network, node: str, trigger: bytes, *, by_spark: bool
) -> None:
    network.create("chain", full=False)
    runs = Runs(network.direct, network.spark if by_spark else network.working_in_driver().spark)
    with targets(network.direct, "silent_again") as target, targets(network.proxied, "silent_again") as through:
        assert_ends_in_time(network, node, trigger, lambda: runs.restore("chain", through))
        end_restore(network, through)
        for source, copy in zip(network.direct.primaries, target.primaries, strict=True):
            assert sorted_copies(copy.dsn) == sorted_copies(source.dsn)
        left = [row for node in target.nodes for row in rows_of(node.dsn, "SELECT datname FROM pg_database")]
        assert [name for name in left if "_restoring_" in name] == []


@pytest.mark.usefixtures("impatient")
def test_a_slow_node_is_not_taken_for_a_silent_one(network: Network) -> None:
    with ThreadPoolExecutor(1) as threads, psycopg.connect(network.direct.node(PRIMARY).dsn) as older:
        # The slot waits for this transaction, and the command for the slot.
        older.execute("SELECT pg_current_xact_id()")
        running = threads.submit(network.create, "patient", full=True)
        time.sleep(1.5 * SILENCE_SECONDS)
        waiting = "SELECT query FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%' AND state = 'active'"
        assert len(rows_of(network.direct.node(PRIMARY).dsn, waiting)) == 1
        assert not running.done()
        older.commit()
        commit, _ = running.result()
    assert commit.snapshot in names_of_snapshots(network.direct)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("node", "trigger"), choose_steps(POINT_STEPS))
def test_a_stalled_restore_point_ends_and_the_next_one_is_taken(network: Network, node: str, trigger: bytes) -> None:
    before, names = {one.id: slots_of(one.dsn) for one in network.direct.nodes}, names_of_snapshots(network.direct)
    request = CreateRequest(f"point-{len(names)}")
    assert_ends_in_time(network, node, trigger, lambda: create_restore_point(network.proxied, request, Silent()))
    assert names_of_snapshots(network.direct) == names
    create_restore_point(network.direct, request, Silent())
    assert {one.id: slots_of(one.dsn) for one in network.direct.nodes} == before


# Prints when it starts to watch, and fails if it took the node for silent.
WATCHING = """
import sys, time
import cutline.nodes.watch
from cutline.fleet.config import Node
cutline.nodes.watch.PROBE_SECONDS, cutline.nodes.watch.SILENCE_SECONDS_MAX = 0.1, 1.0
with cutline.nodes.watch.watch_nodes([Node(id="s", dsn=sys.argv[1])]) as watch:
    time.sleep(0.5)
    print("watching", flush=True)
    sys.stdin.readline()
    watch.check()
"""


def test_a_command_that_was_itself_stopped_blames_no_node(network: Network) -> None:
    words = [sys.executable, "-c", WATCHING, network.direct.nodes[0].dsn]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        process.communicate("\n", timeout=30)
    assert process.returncode == 0
