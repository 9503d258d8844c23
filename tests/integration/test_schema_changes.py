"""Schema changes of every kind between increments: each increment comes back with the schema and the rows of its cut.

Judged by PostgreSQL's own COPY and pg_dump of the source, at the moments when nothing ran there. One chain of a shard
and its standby goes through all of `schema_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from check.report import SnapshotReport
from embedded.fleet import EmbeddedFleet
from fleet.nodes.connections import with_database
from fleet.programs.wheel import run_tool
from fleet.progress import Silent
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.operations.crash_points import CrashPoint
from snapshots.records.chain import Chain
from snapshots.records.commits import read_chain
from tests.integration.odd_tables import statements
from tests.integration.own_shard import database_on
from tests.integration.schema_cases import COLUMN_CASES
from tests.integration.table_cases import TABLE_CASES
from tests.snapshot_runs import Ready, Runs, chains_dropped, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
NAME = "schemas"
DATABASE, BACK = "schema_changes", "schema_changes_back"
INCREMENTS = (1, 2, 3)
CASES = COLUMN_CASES | TABLE_CASES
SEQUENCES_QUERY = """
SELECT format('%I.%I', n.nspname, c.relname), pg_sequence_last_value(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'S'
"""


@dataclass(frozen=True, slots=True)
class State:
    """A database as PostgreSQL prints it: every table's rows, its whole schema, its sequences."""

    rows: Mapping[str, bytes]
    schema: str
    sequences: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class History:
    """The chain, what the source was at every increment, what was restored of it, and what its check says."""

    chain: Chain
    states: Mapping[int, State]
    restored: Mapping[int, State]
    report: SnapshotReport


def state_of(dsn: str) -> State:
    dumped = run_tool(
        "pg_dump", "--dbname", dsn, "--schema-only", "--no-publications", "--restrict-key=x", seconds_max=60
    )
    with psycopg.connect(dsn) as connection:
        sequences = dict(connection.execute(SEQUENCES_QUERY).fetchall())
    return State(sorted_copies(dsn), dumped.stdout, sequences)


def change(dsn: str, scripts: Mapping[str, str]) -> None:
    """Run every case's script in its schema."""
    for name, script in scripts.items():
        with psycopg.connect(dsn, autocommit=True, options=f"-c search_path={name}") as connection:
            for statement in statements(script):
                connection.execute(statement.encode())


class DiedError(Exception):
    """A create ended here."""


class Dying(Silent):
    """Ends a create once its cut is made, all WAL archived, and nothing committed."""

    def reached(self, point: str, *, node: str = "") -> None:
        if point == CrashPoint.SEQUENCES_READ:
            raise DiedError


@pytest.fixture(scope="module")
def history(
    shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Iterator[History]:
    folder = tmp_path_factory.mktemp("schemas")
    with database_on(shared_fleet, DATABASE, folder) as fleet, chains_dropped(fleet):
        (source,) = fleet.primaries
        runs = Runs(fleet, Ready(spark))
        with psycopg.connect(source.dsn, autocommit=True) as connection:
            for name in CASES:
                connection.execute(f"CREATE SCHEMA {name}".encode())
        change(source.dsn, {name: case.first for name, case in CASES.items()})
        runs.init()
        runs.full(NAME)
        target = replace(fleet, nodes=(with_database(source, BACK),))
        states: dict[int, State] = {}
        restored: dict[int, State] = {}
        for increment in INCREMENTS:
            change(source.dsn, {name: case.increments[increment - 1] for name, case in CASES.items()})
            if increment == INCREMENTS[-1]:
                with pytest.raises(DiedError):
                    create_increment(fleet, CreateRequest(NAME), runs.spark, Dying())
                change(source.dsn, {name: case.aftermath for name, case in CASES.items()})
            states[increment] = state_of(source.dsn)
            runs.increment(NAME)
            runs.restore(NAME, target, increment)
            restored[increment] = state_of(target.nodes[0].dsn)
        chain = read_chain(fleet.store.open(), NAME)
        yield History(chain, states, restored, runs.check_one(NAME))


def of_case(names: Mapping[str, bytes], case: str) -> dict[str, bytes]:
    """A schema's tables."""
    return {name: rows for name, rows in names.items() if name.startswith(f"{case}.")}


@pytest.mark.parametrize("increment", INCREMENTS)
@pytest.mark.parametrize("case", CASES)
def test_every_row_comes_back_in_the_columns_of_its_cut(history: History, case: str, increment: int) -> None:
    expected, found = (of_case(one.rows, case) for one in (history.states[increment], history.restored[increment]))
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        assert found[table] == rows, table


@pytest.mark.parametrize("increment", INCREMENTS)
def test_the_schema_comes_back_as_it_was_at_the_cut(history: History, increment: int) -> None:
    state, restored = history.states[increment], history.restored[increment]
    assert restored.schema == state.schema
    assert restored.sequences == state.sequences
    assert restored.rows.keys() == state.rows.keys()


def anew(chain: Chain, increment: int) -> set[str]:
    """The tables that the increment copied anew."""
    changes = chain.increments[increment - 1].definition_changes
    assert changes
    (shard,) = chain.full.groups
    carried = changes.successions.get(shard, {})
    return {group.name for group in changes.groups.get(shard, ()) if group.number not in carried}


@pytest.mark.parametrize("increment", INCREMENTS)
def test_only_what_the_wal_does_not_show_is_copied_anew(history: History, increment: int) -> None:
    expected = {f"{name}.{table}" for name, case in CASES.items() for table in case.anew[increment - 1].split()}
    assert anew(history.chain, increment) == expected


def test_copies_of_a_chain_whose_tables_changed_are_compared_whole(history: History) -> None:
    report = history.report
    assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
    assert report.compared.partitions >= sum(bool(rows) for rows in history.states[INCREMENTS[-1]].rows.values())
