"""An ordinary role that owns tables on a source makes Cutline run none of its functions, and blocks no restore.

Each test is an attack that succeeded once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

import cutline.nodes.connections as connections
import cutline.snapshots.base_copy.copy_tables
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, GroupRules
from cutline.nodes.connections import connect, with_database
from cutline.nodes.groups import read_tables
from cutline.snapshots.base_copy.copy_ranges import CopyDestination, CopyTask, PageRange, copy_ranges
from cutline.snapshots.create.sequences import read_sequences
from cutline.snapshots.records.commit import FullSnapshot
from cutline.storage.errors import error_of
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.postgresql(
    18, reason="an attack hides in the name of a NOT NULL constraint, which came with 18"
)
WAIT_SECONDS_MAX = 30
OWNED = (
    "CREATE ROLE mallory", "CREATE SCHEMA m AUTHORIZATION mallory", "SET ROLE mallory",
    "CREATE FUNCTION m.evil() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'it ran'; END $$",
    "CREATE TABLE m.t (id bigint PRIMARY KEY)", "CREATE SEQUENCE m.q",
)  # fmt: skip
VIEW_FOR_SEQUENCE = "DROP SEQUENCE m.q; CREATE VIEW m.q AS SELECT m.evil() AS last_value, true AS is_called"
VIEW_FOR_TABLE = "DROP TABLE m.t; CREATE VIEW m.t AS SELECT m.evil() AS id"


def rows_of(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


@pytest.fixture
def own(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        with database_on(shared_fleet, "attacked", tmp_path_factory.mktemp("attacked")) as fleet:
            execute(fleet.primaries[0].dsn, *OWNED)
            yield fleet
    finally:
        execute(shared_fleet.primaries[0].dsn("postgres"), "DROP ROLE IF EXISTS mallory")


@pytest.fixture(params=[True, False], ids=["a server that can refuse views", "one that can't"])
def restriction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers before 17 got the setting in a minor version, so an old one may lack it."""
    if not request.param:
        monkeypatch.setattr(connections, "has_restriction", lambda _version: False)


def await_waiting(dsn: str) -> None:
    """Wait until a session of Cutline waits for a lock."""
    query = "SELECT FROM pg_stat_activity WHERE application_name = 'cutline' AND wait_event_type = 'Lock'"
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not rows_of(dsn, query):
        assert time.monotonic() < deadline, "nothing waits"
        time.sleep(0.02)


@pytest.mark.usefixtures("restriction")
def test_a_view_in_the_place_of_a_sequence_is_not_read(own: Fleet) -> None:
    (node,) = own.primaries
    with psycopg.connect(node.dsn) as owner, connect(node) as connection, ThreadPoolExecutor(1) as threads:
        owner.execute(b"SET ROLE mallory")
        owner.execute(VIEW_FOR_SEQUENCE.encode())
        reading = threads.submit(read_sequences, node, connection, 60)
        await_waiting(node.dsn)
        owner.commit()
        assert reading.result().sequences == ()


