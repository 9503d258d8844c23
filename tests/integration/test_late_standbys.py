"""Standbys that don't replay: creates say within seconds which one and why, wait once, and hints work as typed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Node
from cutline.fleet.progress import Silent
from cutline.snapshots.create.archive_ahead import archive_ahead
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.replay import ReplayLagError
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, slots_of
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from psycopg.rows import TupleRow
    from pyspark.sql import SparkSession

CHAIN = "chain"
# Creates that may do without a standby leave it out instead (test_absent_copies.py).
REQUIRED = '[copies]\nrequire = "all"\n'
WAIT_SECONDS = 3.0
# A note is due after two seconds; a poll and this machine take their time.
NOTE_SECONDS_MAX = 3.5
REPLAY_SECONDS_MAX = 30.0
STATEMENTS = re.compile(r"(?m)^-- on node ([^\s,]+),.*\n((?:[A-Z].*;\n?)+)")


@dataclass
class Notes(Silent):
    """Keeps what is noted of standbys, and how long after the last step."""

    began: float = 0.0
    lines: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.began = time.monotonic()

    def note(self, text: str) -> None:
        if "standby" in text:
            self.lines.append(text)
            self.seconds.append(time.monotonic() - self.began)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("late")
    try:
        servers = start_fleet(folder / "fleet", shards=1, backups=1)
        found = Runs(
            configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=REQUIRED), Ready(spark)
        )
        execute(found.fleet.node("s1"), "CREATE TABLE seen (id int PRIMARY KEY)", "CREATE SEQUENCE given")
        found.init()
        found.full(CHAIN)
        yield found
    finally:
        stop_fleet(folder / "fleet", delete=True)


def execute(node: Node, *statements: str) -> None:
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@contextmanager
def paused(runs: Runs) -> Iterator[str]:
    standby = runs.fleet.node("s1-b1")
    execute(standby, "SELECT pg_wal_replay_pause()")
    try:
        await_state(standby, "SELECT pg_get_wal_replay_pause_state() = 'paused'")
        yield "its replay is paused"
    finally:
        execute(standby, "SELECT pg_wal_replay_resume()")


@contextmanager
def delayed(runs: Runs) -> Iterator[str]:
    standby = runs.fleet.node("s1-b1")
    execute(standby, "ALTER SYSTEM SET recovery_min_apply_delay = '1h'", "SELECT pg_reload_conf()")
    try:
        await_state(standby, "SELECT current_setting('recovery_min_apply_delay') = '1h'")
        yield "its recovery_min_apply_delay is 1h"
    finally:
        execute(standby, "ALTER SYSTEM RESET recovery_min_apply_delay", "SELECT pg_reload_conf()")


@contextmanager
def cut_off(runs: Runs) -> Iterator[str]:
    standby = runs.fleet.node("s1-b1")
    with psycopg.connect(standby.dsn) as connection:
        (conninfo,) = connection.execute("SHOW primary_conninfo").fetchone() or ("",)
    execute(standby, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
    try:
        await_state(standby, "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)")
        yield "it receives no WAL"
    finally:
        quoted = conninfo.replace("'", "''")
        execute(standby, f"ALTER SYSTEM SET primary_conninfo = '{quoted}'", "SELECT pg_reload_conf()")


@contextmanager
def in_the_way(runs: Runs) -> Iterator[str]:
    """A session on the standby has read a table that is truncated on the primary."""
    primary, standby = runs.fleet.node("s1"), runs.fleet.node("s1-b1")
    execute(standby, "ALTER SYSTEM SET max_standby_streaming_delay = -1", "SELECT pg_reload_conf()")
    try:
        with psycopg.connect(standby.dsn) as reader:
            reader.execute("SELECT count(*) FROM seen")
            execute(primary, "TRUNCATE seen")
            query = "backend_type = 'startup' AND wait_event_type = 'Lock'"
            await_state(standby, f"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE {query})")
            yield "a session on it blocks its replay"
    finally:
        execute(standby, "ALTER SYSTEM RESET max_standby_streaming_delay", "SELECT pg_reload_conf()")


def await_state(node: Node, query: str) -> None:
    deadline = time.monotonic() + REPLAY_SECONDS_MAX
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        while connection.execute(query.encode()).fetchone() != (True,):
            assert time.monotonic() < deadline, query
            time.sleep(0.05)


def await_replay(runs: Runs) -> None:
    with psycopg.connect(runs.fleet.node("s1").dsn) as primary:
        (lsn,) = primary.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("",)
    await_state(runs.fleet.node("s1-b1"), f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'")


def refused(create: Callable[..., object], runs: Runs, name: str, why: str) -> ReplayLagError:
    """Run the create, which is to give up; it says at once, within its one wait, which standby is behind and why."""
    progress = Notes()
    with pytest.raises(ReplayLagError) as raised:
        create(runs.fleet, CreateRequest(name, wait_seconds=WAIT_SECONDS), runs.spark, progress)
    seconds = time.monotonic() - progress.began
    assert WAIT_SECONDS <= seconds < WAIT_SECONDS + 10
    (note,) = progress.lines
    behind = r"standby s1-b1 is \d[\d.]* K?i?B behind, its last replayed commit is \d+ s old"
    assert re.search(rf"waits for up to 3 s: {behind}: {why}$", note), note
    assert 2.0 <= progress.seconds[0] < NOTE_SECONDS_MAX
    assert re.search(rf"gave up after waiting \d s: {behind}: {why}$", raised.value.message), raised.value.message
    assert raised.value.exit_code == 6
    assert "--wait SECONDS" in raised.value.hint
    assert "snapshot create NAME --only-primary" in raised.value.hint
    return raised.value


@pytest.mark.parametrize("held_up", [paused, delayed, cut_off, in_the_way], ids=lambda one: one.__name__)
def test_an_increment_says_which_standby_is_behind_by_how_much_and_why(
    runs: Runs, held_up: Callable[[Runs], contextmanager[str]]
) -> None:
    last = read_chain(runs.fleet.store.open(), CHAIN).last.increment
    with held_up(runs) as why:
        execute(runs.fleet.node("s1"), "INSERT INTO seen SELECT coalesce(max(id), 0) + 1 FROM seen")
        error = refused(create_increment, runs, CHAIN, why)
        if held_up in (paused, delayed):
            # The hint works as it is typed.
            ((node, statements),) = STATEMENTS.findall(error.hint)
            execute(runs.fleet.node(node), *statements.splitlines())
            last = runs.increment(CHAIN).increment
    await_replay(runs)
    assert runs.increment(CHAIN).increment == last + 1


def test_a_record_of_which_only_a_part_is_flushed_makes_no_standby_late(runs: Runs) -> None:
    """Of what an unfinished transaction writes, servers at first flush whole pages only, which end within a record."""
    primary, standby = runs.fleet.node("s1"), runs.fleet.node("s1-b1")
    not_required = replace(runs.fleet, standbys_min=0)
    # Every 15 seconds the server flushes the rest by itself, so perhaps during one of two creates in a row.
    for _ in range(2):
        with psycopg.connect(primary.dsn) as writer, psycopg.connect(standby.dsn, autocommit=True) as reader:
            flush_a_part(writer, reader)
            request = CreateRequest(CHAIN, wait_seconds=WAIT_SECONDS)
            commit = create_increment(not_required, request, runs.spark, Silent())
            writer.rollback()
        assert not commit.absent


def flush_a_part(writer: psycopg.Connection[TupleRow], reader: psycopg.Connection[TupleRow]) -> None:
    """Write in an open transaction until the primary's flushed WAL ends within a record, and stays so."""
    deadline = time.monotonic() + REPLAY_SECONDS_MAX
    # How often the standby was seen before the same position.
    position, seen = "", 0
    while seen < 5:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        (flushed,) = writer.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
        seen = seen + 1 if flushed == position else 0
        position = flushed
        if reader.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", (flushed,)).fetchone() != (True,):
            writer.execute("INSERT INTO seen SELECT 1000 + nextval('given') FROM generate_series(1, 130)")


