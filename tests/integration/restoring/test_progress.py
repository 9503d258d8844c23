"""While a restore runs, every node says how far it is: rows that are loaded, committed or not, and indexes."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.config import GroupRules
from cutline.fleet.progress import Reading, Silent
from cutline.nodes.connections import connect, with_database
from cutline.nodes.groups import read_tables
from cutline.restore.estimates import pace
from cutline.restore.estimates.estimate import RestoreStep
from cutline.restore.estimates.pace import NodeTally, rows_tally, tallying
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.load import Loader, LoadTarget, create_ledger
from cutline.restore.run.restore import restore_fleet
from tests.commands.snapshot_runs import Ready, command_line
from tests.integration.refusing import execute
from tests.integration.restoring.target_place import NAME, Place
from tests.run.by_spark import in_driver
from tests.run.soak import first


@dataclass
class Recorded(Silent):
    """Keeps all readings, with their steps."""

    steps: list[str] = field(default_factory=list)
    readings: list[tuple[str, Reading]] = field(default_factory=list)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.steps.append(name)

    def tell(self, reading: Reading) -> None:
        self.readings.append((self.steps[-1], reading))

    def last(self, node: str, unit: str) -> Reading:
        return [one for _, one in self.readings if (one.node, one.unit) == (node, unit)][-1]


def test_rows_count_before_they_are_committed_and_no_more_when_rolled_back(place: Place) -> None:
    server = place.target.primaries[0]
    execute(with_database(server, "postgres").dsn, "CREATE DATABASE shop_tally")
    database = with_database(server, "shop_tally")
    try:
        execute(database.dsn, "CREATE TABLE t (id int PRIMARY KEY)")
        with connect(database) as loading, connect(database) as asking:
            (table,) = read_tables(loading, GroupRules())
            number = 1
            group = structs.replace(table.group, number=number)
            target = LoadTarget(database, {number: group}, create_ledger(loading))
            count = rows_tally(database, target.ledger, 5)
            with loading.transaction(force_rollback=True):
                loader = Loader(loading, target, "first")
                loader.add(batch(number, b"1\n", b"2\n"), target.groups)
                assert count.ask(asking) == 2
            assert count.ask(asking) == 0
            with loading.transaction():
                loader = Loader(loading, target, "first")
                loader.add(batch(number, b"1\n", b"2\n", b"3\n"), target.groups)
                assert count.ask(asking) == 3
                loader.finish()
            # The session is still there.
            assert count.ask(asking) == 3
    finally:
        execute(with_database(server, "postgres").dsn, "DROP DATABASE shop_tally WITH (FORCE)")


def batch(number: int, *lines: bytes) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([number] * len(lines), pa.int32()), pa.array(lines, pa.binary())], names=["group", "row"]
    )


def test_slow_queries_for_progress_take_a_small_share_of_the_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "TICK_SECONDS", 0.001)
    asked: list[float] = []

    def ask(connection: psycopg.Connection[Any]) -> int:
        asked.append(time.monotonic())
        connection.execute("SELECT pg_sleep(0.1)")
        return 1

    postgres = with_database(place.target.primaries[0], "postgres")
    with tallying(Silent(), [NodeTally(postgres, 1, "rows", ask)]):
        time.sleep(1)
    # At the beginning and at the end: the next one would be due after 1.9 s.
    assert len(asked) == 2


@pytest.mark.parametrize("by_spark", first([False, True]))
def test_a_restore_tells_rows_indexes_and_time_left_of_every_node(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, by_spark: bool
) -> None:
    monkeypatch.setattr(pace, "TICK_SECONDS", 0.05)
    recorded = Recorded()
    plan = plan_restore(place.fleet, place.target, RestoreRequest(NAME))
    if by_spark:
        # Only executors do so little.
        plan = replace(plan, spark_master="spark://m1:7077")
    assert plan.needs_spark == by_spark
    try:
        report = restore_fleet(plan, Ready(place.spark if by_spark else in_driver(place.spark)), recorded)
        for node in report.nodes:
            # 6 keys were changed on each shard: the base rows are as many as those at the cut, but for these.
            rows = recorded.last(node.node, "rows")
            assert rows.done == node.rows
            assert rows.total == max(10_500, node.rows)
            indexes = recorded.last(node.node, "indexed rows")
            with psycopg.connect(with_database(place.target.node(node.node), "shop").dsn) as connection:
                query = """
                    SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
                     WHERE c.relnamespace = 'public'::regnamespace
                    """
                (count,) = connection.execute(query).fetchone() or (0,)
            # Each counts as one at least.
            assert indexes.done == indexes.total
            assert indexes.total >= count >= 3
        left = [one.seconds_left for _, one in recorded.readings]
        assert None not in left
        assert {one.operation for _, one in recorded.readings} == {plan.intent.operation}
        assert [step for step in recorded.steps if step in [*RestoreStep]] == [
            step
            for step in RestoreStep
            if step != RestoreStep.LARGE_OBJECTS and (by_spark or step != RestoreStep.SPARK)
        ]
    finally:
        for server in place.target.primaries:
            execute(with_database(server, "postgres").dsn, "DROP DATABASE IF EXISTS shop WITH (FORCE)")


def test_with_json_every_line_on_stderr_is_an_object(place: Place) -> None:
    done = subprocess.run(
        [*command_line(place.fleet, "restore", NAME, "--to", str(place.target.path), "--dry-run"), "--json"],
        capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    assert [one["node"] for one in document["plan"]["targets"]] == ["s1", "s2", "s3"]
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["schema"], line["command"], line["step"], line["state"]) for line in lines] == [
        ("cutline/progress/1", "restore", step, state)
        for step in ("check targets", "rehearse the DDL")
        for state in ("running", "done")
    ]
