"""A synchronous standby that is away, for which every commit of others waits, holds up no command by itself.

A create waits for transactions of others that wait for it, and says so.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Node
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.relation_locks import locked_error
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.wal.drain.open_transactions import SlotWaitError
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.refusing import execute
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "SET synchronous_commit = local"


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("synchronous")
    try:
        servers = start_fleet(folder / "fleet", shards=1, backups=0)
        fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
        execute(fleet.primaries[0].dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        execute(fleet.primaries[0].dsn, "SELECT pg_reload_conf()")
        with dropping_slots(fleet):
            yield Runs(fleet, Ready(spark))
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.mark.timeout(120)
def test_a_synchronous_standby_that_is_away_holds_up_no_command(runs: Runs) -> None:
    source = runs.fleet.primaries[0].dsn
    with psycopg.connect(source, autocommit=True) as others:
        notices: list[str] = []
        others.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        threading.Timer(1, others.cancel_safe).start()
        others.execute("CREATE TABLE waited (id int PRIMARY KEY)")
    # The premise.
    assert notices == ["canceling wait for synchronous replication due to user request"]
    execute(source, LOCAL, "CREATE TABLE first (id int PRIMARY KEY)", "INSERT INTO first VALUES (1)")
    runs.init()
    runs.full("away")
    execute(source, LOCAL, "CREATE TABLE second (id int PRIMARY KEY)", "INSERT INTO second VALUES (2)")
    runs.increment("away")
    target = with_database(runs.fleet.primaries[0], "again")
    runs.restore("away", replace(runs.fleet, nodes=(target,)), 1)
    assert sorted_copies(target.dsn) == sorted_copies(source)


@contextmanager
def waiting(node: Node, statement: str) -> Iterator[int]:
    """Run the statement of others, whose end waits for the standby, during the block; yield its process."""
    with psycopg.connect(node.dsn, autocommit=True, application_name="payroll") as others:
        thread = threading.Thread(target=lambda: others.execute(statement.encode()))
        thread.start()
        try:
            with psycopg.connect(node.dsn, autocommit=True) as session:
                query, process = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s", others.info.backend_pid
                deadline = time.monotonic() + 30
                while session.execute(query, (process,)).fetchone() != ("SyncRep",):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            yield process
        finally:
            others.cancel_safe()
            thread.join()


def followed(hint: str, node: Node) -> None:
    """Do what the hint says: wait for no standby."""
    assert "pg_terminate_backend" not in hint
    assert "ROLLBACK PREPARED" not in hint
    assert hint.splitlines()[0] == (
        "these transactions wait for synchronous standbys: bring the standbys back, change synchronous_standby_names,"
        " or wait longer (--wait SECONDS):"
    )
    for statement in re.findall(r"(?m)^[A-Z].*;$", hint):
        execute(node.dsn, statement.replace("…", ""))


@pytest.mark.timeout(120)
def test_a_create_names_the_wait_of_a_transaction_for_a_standby(runs: Runs) -> None:
    (node,) = runs.fleet.primaries
    execute(node.dsn, LOCAL, "CREATE TABLE first (id int PRIMARY KEY)")
    runs.init()
    with (
        waiting(node, "INSERT INTO first VALUES (1)") as first,
        waiting(node, "INSERT INTO first VALUES (2)") as second,
    ):
        with pytest.raises(SlotWaitError) as raised:
            runs.full("held", wait_seconds=1)
        for process in (first, second):
            text = rf"process {process} \(active, application payroll\), \d+ s old, of postgres in database bank"
            assert re.search(f"{text}, which waits for synchronous standbys", raised.value.message)
        assert raised.value.hint.count("ALTER SYSTEM") == 1
        followed(raised.value.hint, node)
        runs.full("held", wait_seconds=1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("statement", ["PREPARE TRANSACTION 'it''s'", "COMMIT PREPARED 'it''s'"])
def test_a_prepared_transaction_that_waits_for_a_standby_is_not_to_be_decided(runs: Runs, statement: str) -> None:
    (node,) = runs.fleet.primaries
    execute(node.dsn, LOCAL, "CREATE TABLE first (id int PRIMARY KEY)")
    begin = "BEGIN; INSERT INTO first VALUES (1); "
    if statement.startswith("COMMIT"):
        execute(node.dsn, LOCAL, f"{begin}PREPARE TRANSACTION 'it''s'")
        begin = ""
    with waiting(node, begin + statement), open_sessions(runs.fleet, [node]) as sessions:
        with pytest.raises(SlotWaitError, match=r"'it''s', .*, which waits for synchronous standbys") as raised:
            await_prepared(sessions, 0, Silent())
        followed(raised.value.hint, node)


@pytest.mark.timeout(120)
def test_a_lock_of_a_session_that_waits_for_a_standby_is_named(runs: Runs) -> None:
    (node,) = runs.fleet.primaries
    execute(node.dsn, LOCAL, "CREATE TABLE first (id int PRIMARY KEY)")
    with waiting(node, "ALTER TABLE first ADD c int") as process:
        error = locked_error(node, "reading", ["public.first"])
    assert error.details["holders"] == [
        f"public.first (session {process} of postgres, which waits for synchronous standbys)"
    ]
    assert "synchronous_standby_names" in error.hint
