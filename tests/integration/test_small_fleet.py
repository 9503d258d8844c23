"""Commands with little to read or copy need no Spark: what they store and restore, and how an interrupt ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.crash_points import CrashPoint
from cutline.nodes.connections import with_database
from cutline.nodes.groups import read_tables
from cutline.snapshots.base_copy.copy_tables import amount_to_copy
from tests.commands.noted_command import noted
from tests.commands.snapshot_runs import Ready, Runs, command_line, run_command, slots_of, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute
from tests.run.by_spark import in_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
NAME, DATABASE = "daily", "small"
SEEN_SECONDS_MAX, END_SECONDS_MAX = 60.0, 20.0
# Keys, no key, a partial unchanged value of TOAST, an enum, partitions, and a foreign key.
FIRST = (
    "CREATE TYPE mood AS ENUM ('good', 'bad')",
    "CREATE TABLE item (id bigint PRIMARY KEY, mood mood, big text)",
    "INSERT INTO item SELECT n, CASE WHEN n % 3 = 0 THEN 'bad' ELSE 'good' END::mood,"
    " CASE WHEN n % 100 = 0 THEN (SELECT string_agg(md5(n::text || m), '') FROM generate_series(1, 200) m) END"
    " FROM generate_series(1, 5000) n",
    "CREATE TABLE log (at timestamptz, line text)",
    "ALTER TABLE log REPLICA IDENTITY FULL",
    "INSERT INTO log SELECT now(), 'line ' || n % 7 FROM generate_series(1, 2000) n",
    "CREATE TABLE part (id int, item bigint REFERENCES item, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (1000)",
    "CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (1000) TO (2000)",
    "INSERT INTO part SELECT n, n FROM generate_series(1, 1999) n",
)
THEN = (
    "UPDATE item SET mood = 'bad' WHERE id % 50 = 0",
    "DELETE FROM log WHERE line = 'line 3'",
    "UPDATE part SET id = id + 1000 WHERE id < 500 AND id + 1000 NOT IN (SELECT id FROM part)",
    "CREATE TABLE added (id int PRIMARY KEY, v text DEFAULT 'new')",
    "INSERT INTO added SELECT n FROM generate_series(1, 300) n",
    "ALTER TABLE item ADD extra int DEFAULT 5",
    "INSERT INTO item VALUES (9999, 'good', NULL, 6)",
)
# Waits in the database, once the table `gate` is there.
GATE = (
    "CREATE FUNCTION wait() RETURNS boolean LANGUAGE plpgsql SET search_path = public AS "
    "$$ BEGIN IF to_regclass('gate') IS NOT NULL THEN PERFORM pg_sleep(600); END IF; RETURN true; END $$",
    "CREATE TABLE gated (id int PRIMARY KEY, CHECK (wait()))",
    "INSERT INTO gated VALUES (1)",
    "CREATE TABLE gate (id int PRIMARY KEY)",
)
BY_SPARK = "from tests.run.by_spark import work_by_spark; work_by_spark()\n"


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """A database of its own with a few rows, and its initialised store."""
    with own_database(shared_fleet, tmp_path, DATABASE) as fleet:
        execute(fleet.nodes[0].dsn, *FIRST)
        code, document = run_command(fleet, "init")
        assert code == 0, document
        yield fleet


def target_file(fleet: Fleet) -> str:
    """Write the fleet.toml of another database on the same server, and return its path."""
    (node,), (back,) = fleet.nodes, restore_target(fleet).nodes
    path = fleet.path.with_name("target.toml")
    path.write_text(fleet.path.read_text().replace(node.dsn, back.dsn))
    return str(path)


def test_a_chain_is_stored_checked_and_restored_without_spark(fleet: Fleet) -> None:
    node, nothing = fleet.nodes[0], [[], False]
    assert noted(fleet, "create", NAME) == [0, *nothing]
    execute(node.dsn, *THEN)
    assert noted(fleet, "create", NAME, "--incremental") == [0, *nothing]
    # There is no second copy to compare.
    assert noted(fleet, "check", NAME) == [4, *nothing]
    assert noted(fleet, "check", NAME, "--since-last") == [4, *nothing]
    assert noted(fleet, "restore", NAME, "--to", target_file(fleet), "--yes") == [0, *nothing]
    assert sorted_copies(restore_target(fleet).nodes[0].dsn) == sorted_copies(node.dsn)


def test_with_more_to_do_spark_does_it(fleet: Fleet) -> None:
    code, started, is_imported = noted(fleet, "create", NAME, before=BY_SPARK)
    assert (code, is_imported) == (0, True)
    assert started
    code, started, is_imported = noted(fleet, "check", NAME, before=BY_SPARK)
    assert (code, is_imported) == (4, True)
    assert started


def test_both_ways_store_and_restore_the_same(fleet: Fleet, spark: SparkSession) -> None:
    def stored(name: str, session: SparkSession) -> list[tuple[str, str, int, dict[int, int]]]:
        commit = Runs(fleet, Ready(session)).full(name)
        return sorted((entry.kind, entry.digest, entry.size, entry.rows) for entry in commit.entries)

    by_itself, by_spark = stored("itself", in_driver(spark)), stored("spark", spark)
    assert [one for one in by_itself if one[0] == "base"] == [one for one in by_spark if one[0] == "base"]
    assert any(one[0] == "base" for one in by_itself)
    for name, session in (("spark", in_driver(spark)), ("itself", spark)):
        runs = Runs(fleet, Ready(session))
        assert runs.check(name).exit_code == 4
        runs.restore(name, restore_target(fleet))
        assert sorted_copies(restore_target(fleet).nodes[0].dsn) == sorted_copies(fleet.nodes[0].dsn)


def await_query(dsn: str, pattern: str) -> None:
    """Wait until a session runs this query."""
    query = "SELECT 1 FROM pg_stat_activity WHERE query LIKE %s AND state = 'active' AND pid <> pg_backend_pid()"
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not connection.execute(query, (pattern,)).fetchall():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def end_by_interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the command, which must end soon and say so."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, problems = process.communicate(timeout=SEEN_SECONDS_MAX)
    assert time.monotonic() - began < END_SECONDS_MAX
    assert process.returncode == 130, problems
    # Before it, a command that stops itself prints its processes.
    assert json.loads(output.splitlines()[-1])["error"] == "interrupted"


def test_an_interrupt_ends_a_copy_that_waits(fleet: Fleet) -> None:
    dsn = fleet.nodes[0].dsn
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGSTOP", CrashPoint.SPARK_READY, "1", "--"]
    words = ["--fleet", str(fleet.path), "create", NAME, "--json"]
    with (
        subprocess.Popen([*program, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        psycopg.connect(dsn) as connection,
    ):
        # It stops itself before the first task. Sent any earlier, the signal that continues it would be lost.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        connection.execute("LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
        process.send_signal(signal.SIGCONT)
        await_query(dsn, "LOCK TABLE ONLY%item%")
        end_by_interrupt(process)
    assert slots_of(dsn) == []
    code, document = run_command(fleet, "create", NAME)
    assert code == 0, document


def test_an_interrupt_ends_a_load_that_waits(fleet: Fleet) -> None:
    execute(fleet.nodes[0].dsn, *GATE)
    code, document = run_command(fleet, "create", NAME)
    assert code == 0, document
    words = ["restore", NAME, "--to", target_file(fleet), "--json"]
    with subprocess.Popen(
        command_line(fleet, *words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        await_query(fleet.nodes[0].dsn, "COPY %")
        end_by_interrupt(process)
    with psycopg.connect(with_database(fleet.nodes[0], "postgres").dsn) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (DATABASE,)).fetchall()
    assert left == [(DATABASE,)]


def test_values_that_are_stored_elsewhere_count(fleet: Fleet) -> None:
    with psycopg.connect(fleet.nodes[0].dsn) as connection:
        query = "SELECT pg_relation_size('item'), pg_relation_size(reltoastrelid) FROM pg_class WHERE relname = 'item'"
        sizes = connection.execute(query).fetchone()
        (item,) = (table for table in read_tables(connection, GroupRules()) if table.group.name == "public.item")
    assert (item.size_bytes, item.toast_bytes) == sizes
    assert item.toast_bytes > 0
    node = fleet.nodes[0]
    assert amount_to_copy([node], {node.shard: [item]}).page_bytes == item.size_bytes + item.toast_bytes
