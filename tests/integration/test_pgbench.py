"""PostgreSQL's own pgbench as the workload: its TPC-B script on two shards, as a workload that is not our own.

Its table pgbench_history has no key: on one shard it has REPLICA IDENTITY FULL, on the other it is append-only.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool, tool
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "tpcb"
DATABASE, BACK = "pgbench", "pgbench_back"
TRANSACTIONS_BETWEEN = 150
WAIT_SECONDS_MAX = 60
RULES = '[groups]\nappend_only = ["public.pgbench_history"]\n'
# pgbench's invariant: every transaction adds one delta to one account, one teller and one branch.
SUMS_QUERY = """
SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches),
       (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)
"""
# A table that has a key on one shard and none on the other.
NOTE_TABLE = "CREATE TABLE note (id int, v text); INSERT INTO note SELECT i, 'first' FROM generate_series(1, 9) AS i;"
KEYED, KEYLESS = "ALTER TABLE note ADD PRIMARY KEY (id)", "ALTER TABLE note REPLICA IDENTITY FULL"


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """The shared fleet's servers with databases that pgbench has initialised; dropped at the end."""
    bank = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=RULES)
    fleet = in_database(bank, DATABASE)
    try:
        for node in fleet.primaries:
            execute(with_database(node, "postgres").dsn, f"CREATE DATABASE {DATABASE}")
            run_tool("pgbench", "--initialize", "--quiet", "--scale=1", node.dsn)
            execute(node.dsn, NOTE_TABLE)
        first, second = (node.dsn for node in fleet.primaries)
        execute(first, f"ALTER TABLE pgbench_history REPLICA IDENTITY FULL; {KEYED}")
        execute(second, KEYLESS)
        for node in fleet.nodes:
            known = f"SELECT count(*) FROM pg_database WHERE datname = '{DATABASE}'"
            wait_until(with_database(node, "postgres").dsn, known, 1)
        with dropping_slots(fleet):
            yield fleet
    finally:
        for node in fleet.primaries:
            for name in databases(with_database(node, "postgres").dsn):
                execute(with_database(node, "postgres").dsn, f"DROP DATABASE {name} WITH (FORCE)")


def in_database(fleet: Fleet, name: str) -> Fleet:
    return replace(fleet, nodes=tuple(with_database(node, name) for node in fleet.nodes))


def databases(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("SELECT datname FROM pg_database WHERE datname ~ '^pgbench'")]


def execute(dsn: str, script: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in script.split(";"):
            if statement.strip():
                connection.execute(statement.encode())


def number(dsn: str, query: str) -> int:
    with psycopg.connect(dsn) as connection:
        return int((connection.execute(query.encode()).fetchone() or (0,))[0])


def wait_until(dsn: str, query: str, least: int, most: int | None = None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not least <= (found := number(dsn, query)) <= (found if most is None else most):
        assert time.monotonic() < deadline, query
        time.sleep(0.05)


@contextmanager
def pgbench(dsn: str) -> Iterator[None]:
    """Run pgbench's built-in TPC-B script during the block; at the end, wait until its sessions have ended."""
    command = [*tool("pgbench"), "--no-vacuum", "--client=2", "--rate=200", f"--time={WAIT_SECONDS_MAX * 5}", dsn]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
            assert process.poll() is None, "pgbench ended early"
        finally:
            process.terminate()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench' AND datname = 'pgbench'"
    wait_until(dsn, sessions, 0, 0)


def assert_balanced(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        (sums,) = connection.execute(SUMS_QUERY.encode()).fetchall()
    assert len(set(sums)) == 1, sums


@pytest.mark.rest
def test_pgbench_databases_are_restored_unchanged(fleet: Fleet, spark: SparkSession) -> None:
    runs = Runs(fleet, Ready(spark))
    sources = [node.dsn for node in fleet.primaries]
    restored = [node.dsn for node in in_database(fleet, BACK).primaries]
    target = in_database(fleet, BACK)
    runs.init()
    with ExitStack() as load:
        for dsn in sources:
            load.enter_context(pgbench(dsn))
        commits = [runs.full(NAME)]
        for round_ in (1, 2):
            for dsn in sources:
                count = number(dsn, "SELECT count(*) FROM pgbench_history")
                wait_until(dsn, "SELECT count(*) FROM pgbench_history", count + TRANSACTIONS_BETWEEN)
                execute(dsn, f"UPDATE note SET v = 'again {round_}' WHERE id % 3 < {round_}")
            commits.append(runs.increment(NAME))
    for dsn in sources:
        execute(dsn, "DELETE FROM note WHERE id = 3; INSERT INTO note VALUES (10, 'last')")
    commits.append(runs.increment(NAME))
    assert commits[0].counts["rows"] >= 2 * 100_000
    assert all(commit.counts["transactions"] >= 2 * TRANSACTIONS_BETWEEN for commit in commits[1:3])

    for increment in (1, 3):
        runs.restore(NAME, target, increment)
        for dsn in restored:
            assert_balanced(dsn)
            assert number(dsn, "SELECT count(*) FROM pgbench_history") >= TRANSACTIONS_BETWEEN
    for source, copy in zip(sources, restored, strict=True):
        expected = sorted_copies(source)
        assert len(expected) == 5
        assert sorted_copies(copy) == expected
    report = runs.check_one(NAME)
    assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
