"""The database of PostgreSQL's regression tests, which has nearly every kind of object, comes back at every step.

    SNAPSHOT_TEST_REGRESS=…/postgresql/src/test/regress    the folder of those tests, which no wheel contains

A full snapshot is taken after the first line of parallel_schedule, an increment after every other line. Then each is
restored and compared with the source at its time, and the last is checked, against a standby where those decode. Takes
some minutes; the version of the tests is that of the servers: SNAPSHOT_TEST_POSTGRESQL=15.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs
from psycopg import sql

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from cutline.nodes.programs import tool
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.fuzz.state import Sequences, State, compare, judge_dsn, sequences_of, state_of
from tests.servers.dealt import current_server, standbys_decode, start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REGRESS = os.environ.get("SNAPSHOT_TEST_REGRESS", "")
DATABASE, BACK, NAME = "regression", "regression_back", "regressed"
SETTINGS = {"fsync": "off", "autovacuum": "off", "max_prepared_transactions": "20"}
# The settings that pg_regress uses.
DATABASE_SETTINGS = {"lc_messages": "C", "timezone": "America/Los_Angeles", "datestyle": "Postgres, MDY"}
SCRIPT_SECONDS_MAX = 300
HAS_GENERATED = (
    "EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped)"
)
TABLES = """
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema)'
"""
WITHOUT_IDENTITY_QUERY = f"""
SELECT n.nspname, c.relname {TABLES} AND NOT {HAS_GENERATED} AND c.relreplident <> 'f'
   AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident)))
"""
GENERATED_QUERY = f"SELECT n.nspname, c.relname, c.relreplident::text {TABLES} AND {HAS_GENERATED}"
PREPARED_QUERY = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"

pytestmark = pytest.mark.skipif(not REGRESS, reason="SNAPSHOT_TEST_REGRESS names no folder of PostgreSQL's tests")


@dataclass(slots=True)
class Regression:
    """The database under test; `states` are by increment, with the sequences read twice: nobody uses them meanwhile."""

    fleet: Fleet
    spark: SparkSession
    states: list[tuple[State, Sequences]] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.fleet.primaries[0].dsn

    def run_scripts(self, names: list[str], directory: Path) -> None:
        """Run the scripts with psql, and ignore their output."""
        folder = Path(REGRESS).resolve()
        environment = os.environ | {
            "PG_ABS_SRCDIR": str(folder), "PG_ABS_BUILDDIR": str(directory), "PG_LIBDIR": "none", "PG_DLSUFFIX": ".so",
            "PGOPTIONS": "-c statement_timeout=60s -c lock_timeout=20s",
        }  # fmt: skip
        for name in names:
            command = [*tool("psql"), "-X", "-q", "-d", self.dsn, "-f", str(folder / "sql" / f"{name}.sql")]
            subprocess.run(
                command, env=environment, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, check=False,
                timeout=SCRIPT_SECONDS_MAX,
            )  # fmt: skip

    def make_admissible(self) -> Runs:
        """Give tables a replica identity, append-only for generated columns, and roll back prepared transactions."""
        with psycopg.connect(judge_dsn(self.dsn), autocommit=True) as connection:
            for (gid,) in connection.execute(PREPARED_QUERY).fetchall():
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
            for name in connection.execute(WITHOUT_IDENTITY_QUERY).fetchall():
                alter(connection, name, "FULL")
            generated = connection.execute(GENERATED_QUERY).fetchall()
            for schema, table, identity in generated:
                if identity == "f":
                    alter(connection, (schema, table), "DEFAULT")
        patterns = tuple(f"{schema}.{table}" for schema, table, _ in generated)
        fleet = replace(self.fleet, groups=structs.replace(self.fleet.groups, append_only=patterns))
        return Runs(fleet, Ready(self.spark))

    def take(self) -> None:
        runs = self.make_admissible()
        if not self.states:
            runs.init()
        _ = runs.increment(NAME) if self.states else runs.full(NAME)
        self.states.append((sorted_definitions(state_of(self.dsn)), sequences_of(self.dsn)))


def alter(connection: psycopg.Connection[tuple[object, ...]], name: tuple[str, ...], identity: str) -> None:
    connection.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY " + identity).format(sql.Identifier(*name)))


def sorted_definitions(state: State) -> State:
    """Ignore the order of columns: pg_dump prints inherited columns first."""
    return replace(state, ddl="\n".join(sorted(line.rstrip(",") for line in state.ddl.splitlines())))


@pytest.fixture
def regression(spark: SparkSession, tmp_path: Path) -> Iterator[Regression]:
    folder = tmp_path / "fleet"
    backups = int(standbys_decode())
    embedded = start_fleet(folder, shards=1, backups=backups, schema=False, settings=SETTINGS)
    try:
        fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
        with psycopg.connect(with_database(fleet.primaries[0], "postgres").dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0 ENCODING 'UTF8'".encode())
            for name, value in DATABASE_SETTINGS.items():
                connection.execute(f"ALTER DATABASE {DATABASE} SET {name} = '{value}'".encode())
        server = current_server(standbys=backups > 0)
        # A newer pg_dump writes what this version does not read.
        programs = server.programs if server else None
        nodes = tuple(replace(with_database(node, DATABASE), programs=programs) for node in fleet.nodes)
        yield Regression(replace(fleet, nodes=nodes), spark)
    finally:
        stop_fleet(folder, delete=True)


@pytest.mark.timeout(3600)
def test_the_regression_database_comes_back_from_every_increment(regression: Regression, tmp_path: Path) -> None:
    lines = (Path(REGRESS) / "parallel_schedule").read_text().splitlines()
    for line in lines:
        if line.startswith("test:"):
            regression.run_scripts(line.split()[1:], tmp_path)
            regression.take()
    runs = regression.make_admissible()
    target = replace(regression.fleet, nodes=tuple(with_database(node, BACK) for node in regression.fleet.primaries))
    tables = 0
    for number, (expected, later) in enumerate(regression.states):
        runs.restore(NAME, target, number)
        compare(expected, sorted_definitions(state_of(target.primaries[0].dsn)), [later], f"increment {number}")
        tables = len(expected.rows)
    assert tables > len(lines)
    report = runs.check_one(NAME)
    has_standby = len(regression.fleet.nodes) > 1
    assert (report.result, report.conflicts) == ("valid" if has_standby else "inconclusive", [])
