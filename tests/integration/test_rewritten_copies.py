"""Tables that are rewritten while ranges of their pages are copied: no row is lost, none counts twice.

A range of pages is that of a file. VACUUM FULL and CLUSTER write a new one, with the rows on other pages. Expected rows
come from the live servers (COPY).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from tests.commands.snapshot_runs import (
    COMMAND_SECONDS_MAX,
    configure_fleet,
    dropping_slots,
    run_command,
    slots_of,
    sorted_copies,
)
from tests.servers.dealt import fleet_and_target

# As little as one row in ten is left when a copy begins, so the first pages of the new file have room for all of them.
TABLE = (
    "DROP TABLE IF EXISTS big",
    "CREATE TABLE big (id int PRIMARY KEY, text text)",
    "INSERT INTO big SELECT n, repeat('text ' || n, 10) FROM generate_series(1, 4000) n",
    "DELETE FROM big WHERE id % 10 <> 0",
)
REWRITES = {
    "vacuum": "VACUUM FULL big",
    "cluster": "CLUSTER big USING big_pkey",
    "truncate": "TRUNCATE big; INSERT INTO big SELECT n, 'new' FROM generate_series(1, 50) n",
    "type": "ALTER TABLE big ALTER COLUMN id TYPE bigint",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with fleet_and_target(tmp_path_factory.mktemp("rewritten"), shards=1) as fleets:
        yield fleets


@pytest.fixture
def fleets(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path) -> Iterator[tuple[Fleet, Fleet]]:
    running, other = servers
    fleet = configure_fleet(running, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more='[copies]\nwait = "60s"')
    execute(fleet, *TABLE)
    with dropping_slots(fleet):
        assert run_command(fleet, "init")[0] == 0
        yield fleet, configure_fleet(other, tmp_path / "target.toml", f"file://{tmp_path}/other-store")


def execute(fleet: Fleet, *statements: str) -> None:
    with psycopg.connect(fleet.node("s1").dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def create_rewriting(fleet: Fleet, rewrite: str, *words: str) -> None:
    """Take a snapshot while `big` is rewritten."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.commands.rewritten_copies", fleet.node("s1").dsn, "big", rewrite, "--fleet",
         str(fleet.path), "create", "nightly", *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def check_restored(fleet: Fleet, target: Fleet) -> None:
    """The newest state restores as the live table, from both copies, and the check finds nothing."""
    (node,) = target.primaries
    for options in ((), ("--use-backup-copies",)):
        code, document = run_command(
            fleet, "restore", "nightly", "--to", str(target.path), "--replace", "--yes", *options
        )
        assert code == 0, document
        assert sorted_copies(node.dsn) == sorted_copies(fleet.node("s1").dsn), options
    code, document = run_command(fleet, "check", "nightly")
    assert (code, document["result"]) == (0, "valid"), document


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
def test_a_table_is_rewritten_while_a_full_snapshot_copies_it(fleets: tuple[Fleet, Fleet], rewrite: str) -> None:
    fleet, target = fleets
    create_rewriting(fleet, rewrite)
    check_restored(fleet, target)


def test_a_table_is_rewritten_while_an_increment_copies_it(fleets: tuple[Fleet, Fleet]) -> None:
    """The attempt is invalid, and the next one copies the table again."""
    fleet, target = fleets
    execute(fleet, "ALTER TABLE big RENAME TO waiting")
    assert run_command(fleet, "create", "nightly", "--exclude-group", "public.big")[0] == 0
    # A type that is changed by a rewrite makes the increment copy the table.
    execute(fleet, "ALTER TABLE waiting ALTER COLUMN id TYPE bigint", "DELETE FROM waiting WHERE id % 20 <> 0")
    done = subprocess.run(
        [sys.executable, "-m", "tests.commands.rewritten_copies", fleet.node("s1").dsn, "waiting",
         "VACUUM FULL waiting", "--fleet", str(fleet.path), "create", "nightly", "--incremental"],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "was rewritten while others were copied" in done.stderr
    check_restored(fleet, target)
    execute(fleet, "DROP TABLE waiting")


def test_a_table_is_rewritten_while_a_standby_is_copied_again(fleets: tuple[Fleet, Fleet]) -> None:
    """The increment leaves the standby out, and the next one copies it."""
    fleet, target = fleets
    assert run_command(fleet, "create", "nightly")[0] == 0
    standby = fleet.node("s1-b1")
    (slot,) = slots_of(standby.dsn)
    with psycopg.connect(standby.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    done = subprocess.run(
        [sys.executable, "-m", "tests.commands.rewritten_copies", fleet.node("s1").dsn, "big", "VACUUM FULL big",
         "--fleet", str(fleet.path), "create", "nightly", "--incremental"],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX,
        env={**os.environ, "CUTLINE_TEST_READ_ON": standby.dsn}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "was rewritten while others were copied" in done.stdout + done.stderr
    assert run_command(fleet, "create", "nightly", "--incremental")[0] == 0
    check_restored(fleet, target)


ROUND = "BEGIN; TRUNCATE staging; INSERT INTO staging SELECT n, {0} FROM generate_series(1, 40) n; COMMIT"


@contextmanager
def refilling(fleet: Fleet) -> Iterator[None]:
    """Table `staging` is truncated and filled again all the time: each transaction leaves 40 rows of one round."""
    execute(fleet, "DROP TABLE IF EXISTS staging", "CREATE TABLE staging (id int PRIMARY KEY, round int)")
    execute(fleet, ROUND.format(0))
    is_over = threading.Event()

    def refill() -> int:
        number = 0
        while not is_over.is_set():
            number += 1
            execute(fleet, ROUND.format(number))
            time.sleep(0.02)
        return number

    with ThreadPoolExecutor(1) as threads:
        rounds = threads.submit(refill)
        try:
            yield
        finally:
            is_over.set()
            assert rounds.result() > 0
            execute(fleet, "DROP TABLE staging")


def check_rounds(fleet: Fleet, target: Fleet, increment: int) -> None:
    """The table restores with the rows of a single round, from both copies, and the check finds nothing."""
    for options in ((), ("--use-backup-copies",)):
        words = ("--increment", str(increment), "--to", str(target.path), "--replace", "--yes", *options)
        code, document = run_command(fleet, "restore", "nightly", *words)
        assert code == 0, document
        with psycopg.connect(target.node("s1").dsn) as connection:
            query = "SELECT count(*), count(DISTINCT id), count(DISTINCT round) FROM staging"
            assert connection.execute(query).fetchone() == (40, 40, 1), options
    code, document = run_command(fleet, "check", "nightly", "--increment", str(increment))
    assert (code, document["result"]) == (0, "valid"), document


def test_a_table_that_is_truncated_all_the_time_is_copied(fleets: tuple[Fleet, Fleet]) -> None:
    """No copy of it is complete, and none has to be: the cut has a TRUNCATE after each."""
    fleet, target = fleets
    with refilling(fleet):
        code, document = run_command(fleet, "create", "nightly")
        assert code == 0, document
        # It is copied again, under another number.
        execute(fleet, "ALTER TABLE staging ALTER COLUMN round TYPE bigint")
        code, document = run_command(fleet, "create", "nightly", "--incremental")
        assert code == 0, document
        standby = fleet.node("s1-b1")
        (slot,) = slots_of(standby.dsn)
        with psycopg.connect(standby.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        code, document = run_command(fleet, "create", "nightly", "--incremental")
        assert (code, [one["node"] for one in document["renewed"]]) == (0, [standby.id]), document
        for increment in range(3):
            check_rounds(fleet, target, increment)
