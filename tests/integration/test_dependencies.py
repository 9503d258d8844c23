"""What depends on what does not follow from sizes: every kind of dependency, in both directions of size, is restored.

Foreign keys, indexes and the rest are created in several sessions, those of the largest tables first, or in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool
from cutline.restore.ddl.statements import RESTRICTED_VERSION
from cutline.restore.plan.report import RestoreReport
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.tables.dependencies import SIZES, script_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "depending"
# A customer for ten orders and more: the table that refers to another one is the larger of the two.
ORDINARY = (
    "CREATE TABLE customer (id uuid PRIMARY KEY, email text UNIQUE)",
    "CREATE TABLE orders (id bigint PRIMARY KEY, customer uuid REFERENCES customer, total numeric)",
    "INSERT INTO customer SELECT md5(n::text)::uuid, n || '@x' FROM generate_series(0, 99) AS n",
    "INSERT INTO orders SELECT n, md5((n % 100)::text)::uuid, n FROM generate_series(1, 1000) AS n",
    "CREATE INDEX ON orders (customer)",
)


@pytest.fixture(scope="module")
def own(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp(NAME)
    with database_on(shared_fleet, NAME, folder) as fleet:
        dsn = fleet.primaries[0].dsn
        (folder / "script.sql").write_text(script_of(180000))
        run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={folder}/script.sql", dsn)
        execute(dsn, *ORDINARY)
        with dropping_slots(fleet):
            runs = Runs(fleet, Ready(spark))
            runs.init()
            runs.full(NAME)
            yield runs


def restore(own: Runs, **options: int | None) -> tuple[Fleet, RestoreReport]:
    node = with_database(own.fleet.primaries[0], f"{NAME}_again")
    target = replace(own.fleet, nodes=(replace(node, **options),))
    return target, own.restore(NAME, target)


@pytest.mark.parametrize("connections_max", [None, 6], ids=["several sessions", "one session"])
def test_every_dependency_is_restored_whatever_the_sizes_are(own: Runs, connections_max: int | None) -> None:
    target, report = restore(own, connections_max=connections_max)
    assert (report.refused, failing_refreshes(target.primaries[0].dsn)) == ([], sorted(report.warnings))
    source, again = own.fleet.primaries[0].dsn, target.primaries[0].dsn
    assert ddl_of(again) == ddl_of(source)
    rows = rows_of(source)
    assert rows_of(again) == rows
    # The premise: the table that refers is the larger in one schema, and the smaller in another.
    for schema, sizes in SIZES.items():
        assert tuple(rows[f"{schema}.{table}"].count(b"\n") for table in ("orders", "customer")) == sizes


def failing_refreshes(dsn: str) -> list[str]:
    """What a restore is to warn of: planning the view's query calls functions of the statistics of its table."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.info.server_version < RESTRICTED_VERSION:
            return []
        for schema in SIZES:
            with pytest.raises(psycopg.errors.UndefinedFunction):
                connection.execute(f"REFRESH MATERIALIZED VIEW {schema}.counted".encode())
    views = ", ".join(f"MATERIALIZED VIEW {schema}.counted" for schema in sorted(SIZES))
    return [
        f"node s1: {len(SIZES)} objects ({views}) use functions that do not set search_path; on PostgreSQL 17 and"
        " newer, REFRESH of them will fail until you run: ALTER FUNCTION … SET search_path = …;"
    ]


def rows_of(dsn: str) -> dict[str, bytes]:
    # To plan a query of a table, the server reads the functions of its statistics.
    return sorted_copies(make_conninfo(dsn, options=f"-c search_path={','.join(SIZES)}"))


def ddl_of(dsn: str) -> list[str]:
    return run_tool("pg_dump", "--schema-only", "--restrict-key=same", dsn).stdout.splitlines()
