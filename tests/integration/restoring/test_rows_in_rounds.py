"""Rows that a table refuses until others are there: a restore loads them again, whatever the order of its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.nodes.groups import Column, Group
from cutline.restore.rows import jobs, rounds
from cutline.restore.rows.load import Feed, LoadReport, LoadTarget, Refused, create_ledger, load_images, reported
from cutline.snapshots.fold import limits
from cutline.spark.driver_session import DriverSession
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.integration.restoring.second_database import SecondDatabase, second_database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "looks_up", "looks_up_again"
CUSTOMERS = 3000
# Each table needs the next: a domain, a function in PL/pgSQL that raises its own error, and a generated column.
STATEMENTS = (
    "CREATE TABLE country (code char(2) PRIMARY KEY)",
    "INSERT INTO country VALUES ('DE'), ('CH')",
    "CREATE FUNCTION is_country(c char(2)) RETURNS boolean LANGUAGE sql STABLE"
    " AS 'SELECT EXISTS (SELECT FROM public.country WHERE code = c)'",
    "CREATE DOMAIN country_code AS char(2) CHECK (is_country(VALUE))",
    "CREATE TABLE bank (id int PRIMARY KEY, cc country_code)",
    "INSERT INTO bank VALUES (1, 'DE'), (2, 'CH')",
    """CREATE FUNCTION country_of(b int) RETURNS char(2) LANGUAGE plpgsql IMMUTABLE AS
    'DECLARE found char(2); BEGIN SELECT cc INTO STRICT found FROM public.bank WHERE id = b; RETURN found; END'""",
    "CREATE TABLE account (id int PRIMARY KEY, bank int, cc char(2) GENERATED ALWAYS AS (country_of(bank)) STORED)",
    "INSERT INTO account SELECT g, g % 2 + 1 FROM generate_series(1, 100) g",
    "CREATE TABLE customer (id int PRIMARY KEY, cc country_code, pad text)",
    f"INSERT INTO customer SELECT g, 'DE', repeat('x', 100) FROM generate_series(1, {CUSTOMERS}) g",
)
CHANGES = (
    "INSERT INTO country VALUES ('FR'), ('IT')",
    "INSERT INTO bank VALUES (3, 'FR'), (4, 'IT')",
    "INSERT INTO account SELECT g, g % 4 + 1 FROM generate_series(101, 200) g",
    "UPDATE customer SET cc = 'FR' WHERE id % 2 = 0",
)
ROWS_QUERY = """
SELECT (SELECT array_agg(code::text ORDER BY code) FROM country),
       (SELECT array_agg((id, cc)::text ORDER BY id) FROM bank),
       (SELECT array_agg((id, bank, cc)::text ORDER BY id) FROM account),
       (SELECT array_agg((id, cc)::text ORDER BY id) FROM customer)
"""


def assert_restored(place: SecondDatabase) -> None:
    rows = []
    for dsn in (place.fleet.primaries[0].dsn, place.dsn):
        with psycopg.connect(dsn) as connection:
            rows.append(connection.execute(ROWS_QUERY).fetchone())
    assert rows[0] == rows[1]


@pytest.fixture(params=["Spark", "driver"])
def session(request: pytest.FixtureRequest, spark: SparkSession) -> Any:
    """Tasks run in Spark, or in threads of the command."""
    return spark if request.param == "Spark" else DriverSession(lambda: spark, 2)


@pytest.fixture
def place(
    shared_fleet: EmbeddedFleet, tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SecondDatabase]:
    """The second increment copies the table `customer` again, and the changes of all tables are folded."""
    monkeypatch.chdir(tmp_path)
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet, dropping_slots(fleet):
        dsn = fleet.primaries[0].dsn
        execute(dsn, *STATEMENTS)
        runs = Runs(fleet, Ready(session))
        runs.init()
        runs.full("snp")
        execute(dsn, "ALTER TABLE customer ALTER id TYPE bigint")
        runs.increment("snp")
        execute(dsn, *CHANGES)
        runs.increment("snp")
        with second_database(fleet, TARGET, tmp_path, session) as place:
            yield place


@pytest.mark.parametrize("folds", ["driver", "Spark"])
def test_rows_are_restored_whatever_order_their_checks_need(
    place: SecondDatabase, monkeypatch: pytest.MonkeyPatch, folds: str
) -> None:
    if folds == "Spark":
        for limit in ("CHANGES_MAX", "CHOSEN_CHANGES_MAX"):
            monkeypatch.setattr(limits, limit, 0)
    code, done = place.run("restore")
    assert code == 0, done
    assert_restored(place)


def test_rows_are_divided_whatever_order_their_checks_need(place: SecondDatabase) -> None:
    """With --route, each target refuses rows until its own copies of the other tables are there."""
    second = TARGET + "_too"
    dsns = (place.dsn, with_database(place.fleet.primaries[0], second).dsn)
    place.file.write_text(f'{place.file.read_text()}[[node]]\nid = "s2"\ndsn = "{dsns[1]}"\n')
    try:
        code, done = place.run("restore", "--route", "public.customer=hash(id)", "--route", "*=all")
        assert code == 0, done
        found = []
        for dsn in (place.fleet.primaries[0].dsn, *dsns):
            with psycopg.connect(dsn) as connection:
                found.append(connection.execute(ROWS_QUERY).fetchone())
        source, *targets = [(row[:3], row[3]) for row in found if row]
        assert [same for same, _ in targets] == [source[0]] * 2
        customers = [customer for _, share in targets for customer in share]
        assert len(customers) == CUSTOMERS
        assert {*customers} == {*source[1]}
        assert all(share for _, share in targets)
    finally:
        execute(place.maintenance, f'DROP DATABASE IF EXISTS "{second}" WITH (FORCE)')


def test_rows_are_loaded_into_existing_tables_whatever_order_their_checks_need(place: SecondDatabase) -> None:
    """Also in a database whose sessions end with each statement that the server refuses."""
    code, done = place.run("restore", "--schema-only")
    assert code == 0, done
    execute(place.maintenance, f'ALTER DATABASE "{TARGET}" SET exit_on_error = on')
    code, done = place.run("restore", "--data-only")
    assert code == 0, done
    assert_restored(place)


def test_a_resumed_restore_loads_the_tables_that_a_task_was_still_refused(
    place: SecondDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round leaves tasks with some of their tables; nothing is loaded twice, and nothing is missing."""
    attempts = []

    def once(jobs_of_round: Any) -> Any:
        attempts.append(len(jobs_of_round))
        if len(attempts) > 2:  # after the first attempt and one round
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")
        return run_together(place.spark, jobs_of_round)

    run_together = jobs.run_together
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "load_in_rounds", lambda _, first: rounds.load_in_rounds(once, first))
        code, ended = place.run("restore")
    assert (code, len(attempts)) == (6, 3), ended
    code, done = place.run("restore-resume")
    assert code == 0, done
    assert_restored(place)


