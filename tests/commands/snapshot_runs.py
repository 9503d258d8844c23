"""What tests of whole runs share: a fleet with its own store, the commands as calls, and COPY for comparisons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec.structs import replace
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.check.report import CheckReport, SnapshotReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node, load_fleet
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import snapshot_names
from cutline.spark.driver_session import runs_in_driver
from cutline.wal.drain.slots import drop_slot
from tests.run.quick_spark import with_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND_SECONDS_MAX = 120
# Every ordinary table, with its own rows only. PostgreSQL itself prints the values and sorts the rows.
TABLES_QUERY = """
SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Ready:
    """A SparkSource whose session is already running."""

    running: SparkSession

    @property
    def is_small(self) -> bool:
        return runs_in_driver(self.running)

    def begin(self, *_: object) -> None:
        """Do nothing: the session is running."""

    def session(self) -> SparkSession:
        """Return the session."""
        return self.running


@dataclass(frozen=True, slots=True)
class Runs:
    """The commands as calls on one fleet, in this process."""

    fleet: Fleet
    spark: Ready

    def init(self) -> None:
        initialise(self.fleet, Silent())

    def full(self, name: str, **options: Any) -> Commit:
        return create_full(self.fleet, CreateRequest(name, **options), self.spark, Silent())

    def increment(self, name: str) -> Commit:
        return create_increment(self.fleet, CreateRequest(name), self.spark, Silent())

    def restore(self, name: str, target: Fleet, increment: int | None = None, **options: Any) -> RestoreReport:
        """Restore into `target`, whose databases are moved aside.

        If only some tables are restored, they are dropped instead: a restore refuses to replace a database then.
        """
        request = RestoreRequest(name, increment, **options)
        if request.tables.is_partial:
            for node in target.primaries:
                drop_database(node)
        else:
            request = replace(request, replace=True)
        return restore_fleet(plan_restore(self.fleet, target, request), self.spark, Silent())

    def check(self, name: str | None = None, increment: int | None = None) -> CheckReport:
        return check_snapshots(self.fleet, CheckRequest(name, increment), self.spark, Silent())

    def check_one(self, name: str, increment: int | None = None) -> SnapshotReport:
        (report,) = self.check(name, increment).snapshots
        return report


def drop_database(node: Node) -> None:
    """Drop the node's database, if it exists, and end the sessions in it."""
    name = conninfo_to_dict(node.dsn)["dbname"]
    with psycopg.connect(make_conninfo(node.dsn, dbname="postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(str(name))))


def configure_fleet(
    embedded: EmbeddedFleet, path: Path, store_url: str, options: Mapping[str, object] | None = None, more: str = ""
) -> Fleet:
    """Copy the fleet's fleet.toml to `path`, with another store, the tables `more` and Spark settings, and load it."""
    text = re.sub(r"(?m)^store = .*$", f"store = {json.dumps(store_url)}", embedded.fleet_toml.read_text())
    if options:
        text += "\n[store_options]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    path.write_text(f"{text}\n{with_spark(more)}\n")
    return load_fleet(path)


@contextmanager
def dropping_slots(fleet: Fleet) -> Iterator[None]:
    """Drop Cutline's slots on the fleet's nodes at the end: other tests use the servers afterwards."""
    try:
        yield
    finally:
        for node in fleet.nodes:
            for slot in slots_of(node.dsn):
                assert drop_slot(node, slot)


@contextmanager
def removing_new_transfers(dsns: Iterable[str]) -> Iterator[None]:
    """Delete at the end the transfers that a test writes by hand: other tests check the bank's books."""
    before: dict[str, list[object]] = {}
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            before[dsn] = [row[0] for row in connection.execute("SELECT id FROM transfer")]
    try:
        yield
    finally:
        for dsn, kept in before.items():
            with psycopg.connect(dsn) as connection:
                connection.execute("DELETE FROM transfer WHERE NOT id = ANY (%s)", (kept,))


@contextmanager
def runs_on(embedded: EmbeddedFleet, directory: Path, spark: SparkSession) -> Iterator[Runs]:
    """The fleet, initialised with a new store in `directory`; the slots of its chains are dropped at the end."""
    fleet = configure_fleet(embedded, directory / "fleet.toml", f"file://{directory}/store")
    runs = Runs(fleet, Ready(spark))
    with dropping_slots(fleet):
        runs.init()
        yield runs


def slots_of(dsn: str) -> list[str]:
    """Cutline's slots in a database."""
    query = (
        "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline%' AND database = current_database()"
    )
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(query)]


def sorted_copies(dsn: str) -> dict[str, bytes]:
    """Every table's rows as PostgreSQL's own COPY prints them, sorted by PostgreSQL."""
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        tables = [row[0] for row in connection.execute(TABLES_QUERY)]
        return {table: _copy_table(connection, table) for table in tables}


def _copy_table(connection: psycopg.Connection[Any], table: str) -> bytes:
    statement = f'COPY (SELECT * FROM ONLY {table} AS "this row" ORDER BY "this row"::text COLLATE "C") TO STDOUT'
    with connection.cursor().copy(statement.encode()) as copy:
        return b"".join(bytes(piece) for piece in copy)


def names_of_snapshots(fleet: Fleet) -> list[str]:
    """The snapshots that exist in the fleet's store."""
    return snapshot_names(fleet.store.open())


def command_line(fleet: Fleet, *words: str) -> list[str]:
    """The command line that runs `snapshot` as a process."""
    return [sys.executable, "-c", "from cutline.cli.main import main; main()", "--fleet", str(fleet.path), *words]


def run_command(fleet: Fleet, *words: str, seconds_max: float = COMMAND_SECONDS_MAX) -> tuple[int, dict[str, Any]]:
    """Run `snapshot … --json` as a separate process; return its exit code and its document."""
    done = subprocess.run(
        [*command_line(fleet, *words), "--json"],
        capture_output=True, text=True, timeout=seconds_max, env=os.environ, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