@pytest.mark.usefixtures("restriction")
def test_a_view_in_the_place_of_a_table_is_not_copied(own: Fleet) -> None:
    (node,) = own.primaries
    with connect(node) as connection, connect(node) as holder:
        (table,) = [one for one in read_tables(connection, GroupRules()) if one.group.name == "m.t"]
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        (exported,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
        execute(node.dsn, "SET ROLE mallory", VIEW_FOR_TABLE)
        to = CopyDestination("m", "op", StoreLocation("memory://m"))
        task = CopyTask(node, 0, exported, (PageRange(table.group, table.oid),), to, 0)
        problem = copy_ranges(task).problem
    assert problem
    assert "now a different relation" in error_of(problem).message


@pytest.mark.parametrize("task_pages", [1, 8192], ids=["large tables", "small tables"])
def test_functions_of_indexes_and_statistics_do_not_run_when_a_table_is_copied(
    own: Fleet, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, task_pages: int
) -> None:
    """The planner evaluates what is constant in them, as the role of the session, for any query of the table."""
    monkeypatch.setattr(cutline.snapshots.base_copy.copy_tables, "TASK_PAGES", task_pages)
    monkeypatch.setattr(cutline.snapshots.base_copy.copy_tables, "TASK_PAGES", task_pages)
    (node,) = own.primaries
    execute(
        node.dsn, "SET ROLE mallory",
        "CREATE FUNCTION m.spy(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$"
        " BEGIN IF current_user <> 'mallory' THEN RAISE EXCEPTION 'it ran'; END IF; RETURN n; END $$",
        "CREATE TABLE m.i (id int PRIMARY KEY, v text)", "CREATE INDEX ON m.i ((id + m.spy(1)))",
        "CREATE TABLE m.s (id int PRIMARY KEY, v text)", "CREATE STATISTICS m.st ON (id + m.spy(1)), v FROM m.s",
        "CREATE TABLE m.w (id int PRIMARY KEY, v text)", "CREATE INDEX ON m.w (id) WHERE id > m.spy(1)",
        *(f"INSERT INTO m.{one} SELECT n, repeat('x', 100) FROM generate_series(1, 500) AS n" for one in "isw"),
    )  # fmt: skip
    with psycopg.connect(node.dsn) as connection, pytest.raises(psycopg.errors.RaiseException, match="it ran"):
        connection.execute("SELECT count(*) FROM m.i")
    runs = Runs(own, Ready(spark))
    with dropping_slots(own):
        runs.init()
        full = runs.full("hostile")
    assert isinstance(full, FullSnapshot)
    rows = sum((Counter(one.rows) for one in full.copied), Counter[int]())
    assert sorted(rows.values()) == [500 * len(own.nodes)] * 3


def restore_again(own: Fleet, spark: SparkSession, groups: tuple[str, ...] = ()) -> str:
    """Take a snapshot of the one node and restore it beside its database; return the dsn of what was restored."""
    target = replace(own, nodes=(with_database(own.primaries[0], "attacked_again"),))
    runs = Runs(own, Ready(spark))
    with dropping_slots(own):
        runs.init()
        runs.full("hostile")
        runs.restore("hostile", target, groups=groups)
    return target.nodes[0].dsn


# Quoting what looks like a constraint's name ended the first column's name; the second one ended the comment.
COLUMNS = ("c\n    CONSTRAINT int);ALTER ROLE mallory SUPERUSER;/* NOT NULL ", "\n*/ SELECT (1 --")
# Removing what looks like a foreign key removed the quote that ends the first comment.
COMMENTS = (
    '\nALTER TABLE ONLY "m"."t"\n    ADD CONSTRAINT "x" FOREIGN KEY ',
    ";ALTER ROLE mallory SUPERUSER;--",
)
BODY = '\n    CONSTRAINT int NOT NULL "a",\nSET standard_conforming_strings = off;\n'


@pytest.mark.parametrize("groups", [(), ("m.t",)], ids=["the whole", "one table"])
def test_names_comments_and_bodies_run_no_statement_at_a_restore(
    own: Fleet, spark: SparkSession, groups: tuple[str, ...]
) -> None:
    (node,) = own.primaries
    columns = ", ".join(f'"{name}" int' for name in COLUMNS)
    execute(
        node.dsn, "SET ROLE mallory", f"CREATE TABLE m.named (id int PRIMARY KEY, {columns})",
        "CREATE INDEX one ON m.t (id)", "CREATE INDEX two ON m.t (id)",
        *(f"COMMENT ON INDEX m.{name} IS '{text}'" for name, text in zip(("one", "two"), COMMENTS, strict=True)),
        f"CREATE FUNCTION m.body() RETURNS text LANGUAGE sql AS $$SELECT '{BODY}'::text$$",
    )  # fmt: skip
    dsn = restore_again(own, spark, groups)
    assert rows_of(dsn, "SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'") == [(False,)]
    assert rows_of(dsn, "SELECT m.body()") == [(BODY,)]
    found = "SELECT attname FROM pg_attribute WHERE attrelid = 'm.named'::regclass AND attnum > 1 ORDER BY attnum"
    assert rows_of(dsn, found) == [(name,) for name in COLUMNS]
    commented = "SELECT obj_description(('m.' || name)::regclass) FROM unnest(ARRAY['one', 'two']) AS of (name)"
    assert rows_of(dsn, commented) == [(text,) for text in COMMENTS]


# It says more about each row than the buffers of a socket hold, at whatever level the session asks for.
LOUD = """
CREATE FUNCTION m.loud(id int) RETURNS bool LANGUAGE plpgsql SET client_min_messages = debug1 AS
  $$ BEGIN RAISE NOTICE '%', repeat('x', 10000); RETURN true; END $$
"""


@pytest.mark.timeout(120)
def test_a_function_that_says_much_about_every_row_does_not_stop_a_restore(own: Fleet, spark: SparkSession) -> None:
    """psycopg reads no answer while it writes rows: then both sides would wait for each other."""
    (node,) = own.primaries
    execute(
        node.dsn, "SET ROLE mallory", LOUD, "CREATE TABLE m.said (id int PRIMARY KEY, filler text)",
        "INSERT INTO m.said SELECT id, repeat('y', 1000) FROM generate_series(1, 3000) AS id",
        "ALTER TABLE m.said ADD CHECK (m.loud(id))",
    )  # fmt: skip
    dsn = restore_again(own, spark)
    assert rows_of(dsn, "SELECT count(*) FROM m.said") == [(3000,)]


# pg_dump 18 writes this name unquoted; in the entry's comment the table's name began a string, so it stayed unquoted.
CONSTRAINT = "a CHECK(1>0));ALTER ROLE mallory SUPERUSER;CREATE TABLE m.z(--"


def test_a_name_in_a_comment_hides_no_fault_of_pg_dump(own: Fleet, spark: SparkSession) -> None:
    (node,) = own.primaries
    execute(
        node.dsn, "SET ROLE mallory", "CREATE TABLE m.p (c int, id int PRIMARY KEY)",
        f"""CREATE TABLE m."it's" (CONSTRAINT "{CONSTRAINT}" NOT NULL c, PRIMARY KEY (id)) INHERITS (m.p)""",
    )  # fmt: skip
    dsn = restore_again(own, spark)
    assert rows_of(dsn, "SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'") == [(False,)]
    found = "SELECT conname FROM pg_constraint WHERE conrelid = 'm.\"it''s\"'::regclass AND contype = 'n'"
    assert (CONSTRAINT,) in rows_of(dsn, found)


def test_a_schema_that_cutline_itself_once_used_is_restored(own: Fleet, spark: SparkSession) -> None:
    (node,) = own.primaries
    execute(node.dsn, "CREATE SCHEMA cutline_restore", "CREATE TABLE cutline_restore.ledger (id int PRIMARY KEY)")
    execute(node.dsn, "INSERT INTO cutline_restore.ledger VALUES (7)")
    dsn = restore_again(own, spark)
    assert rows_of(dsn, "SELECT id FROM cutline_restore.ledger") == [(7,)]
    assert rows_of(dsn, "SELECT nspname FROM pg_namespace WHERE nspname ^@ 'cutline'") == [("cutline_restore",)]
