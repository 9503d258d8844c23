"""Tables that are rewritten while ranges of their pages are copied: no row is lost, none counts twice.

A range of pages is that of a file. VACUUM FULL and CLUSTER write a new one, with the rows on other pages. Expected rows
come from the live servers (COPY).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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
    assert "were rewritten while others were copied" in done.stderr
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
    assert "were rewritten while others were copied" in done.stdout + done.stderr
    assert run_command(fleet, "create", "nightly", "--incremental")[0] == 0
    check_restored(fleet, target)
