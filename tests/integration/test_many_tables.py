"""Objects, row groups and statements do not grow with the number of tables. One transaction needs several segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow.parquet as pq
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.record import fields_of
from cutline.nodes.connections import with_database
from cutline.snapshots.records.commit import FullSnapshot
from cutline.wal.drain.drain import SEGMENT_BYTES_MAX
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.tables.many_tables import change_tables, make_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = 300
NAME, DATABASE = "many", "many_tables"
VALUE_BYTES = 1 << 20


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """One shard: a separate database on a server of the shared fleet."""
    whole = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    execute(whole.primaries[0].dsn, f"CREATE DATABASE {DATABASE}")
    alone = replace(whole, nodes=(with_database(whole.primaries[0], DATABASE),))
    make_tables(alone.nodes[0].dsn, TABLES)
    with dropping_slots(alone):
        yield alone
    execute(
        whole.primaries[0].dsn, f"DROP DATABASE {DATABASE} WITH (FORCE)", "DROP DATABASE IF EXISTS back WITH (FORCE)"
    )


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The statements that this process executes, in order."""
    executed: list[object] = []
    execute = psycopg.Cursor.execute

    def record(cursor: Any, query: Any, *arguments: Any, **more: Any) -> Any:
        executed.append(query)
        return execute(cursor, query, *arguments, **more)

    monkeypatch.setattr(psycopg.Cursor, "execute", record)
    return executed


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def test_cost_depends_on_rows_not_on_the_number_of_tables(
    fleet: Fleet, statements: list[object], spark: SparkSession, tmp_path: Path
) -> None:
    (source,) = (node.dsn for node in fleet.nodes)
    runs = Runs(fleet, Ready(spark))
    runs.init()
    statements.clear()
    full = runs.full(NAME)
    assert isinstance(full, FullSnapshot)
    copies = [one for one in full.copied if one.kind == "base"]
    assert [pq.ParquetFile(tmp_path / "store" / one.key).num_row_groups for one in copies] == [1]
    # Every fourth table is empty.
    assert len(copies[0].rows) == TABLES * 3 // 4

    change_tables(source, 20, TABLES)
    execute(
        source,
        f"INSERT INTO s000.t000003 SELECT n, repeat('x', {VALUE_BYTES})"
        f" FROM generate_series(100, {100 + SEGMENT_BYTES_MAX * 5 // 4 // VALUE_BYTES}) AS n",
    )
    increment = runs.increment(NAME)
    assert len(increment.segments["s1"]) > 1
    # This table was not changed.
    assert "t000007" not in json.dumps(fields_of(increment))
    # Not one for each table.
    assert len(statements) < TABLES

    target = replace(fleet, nodes=(with_database(fleet.nodes[0], "back"),))
    statements.clear()
    runs.restore(NAME, target)
    assert len(statements) < TABLES
    assert sorted_copies(target.nodes[0].dsn) == sorted_copies(source)