def test_archiving_of_an_idle_fleet_writes_nothing(runs: Runs) -> None:
    """A watch does it every minute: commits would make idle servers take checkpoints and fill WAL files."""
    not_required, primary = replace(runs.fleet, standbys_min=0), runs.fleet.node("s1")
    written = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"

    def writes() -> bool:
        await_replay(runs)
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            before = connection.execute(written).fetchone()
            assert not archive_ahead(not_required, CHAIN, Silent()).needs_increment
            return connection.execute(written).fetchone() != before

    # Autovacuum may write at the same time, but not each time.
    assert not all(writes() for _ in range(3))


def test_a_standby_that_takes_no_more_sessions_costs_its_primary_one(runs: Runs) -> None:
    """While its slot is made, it is asked again and again how far it is."""
    primary, standby = runs.fleet.node("s1"), runs.fleet.node("s1-b1")
    with psycopg.connect(standby.dsn) as connection:
        (rules,) = connection.execute("SHOW hba_file").fetchone() or ("",)
    path = Path(rules)
    before = path.read_text()
    reload = "SELECT pg_reload_conf()"
    with psycopg.connect(standby.dsn, autocommit=True) as inside, paused(runs):
        progress, most = Notes(), 0
        failed: list[BaseException] = []

        def create() -> None:
            try:
                create_full(runs.fleet, CreateRequest("no_more", wait_seconds=WAIT_SECONDS), runs.spark, progress)
            except BaseException as error:  # noqa: BLE001  # it is looked at below
                failed.append(error)

        thread = threading.Thread(target=create)
        thread.start()
        try:
            query = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query ^@ 'CREATE_REPLICATION_SLOT')"
            await_state(standby, query)
            path.write_text("local all all reject\nhost all all all reject\n")
            inside.execute(reload)
            with psycopg.connect(primary.dsn, autocommit=True) as counting:
                while thread.is_alive():
                    count = "SELECT count(*)::int FROM pg_stat_activity WHERE application_name ^@ 'cutline'"
                    (found,) = counting.execute(count).fetchone() or (0,)
                    most = max(most, found)
                    time.sleep(0.1)
        finally:
            path.write_text(before)
            inside.execute(reload)
            thread.join()
    assert isinstance(failed[0], SnapshotError), failed
    # The command's own, those of its watch, of the primary's slot and of the wait for the standby's.
    assert most <= 5


def test_a_full_snapshot_says_it_too_and_leaves_no_slot(runs: Runs) -> None:
    before = {node.id: slots_of(node.dsn) for node in runs.fleet.nodes}
    with paused(runs) as why:
        refused(create_full, runs, "full_paused", why)
        assert {node.id: slots_of(node.dsn) for node in runs.fleet.nodes} == before
        # What the hint offers besides.
        create_full(runs.fleet, CreateRequest("only_primaries", only_primary=True), runs.spark, Silent())
    create_full(runs.fleet, CreateRequest("full_paused"), runs.spark, Silent())
