"""An index begins when its table has all its rows, while others are still being loaded; whatever ends the load ends it.

A lock of the test's holds the load of one table up. What the server has of the others is read from its catalogs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.snapshots.base_copy.copy_tables
from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Fleet, Node, load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.refusing import execute
from tests.integration.restoring.target_place import ROOT
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, DATABASE = "daily", "shop"
WAIT_SECONDS_MAX = 120
# Long enough for an early session to look for complete tables again.
LOOK_SECONDS = 2.5
TABLES = """
CREATE FUNCTION twice(n int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 2 * n';
CREATE TABLE large (id int PRIMARY KEY, body text);
INSERT INTO large SELECT i, md5(i::text) FROM generate_series(1, 20000) AS i;
CREATE INDEX large_body ON large (body);
CREATE TABLE small (id int PRIMARY KEY, n int UNIQUE, of_large int REFERENCES large);
INSERT INTO small SELECT i, -i, i FROM generate_series(1, 1000) AS i;
CREATE INDEX small_of_large ON small (of_large);
CREATE INDEX small_twice ON small (twice(n));
"""
# Of what is on these tables, only the function may need rows of others.
EARLY = {"small_pkey", "small_n_key", "small_of_large"}
INDEXES_QUERY = """
SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE i.indisvalid AND c.relnamespace = 'public'::regnamespace
"""
DEFINITIONS_QUERY = """
SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class c ON c.oid = indexrelid
 WHERE c.relnamespace = 'public'::regnamespace
UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'public'::regnamespace
 ORDER BY 1
"""
BUILDING_QUERY = """
SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'shop_restoring%' AND query ~ '^(CREATE INDEX|ALTER TABLE)'
   AND state = 'active'
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A shard, and a target on the same server."""

    fleet: Fleet
    target: Fleet
    spark: SparkSession

    @property
    def node(self) -> Node:
        return self.target.primaries[0]

    @property
    def maintenance(self) -> str:
        return with_database(self.node, "postgres").dsn

    def databases(self) -> list[str]:
        query = f"SELECT datname FROM pg_database WHERE datname LIKE '{DATABASE}%'"
        return [name for (name,) in ask(self.maintenance, query)]

    def assert_restored(self) -> None:
        source = self.fleet.primaries[0].dsn
        assert sorted_copies(self.node.dsn) == sorted_copies(source)
        assert ask(self.node.dsn, DEFINITIONS_QUERY) == ask(source, DEFINITIONS_QUERY)
        assert self.databases() == [DATABASE]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("early")
    servers = start_fleet(folder / "fleet", shards=1, backups=0, schema=False, settings={"fsync": "off"})
    try:
        fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
        execute(with_database(fleet.primaries[0], "postgres").dsn, "CREATE DATABASE bank")
        execute(fleet.primaries[0].dsn, TABLES)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        with dropping_slots(fleet), pytest.MonkeyPatch.context() as patch:
            # An object for each table, as for large tables.
            patch.setattr(cutline.snapshots.base_copy.copy_tables, "TASK_TABLES", 1)
            runs.full(NAME)
            path = fleet.path.with_name("target.toml")
            path.write_text(fleet.path.read_text().replace("/bank", f"/{DATABASE}"))
            yield Place(fleet, load_fleet(path), spark)
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture(autouse=True)
def _without_databases(place: Place) -> Iterator[None]:
    yield
    for name in place.databases():
        execute(place.maintenance, f'DROP DATABASE "{name}" WITH (FORCE)')


def ask(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def restoring(place: Place, *locks: str) -> Iterator[tuple[subprocess.Popen[str], str, psycopg.Connection[Any]]]:
    """Restore in a process, with locks on its tables from before the load.

    Yields the process, the dsn of the database that is being loaded, and the session that holds the locks.
    """
    words = ["--fleet", str(place.fleet.path), "--json", "restore", NAME, "--to", str(place.target.path), "--yes"]
    stopped = ["-m", "tests.faults.signalled_command", "SIGSTOP", str(RestoreCrashPoint.LOADING), "1", "--"]
    process = subprocess.Popen(
        [sys.executable, *stopped, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        # The ids of its children, right before it stops.
        process.stdout.readline()
        wait_for(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is not None)
        (name,) = place.databases()
        dsn = with_database(place.node, name).dsn
        with closing(psycopg.connect(dsn)) as held:
            for lock in locks:
                held.execute(f"LOCK TABLE {lock} MODE".encode())
            process.send_signal(signal.SIGCONT)
            yield process, dsn, held
    finally:
        process.kill()
        process.communicate()


def indexes(dsn: str) -> set[str]:
    return {name for (name,) in ask(dsn, INDEXES_QUERY)}


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=WAIT_SECONDS_MAX)
    return output


def test_a_complete_table_gets_its_indexes_while_another_is_loaded(place: Place) -> None:
    with restoring(place, "large IN ACCESS EXCLUSIVE") as (process, dsn, held):
        wait_for(lambda: indexes(dsn) == EARLY)
        time.sleep(LOOK_SECONDS)
        assert indexes(dsn) == EARLY
        assert held.execute("SELECT count(*) FROM large").fetchone() == (0,)
        held.rollback()
        output = end(process)
    assert process.returncode == 0, output
    place.assert_restored()


@pytest.mark.parametrize("ends", ["restore-resume", "restore-abandon"])
def test_a_restore_that_is_killed_while_some_indexes_exist_can_be_ended_in_both_ways(place: Place, ends: str) -> None:
    with restoring(place, "large IN ACCESS EXCLUSIVE") as (process, dsn, _):
        wait_for(lambda: indexes(dsn) == EARLY)
        process.kill()
        process.wait()
    if ends == "restore-resume":
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
        place.assert_restored()
    else:
        abandon_restore(place.fleet, place.target, NAME, lambda _: None, Silent())
        assert place.databases() == []


def test_an_interrupt_ends_the_statement_before_the_database_is_dropped(place: Place) -> None:
    # The lock on the small table admits rows, but no index.
    with restoring(place, "large IN ACCESS EXCLUSIVE", "small IN ROW EXCLUSIVE") as (process, dsn, _):
        wait_for(lambda: ask(place.maintenance, BUILDING_QUERY) == [(1,)])
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        output = end(process)
        assert time.monotonic() - began < WAIT_SECONDS_MAX / 4
        assert indexes_are_gone(dsn)
    assert process.returncode == 128 + signal.SIGINT, output
    assert place.databases() == []


def indexes_are_gone(dsn: str) -> bool:
    try:
        indexes(dsn)
    except psycopg.OperationalError as error:
        return "does not exist" in str(error)
    return False


def test_an_index_that_is_still_being_created_after_the_load_is_not_begun_again(place: Place) -> None:
    with restoring(place, "small IN ROW EXCLUSIVE") as (process, dsn, held):
        wait_for(lambda: ask(place.maintenance, BUILDING_QUERY) == [(1,)])
        wait_for(lambda: ask(dsn, "SELECT count(*) FROM large") == [(20_000,)])
        time.sleep(LOOK_SECONDS)
        assert ask(place.maintenance, BUILDING_QUERY) == [(1,)]
        held.rollback()
        output = end(process)
    assert process.returncode == 0, output
    place.assert_restored()


def test_a_session_that_is_ended_during_its_statement_leaves_the_restore_to_be_resumed(place: Place) -> None:
    with restoring(place, "small IN ROW EXCLUSIVE") as (process, _, held):
        wait_for(lambda: ask(place.maintenance, BUILDING_QUERY) == [(1,)])
        ask(place.maintenance, BUILDING_QUERY.replace("count(*)", "pg_terminate_backend(pid)"))
        held.rollback()
        output = end(process)
    assert process.returncode == 6, output
    assert len(place.databases()) == 1
    resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
    place.assert_restored()
