"""What the tests of whole runs share: a fleet with a store of its own, the commands, and COPY to compare by."""

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

from check.report import CheckReport, SnapshotReport
from check.verify import CheckRequest, check_snapshots
from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, load_fleet
from fleet.progress import Silent
from restore.plan import plan_restore
from restore.report import RestoreReport
from restore.request import RestoreRequest
from restore.restore import restore_fleet
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.initialise import initialise
from snapshots.create.request import CreateRequest
from snapshots.records.commit import Commit
from snapshots.records.commits import snapshot_names
from tests.quick_spark import with_spark
from wal.slots.slots import drop_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND_SECONDS_MAX = 120
# Every ordinary table with its own rows; PostgreSQL's own text of every value, and PostgreSQL sorts it.
TABLES_QUERY = """
SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Ready:
    """A SparkSource whose session runs already."""

    running: SparkSession

    def begin(self) -> None:
        """Do nothing: it has begun."""

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
        """Restore into `target`, putting aside what is there."""
        request = RestoreRequest(name, increment, replace=True, **options)
        return restore_fleet(plan_restore(self.fleet, target, request), self.spark, Silent())

    def check(self, name: str | None = None, increment: int | None = None) -> CheckReport:
        return check_snapshots(self.fleet, CheckRequest(name, increment), self.spark, Silent())

    def check_one(self, name: str, increment: int | None = None) -> SnapshotReport:
        (report,) = self.check(name, increment).snapshots
        return report


def described(
    embedded: EmbeddedFleet, path: Path, store_url: str, options: Mapping[str, object] | None = None, more: str = ""
) -> Fleet:
    """Write a copy of the fleet's fleet.toml to `path`, with another store and the tables `more`, Spark's too."""
    text = re.sub(r"(?m)^store = .*$", f"store = {json.dumps(store_url)}", embedded.fleet_toml.read_text())
    if options:
        text += "\n[store_options]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    path.write_text(f"{text}\n{with_spark(more)}\n")
    return load_fleet(path)


@contextmanager
def chains_dropped(fleet: Fleet) -> Iterator[None]:
    """Drop the slots of the chains in the fleet's store at the end: others use the servers after this."""
    try:
        yield
    finally:
        for node in fleet.nodes:
            for slot in slots_of(node.dsn):
                assert drop_slot(node, slot)


@contextmanager
def transfers_taken_back(dsns: Iterable[str]) -> Iterator[None]:
    """Take away again what a test writes by hand into the bank's transfers: others look whether its books are right."""
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
    """The fleet with a new store in `directory`, initialised; what its chains leave on the servers goes at the end."""
    fleet = described(embedded, directory / "fleet.toml", f"file://{directory}/store")
    runs = Runs(fleet, Ready(spark))
    with chains_dropped(fleet):
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
    """Every table's rows as PostgreSQL's own COPY prints them, in an order that PostgreSQL made."""
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        tables = [row[0] for row in connection.execute(TABLES_QUERY)]
        return {table: _copied(connection, table) for table in tables}


def _copied(connection: psycopg.Connection[Any], table: str) -> bytes:
    statement = f'COPY (SELECT * FROM ONLY {table} AS "this row" ORDER BY "this row"::text COLLATE "C") TO STDOUT'
    with connection.cursor().copy(statement.encode()) as copy:
        return b"".join(bytes(piece) for piece in copy)


def names_of_snapshots(fleet: Fleet) -> list[str]:
    """The snapshots that exist in the fleet's store."""
    return snapshot_names(fleet.store.open())


def command_line(fleet: Fleet, *words: str) -> list[str]:
    """`snapshot` as a process: its command line."""
    return [sys.executable, "-c", "from cli.main import main; main()", "--fleet", str(fleet.path), *words]


def run_command(fleet: Fleet, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `snapshot … --json` as a process of its own; its exit code and its document."""
    done = subprocess.run(
        [*command_line(fleet, *words), "--json"],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
