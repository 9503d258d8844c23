"""A synchronous standby that is away, for which every commit of others waits, holds up no command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.nodes.connections import with_database
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
