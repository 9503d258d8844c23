"""Several sessions build indexes at once, those of the largest tables first, and an interrupt ends them all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import cutline.restore.ddl.running
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.nodes.connections import with_database
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import watch_nodes
from cutline.restore.ddl.ddl import refresh_views
from cutline.restore.ddl.running import DdlRun
from cutline.restore.ddl.statements import RESTRICTED_VERSION
from cutline.restore.run.refused import needed_path, path_warnings
from tests.commands.ddl_runs import dumped_ddl, make_ledger
from tests.integration.refusing import execute

DATABASE = "archived"
WAIT_SECONDS_MAX = 30
# In any other database each row that is indexed takes a minute.
SLOW = """
CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN IF current_database() <> 'archived' THEN PERFORM pg_sleep(60); END IF; RETURN n; END $$
"""
BUILDING = """
SELECT count(*) FROM pg_stat_activity WHERE datname = 'archived_again' AND query ^@ 'CREATE INDEX' AND state = 'active'
"""


@pytest.fixture
def node(shared_fleet: EmbeddedFleet) -> Iterator[Node]:
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    execute(maintenance.dsn, f"CREATE DATABASE {DATABASE}", f"CREATE DATABASE {DATABASE}_again TEMPLATE template0")
    try:
        yield with_database(maintenance, DATABASE)
    finally:
        execute(maintenance.dsn, *(f"DROP DATABASE {DATABASE}{more} WITH (FORCE)" for more in ("", "_again")))


def building(node: Node) -> int:
    with psycopg.connect(with_database(node, "postgres").dsn) as connection:
        (count,) = connection.execute(BUILDING).fetchone() or (0,)
    return int(count)


def await_building(node: Node, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while building(node) != count:
        assert time.monotonic() < deadline, f"{building(node)} indexes are being built"
        time.sleep(0.05)


def test_indexes_are_built_side_by_side_and_an_interrupt_ends_them(node: Node, tmp_path: Path) -> None:
    execute(node.dsn, SLOW, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (1)")
    execute(node.dsn, *(f"CREATE INDEX i{number} ON t (public.slow(n))" for number in range(3)))
    again = with_database(node, f"{DATABASE}_again")
    with watch_nodes([again]) as watch:
        run = DdlRun(again, dumped_ddl(node, tmp_path, watch), watch)
        run.before_rows()
        execute(again.dsn, "INSERT INTO t VALUES (1)")
        ledger = make_ledger(again)

        def interrupt() -> None:
            await_building(node, 3)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            in_parallel(run.after_rows, [ledger], watch.end_all)
        thread.join()
    assert time.monotonic() - began < WAIT_SECONDS_MAX
    # The server notices that its clients are gone.
    await_building(node, 0)


def test_what_locks_more_than_its_table_at_once_is_not_run_beside_anything(node: Node, tmp_path: Path) -> None:
    """A foreign key of a partitioned table deadlocks with the indexes of its partitions that are attached meanwhile.

    So do two indexes of a table, each with a further statement that needs a stronger lock.
    """
    execute(
        node.dsn,
        "CREATE TABLE place (id int PRIMARY KEY, name text)",
        "CREATE TABLE visit (id int PRIMARY KEY, place int REFERENCES place)",
        "CREATE TABLE measured (id int PRIMARY KEY REFERENCES place) PARTITION BY RANGE (id)",
        "CREATE TABLE measured_low PARTITION OF measured FOR VALUES FROM (0) TO (9)",
        "CREATE TABLE of_measured (id int REFERENCES measured, low int REFERENCES measured_low)",
        "CREATE INDEX of_low ON of_measured (low)",
        "CREATE MATERIALIZED VIEW places AS SELECT id, count(*) AS n FROM place GROUP BY place.id",
        "CREATE UNIQUE INDEX of_places ON places (id)",
        "CREATE MATERIALIZED VIEW by_key AS SELECT place.* FROM place GROUP BY place.id",
        "CREATE UNIQUE INDEX of_by_key ON by_key (id)",
        "CREATE INDEX of_place ON visit (place)",
        "CREATE UNIQUE INDEX of_visit ON visit (id)",
        "ALTER TABLE visit CLUSTER ON of_place, REPLICA IDENTITY USING INDEX of_visit",
        # It calls functions, which may read other tables, while it locks its own.
        "CREATE TABLE booked (id int, EXCLUDE USING btree (abs(id) WITH =))",
        "CREATE TRIGGER seen AFTER UPDATE ON visit EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    )
    with watch_nodes([node]) as watch:
        ddl = dumped_ddl(node, tmp_path, watch)
    chosen = ddl.side_by_side
    assert {entry.name for entry in ddl.post_data if entry.number in chosen} == {
        "place place_pkey", "visit visit_pkey", "measured measured_pkey", "measured_low measured_low_pkey", "of_low",
        "visit visit_place_fkey", "of_places",
    }  # fmt: skip
    assert {entry.kind for entry in ddl.post_data if entry.number not in chosen} >= {
        "INDEX ATTACH", "FK CONSTRAINT", "TRIGGER",
    }  # fmt: skip
    again = with_database(node, f"{DATABASE}_again")
    with watch_nodes([again]) as watch:
        run = DdlRun(again, ddl, watch)
        run.before_rows()
        rows = "FROM generate_series(1, 20000) AS id"
        execute(again.dsn, f"INSERT INTO place SELECT id {rows}", f"INSERT INTO visit SELECT id, id {rows}")
        ledger = make_ledger(again)
        run.after_rows(ledger)
        assert run.last(ledger)
        assert run.refusals == {}
    assert index_flags(again) == index_flags(node)


def test_the_indexes_of_the_largest_tables_are_begun_first(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One after another, as which of several sessions comes first is chance. Their names have the other order.
    monkeypatch.setattr(cutline.restore.ddl.running, "JOBS", 1)
    rows = {"a": 1, "b": 2_000, "c": 20_000, "d": 200_000, "e": 400_000}
    for name in rows:
        execute(node.dsn, f"CREATE TABLE {name} (n int)", f"CREATE INDEX {name}_n ON {name} (n)")
    target = with_database(node, f"{DATABASE}_again")
    with watch_nodes([target]) as watch:
        run = DdlRun(target, dumped_ddl(node, tmp_path, watch), watch)
        run.before_rows()
        for name, count in rows.items():
            execute(target.dsn, f"INSERT INTO {name} SELECT generate_series(1, {count})")
        run.after_rows(make_ledger(target))
    with psycopg.connect(target.dsn) as connection:
        # PostgreSQL numbers them as they are begun.
        query = "SELECT left(relname, 1) FROM pg_class WHERE relname ~ '^._n$' ORDER BY oid"
        begun = [name for (name,) in connection.execute(query)]
    assert begun == ["e", "d", "c", "b", "a"]


def index_flags(node: Node) -> list[tuple[object, ...]]:
    query = "SELECT indexrelname, indisclustered, indisreplident FROM pg_stat_user_indexes NATURAL JOIN pg_index"
    with psycopg.connect(node.dsn) as connection:
        return sorted(connection.execute(query).fetchall())


def test_functions_that_need_a_search_path_are_named_with_the_statement_that_gives_it(
    node: Node, tmp_path: Path
) -> None:
    norm = (
        "CREATE OR REPLACE FUNCTION norm(t text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS"
        " $$BEGIN RETURN lower({}clean(t)); END$$"
    )
    execute(
        node.dsn,
        "CREATE FUNCTION clean(t text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT btrim(t)'",
        norm.format("public."),
        "CREATE TABLE person (name text)",
        "CREATE INDEX person_norm ON person (norm(name))",
        norm.format(""),
    )
    again = with_database(node, f"{DATABASE}_again")
    with watch_nodes([again]) as watch:
        run = DdlRun(again, dumped_ddl(node, tmp_path, watch), watch)
        run.before_rows()
        execute(again.dsn, "INSERT INTO person VALUES (' Ann ')")
        run.after_rows(make_ledger(again))
    ((entry, needed),) = run.helped
    assert (run.refusals, entry.label) == ({}, "INDEX public.person_norm")
    assert [one.function for one in needed] == ["public.norm(text)"]
    (warning,) = path_warnings([needed_path("s1", entry, needed)])
    assert warning.startswith(
        "node s1: INDEX public.person_norm uses functions that do not set search_path (public.norm("
    )
    rebuild = "REINDEX INDEX public.person_norm"
    with psycopg.connect(again.dsn, autocommit=True) as connection:
        if connection.info.server_version >= RESTRICTED_VERSION:
            with pytest.raises(psycopg.errors.UndefinedFunction):
                connection.execute(rebuild)
        connection.execute(warning.partition(" until you run: ")[2].encode())
        connection.execute(rebuild)
        connection.execute("ANALYZE person")


def test_a_view_whose_functions_need_a_search_path_is_named_with_the_statement_that_lets_it_be_refreshed(
    node: Node, tmp_path: Path
) -> None:
    execute(
        node.dsn,
        "CREATE SCHEMA app; CREATE TABLE app.orders (id int)",
        f"ALTER DATABASE {DATABASE} SET search_path = app, public",
        "CREATE FUNCTION app.order_count() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT count(*) FROM app.orders'",
        "CREATE VIEW app.counted AS SELECT app.order_count() AS n",
        "CREATE MATERIALIZED VIEW app.top AS SELECT n FROM app.counted",
        "SET search_path = app; CREATE OR REPLACE FUNCTION order_count() RETURNS bigint LANGUAGE sql STABLE"
        " AS 'SELECT count(*) FROM orders'",
    )
    again = with_database(node, f"{DATABASE}_again")
    with watch_nodes([again]) as watch:
        ddl = dumped_ddl(node, tmp_path, watch)
        run = DdlRun(again, ddl, watch)
        run.before_rows()
        run.after_rows(make_ledger(again))
        execute(again.dsn, "INSERT INTO app.orders VALUES (1)")
        refreshed = refresh_views(again, ddl, watch)
    assert (run.refusals, refreshed.problems) == ({}, [])
    with psycopg.connect(again.dsn, autocommit=True) as connection:
        if connection.info.server_version < RESTRICTED_VERSION:
            assert refreshed.helped == []
            return
        ((entry, needed),) = refreshed.helped
        (warning,) = path_warnings([needed_path("s1", entry, needed)])
        begins = "node s1: MATERIALIZED VIEW app.top uses functions that do not set search_path (app.order_count());"
        fails = "on PostgreSQL 17 and newer, REFRESH of it will fail"
        assert warning.startswith(f"{begins} {fails} until you run: ALTER FUNCTION app.")
        # Each schema once.
        assert warning.endswith('SET search_path = pg_catalog, "app", "public";')
        refresh = "REFRESH MATERIALIZED VIEW app.top"
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute(refresh)
        connection.execute(warning.partition(" until you run: ")[2].encode())
        connection.execute(refresh)
        assert connection.execute("SELECT n FROM app.top").fetchall() == [(1,)]
