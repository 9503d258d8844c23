from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.bank import BankInvariants, NoBankError, read_invariants, read_prepared_gids
from cutline.embedded.bank_workload import BankBusyError, BankStoppedError, BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from tests.servers.disasters import kill_server

if TYPE_CHECKING:
    from tests.integration.conftest import FleetFactory

WAIT_SECONDS_MAX = 30
LOCK_ALL, LOCK_ATTEMPTS = "BEGIN; SELECT FROM account FOR UPDATE; PREPARE TRANSACTION 'in-the-way'", 20
ONE_ACROSS = "(SELECT id FROM transfer WHERE (from_account - 1) / 10000 <> (to_account - 1) / 10000 LIMIT 1)"
# Each corrupts one shard in a way that row counts alone do not show.
FAULTS = {
    "half of a transfer is lost": (
        f"WITH lost AS (DELETE FROM transfer WHERE id = {ONE_ACROSS} RETURNING *)"
        " UPDATE account SET balance = balance"
        "  + CASE account.id WHEN lost.from_account THEN lost.amount ELSE -lost.amount END"
        "  FROM lost WHERE account.id IN (lost.from_account, lost.to_account)",
        "half_present",
    ),
    "half of a transfer has another amount": (
        f"UPDATE transfer SET amount = amount + 1 WHERE id = {ONE_ACROSS}",
        "half_present",
    ),
    "two balances are wrong but their sum is right": (
        "UPDATE account SET balance = balance + CASE id % 2 WHEN 0 THEN 3 ELSE -3 END"
        " WHERE id IN (SELECT id FROM account ORDER BY id LIMIT 2)",
        "unexplained_accounts",
    ),
    "an account is lost": (
        "DELETE FROM account WHERE id = (SELECT min(id) FROM account)",
        "unexplained_accounts",
    ),
}


def execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def prepared_gids(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return read_prepared_gids(connection)


def all_prepared(dsns: Sequence[str]) -> list[str]:
    return [gid for dsn in dsns for gid in prepared_gids(dsn)]


def run_for(seconds: float, dsns: Sequence[str]) -> BankWorkload:
    with BankWorkload(dsns) as workload:
        assert workload.wait(seconds)
    return workload


def wait_for_transactions(workload: BankWorkload, more: int) -> None:
    enough = workload.committed.total + more
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while workload.committed.total < enough:
        assert workload.wait(0.02)
        assert time.monotonic() < deadline


def assert_sound(invariants: BankInvariants) -> None:
    assert invariants.hold, invariants


def test_the_invariants_hold_while_money_moves_and_after(shared_fleet: EmbeddedFleet) -> None:
    dsns = shared_fleet.dsns()
    before = sum(read_invariants(dsns).transfers)
    with BankWorkload(dsns, clients=4) as workload:
        for _ in range(3):
            wait_for_transactions(workload, 50)
            # Each shard is correct at any moment, the fleet as a whole only while no transaction is in progress.
            assert read_invariants(dsns).unexplained_accounts == ()
            workload.pause()
            counted = workload.committed
            assert_sound(read_invariants(dsns))
            assert all_prepared(dsns) == []
            assert workload.committed == counted
            workload.resume()
    invariants = read_invariants(dsns)
    assert_sound(invariants)
    assert invariants.total_balance == 2 * 10_000 * 1000
    assert all_prepared(dsns) == []
    done = workload.committed
    assert done.local > 0
    assert done.cross > 0
    assert sum(invariants.transfers) - before == done.local + 2 * done.cross
    assert len(workload.latencies) == done.total


def test_the_standbys_hold_the_same_bank(shared_fleet: EmbeddedFleet) -> None:
    run_for(0.3, shared_fleet.dsns())
    for primary in shared_fleet.primaries:
        with psycopg.connect(primary.dsn()) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        for backup in shared_fleet.backups_of(primary):
            wait_for_replay(backup.dsn(), row)
    backups = [node.dsn() for node in shared_fleet.nodes if node.backup_of]
    assert read_invariants(backups) == read_invariants(shared_fleet.dsns())


def wait_for_replay(dsn: str, position: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", position).fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_one_shard_has_local_transactions_only(shared_fleet: EmbeddedFleet) -> None:
    workload = run_for(0.2, shared_fleet.dsns()[:1])
    assert workload.committed.local > 0
    assert workload.committed.cross == 0


@contextmanager
def corrupted(dsn: str, statement: str) -> Iterator[None]:
    """Run `statement` on one shard's bank; put the previous rows back at the end."""
    execute(dsn, "CREATE TABLE a AS TABLE account; CREATE TABLE t AS TABLE transfer")
    try:
        execute(dsn, statement)
        yield
    finally:
        execute(dsn, "TRUNCATE account, transfer; INSERT INTO account TABLE a; INSERT INTO transfer TABLE t")
        execute(dsn, "DROP TABLE a, t")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_shard_is_found(shared_fleet: EmbeddedFleet, fault: str) -> None:
    dsns = shared_fleet.dsns()
    run_for(0.2, dsns)
    assert_sound(read_invariants(dsns))
    statement, found_in = FAULTS[fault]
    with corrupted(dsns[1], statement):
        invariants = read_invariants(dsns)
    assert not invariants.hold
    assert getattr(invariants, found_in)
    assert_sound(read_invariants(dsns))


def test_a_second_workload_and_another_fleet_are_refused(shared_fleet: EmbeddedFleet) -> None:
    dsns = shared_fleet.dsns()
    with pytest.raises(NoBankError, match="shard 1"):
        BankWorkload(list(reversed(dsns))).start()
    with BankWorkload(dsns, clients=1) as first:
        with pytest.raises(BankBusyError):
            BankWorkload(dsns).start()
        assert first.wait(0.05)


def test_a_killed_shard_ends_the_workload_and_a_deleted_one_can_be_abandoned(
    fleet_factory: FleetFactory,
) -> None:
    fleet = fleet_factory(shards=2)
    dsns = fleet.dsns()
    workload = BankWorkload(dsns, clients=8, cross_shard_ratio=1.0)
    workload.start()
    wait_for_transactions(workload, 50)
    kill_server(fleet.node("s2"))
    assert not workload.wait(WAIT_SECONDS_MAX)
    with pytest.raises(BankStoppedError):
        workload.stop()
    assert prepared_gids(dsns[0]) == []
    fleet.start_node(fleet.node("s2"))
    run_for(0.2, dsns)
    assert all_prepared(dsns) == []
    assert_sound(read_invariants(dsns))
    assert_a_deleted_shard_can_be_abandoned(fleet)


def assert_a_deleted_shard_can_be_abandoned(fleet: EmbeddedFleet) -> None:
    with BankWorkload(fleet.dsns(), clients=8) as workload:
        wait_for_transactions(workload, 50)
        fleet.delete_node_data(fleet.node("s1"))
        workload.stop(abandon=True)
    assert prepared_gids(fleet.dsns()[1]) == []


def lock_all(dsn: str) -> None:
    """The rows are locked one by one, while clients lock two at a time, so there may be a deadlock."""
    for _ in range(LOCK_ATTEMPTS):
        with suppress(psycopg.errors.DeadlockDetected):
            execute(dsn, LOCK_ALL)
            return
    raise AssertionError("the accounts could not be locked")


def test_abandoning_does_not_wait_for_locks(shared_fleet: EmbeddedFleet) -> None:
    dsns = shared_fleet.dsns()
    workload = BankWorkload(dsns, clients=8)
    workload.start()
    try:
        wait_for_transactions(workload, 20)
        lock_all(dsns[1])
        try:
            time.sleep(0.3)
            began = time.monotonic()
            workload.stop(abandon=True)
            assert time.monotonic() - began < 15
            assert all_prepared(dsns) == []
        finally:
            execute(dsns[1], "ROLLBACK PREPARED 'in-the-way'")
    finally:
        # Otherwise the clients would go on, and every test after this one would fail.
        workload.stop(abandon=True)
    assert_sound(read_invariants(dsns))


@contextmanager
def load(fleet: EmbeddedFleet, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `snapshot demo load` as a subprocess, and kill it at the end if it is still running."""
    command = [sys.executable, "-c", "from cutline.cli.main import main; main()"]
    words = ["demo", "load", str(fleet.directory), *arguments]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def count_transfers(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT FROM transfer").rowcount


def wait_until_money_moves(dsn: str, before: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while count_transfers(dsn) < before + 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_load_reports_what_it_did(shared_fleet: EmbeddedFleet) -> None:
    with load(shared_fleet, "--seconds", "0.5", "--clients", "2", "--json") as process:
        stdout, stderr = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 0, stderr
    document = json.loads(stdout)
    assert document["schema"] == "cutline/demo-load/1"
    assert document["invariants"]["hold"] is True
    assert document["transactions"]["local"] > 0
    assert document["transactions"]["cross"] > 0
    assert 0 < document["p99_seconds"] <= document["longest_seconds"]


def test_load_reports_that_the_books_are_wrong(shared_fleet: EmbeddedFleet) -> None:
    dsn = shared_fleet.dsns()[0]
    execute(dsn, "UPDATE account SET balance = balance + 1 WHERE id = 1")
    try:
        with load(shared_fleet, "--seconds", "0.2") as process:
            stdout, _ = process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        execute(dsn, "UPDATE account SET balance = balance - 1 WHERE id = 1")
    assert process.returncode == 1
    assert "DO NOT BALANCE: 20,000,001 in all instead of 20,000,000" in stdout


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 8)])
def test_an_interrupted_load_leaves_nothing_prepared(
    shared_fleet: EmbeddedFleet, end: signal.Signals, code: int
) -> None:
    dsns = shared_fleet.dsns()
    before = count_transfers(dsns[0])
    with load(shared_fleet, "--seconds", "60", "--clients", "8") as process:
        wait_until_money_moves(dsns[0], before)
        process.send_signal(end)
        _, stderr = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == code, stderr
    assert all_prepared(dsns) == []
    assert_sound(read_invariants(dsns))


def test_a_killed_load_is_settled_by_the_next_one(shared_fleet: EmbeddedFleet) -> None:
    dsns = shared_fleet.dsns()
    before = count_transfers(dsns[0])
    with load(shared_fleet, "--seconds", "60", "--clients", "8"):
        # Leaving the block kills it.
        wait_until_money_moves(dsns[0], before)
    run_for(0.2, dsns)
    assert all_prepared(dsns) == []
    assert_sound(read_invariants(dsns))