def test_all_that_is_refused_in_the_end_is_reported(place: SecondDatabase) -> None:
    """Rows of two tables are refused for good; rounds end, and the restore leaves nothing."""
    source = place.fleet.primaries[0].dsn
    code, done = place.run("restore", "--schema-only")
    assert code == 0, done
    execute(place.dsn, "ALTER TABLE customer ADD CHECK (id < 50)", "ALTER TABLE bank ADD CHECK (id < 4)")
    code, refused = place.run("restore", "--data-only")
    assert (code, refused["error"]) == (3, "load"), refused
    messages = [refused["message"], *refused["details"].get("others", [])]
    for constraint in ("customer_id_check", "bank_id_check"):
        assert any(constraint in message for message in messages), messages
    # Accounts of bank 4 are refused, too.
    assert any("query returned no rows" in message for message in messages), messages
    assert refused["hint"].splitlines()[-1] == "after the change, repeat the command"
    with psycopg.connect(place.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM country").fetchone() == (0,)
    with psycopg.connect(source) as connection:
        assert connection.execute("SELECT count(*) FROM customer").fetchone() == (CUSTOMERS,)


def test_a_table_that_refuses_rows_after_others_is_left_out_of_the_next_attempt(
    shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    """Rows of tables alternate in a partition: customers of DE, then of FR, then FR itself."""
    text = Column("v", "text", 25, -1, 0)
    country, customer = (
        Group(1, "public", "country", "full", 0, (text,)),
        Group(2, "public", "customer", "full", 0, (text,)),
    )
    batches = [rows_of(customer, "DE"), rows_of(customer, "FR"), rows_of(country, "FR")]
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet:
        (node,) = fleet.primaries
        execute(node.dsn, *LOOKED_UP)
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            target = LoadTarget(node, {1: country, 2: customer}, create_ledger(connection))

            def attempt(left_out: Refused | None) -> LoadReport:
                (row,) = next(load_images(iter(batches), {0: Feed({0: target})}, "t", left_out)).to_pylist()
                task, report = reported(**row)
                assert task == "t"
                return report

            def found() -> list[tuple[int, int, int]]:
                tables = ("country", "customer", target.ledger)
                counts = ", ".join(f"(SELECT count(*) FROM {table})" for table in tables)
                return connection.execute(f"SELECT {counts}".encode()).fetchall()

            first = attempt(None)
            assert (first.may_be_accepted, first.torn, found()) == (True, {}, [(1, 0, 0)])
            torn = attempt({})
            assert (torn.torn.keys(), torn.has_progressed, found()) == ({(0, 2)}, False, [(1, 0, 0)])
            without = attempt(torn.torn)
            assert (without.has_progressed, without.may_be_accepted, without.torn) == (True, True, {})
            # FR has been loaded; the task is not done.
            assert found() == [(2, 0, 1)]
            assert attempt(None).problems == []
            assert found() == [(2, 2, 3)]
            assert not attempt(None).has_progressed
            assert found() == [(2, 2, 3)]


LOOKED_UP = (
    "CREATE TABLE country (v text)",
    "INSERT INTO country VALUES ('DE')",
    "CREATE FUNCTION is_country(c text) RETURNS boolean LANGUAGE sql STABLE"
    " AS 'SELECT EXISTS (SELECT FROM public.country WHERE v = c)'",
    "CREATE TABLE customer (v text CHECK (is_country(v)))",
)


def rows_of(group: Group, *values: str) -> pa.RecordBatch:
    """Return folded rows (node, group, row, key)."""
    lines = [f"{value}\n".encode() for value in values]
    groups, nodes = np.full(len(lines), group.number, np.int32), np.zeros(len(lines), np.int32)
    columns = [pa.array(nodes), pa.array(groups), pa.array(lines, pa.binary()), pa.array(lines, pa.binary())]
    return pa.record_batch(columns, names=["node", "group", "row", "key"])
