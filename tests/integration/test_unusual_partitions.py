"""Partitioned tables that PostgreSQL itself treats specially come back, from 17 into 18 and into 17."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.left_out import LeftOutKind
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.load import LoadError
from cutline.restore.rows.refused_rows import OTHER_PARTITION
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, SOURCE = "set", "divided"
COLORS = tuple("abcdefghij")
# Key, type of its column, and the value for each color.
KEYS = {
    "enums": ("color[]", "ARRAY[c]"),
    "composites": ("painted", "(1, c)::painted"),
    "ranges": ("colors", "colors(c, c, '[]')"),
    "multiranges": ("multicolors", "multicolors(colors(c, c, '[]'))"),
    "domains": ("shade", "c::shade"),
    "arrays_of_domains": ("shade[]", "ARRAY[c::shade]"),
    "names": ("regtype", "CASE WHEN c < 'e' THEN 'painted' ELSE 'colors' END::regtype"),
}
STATEMENTS = (
    f"CREATE TYPE color AS ENUM ({', '.join(map(repr, COLORS))})",
    "CREATE TYPE painted AS (n int, c color)",
    "CREATE TYPE colors AS RANGE (subtype = color, multirange_type_name = multicolors)",
    "CREATE DOMAIN shade AS color",
    *(
        statement
        for name, (kind, value) in KEYS.items()
        for statement in (
            f"CREATE TABLE {name} (id int, k {kind}) PARTITION BY HASH (k)",
            *(
                f"CREATE TABLE {name}_{part} PARTITION OF {name} FOR VALUES WITH (MODULUS 4, REMAINDER {part})"
                for part in range(4)
            ),
            f"INSERT INTO {name} SELECT row_number() OVER (), {value} FROM unnest(enum_range(NULL::color)) AS c",
        )
    ),
    # Of one branch only, and twice in another.
    "CREATE TABLE tree (id int, c color) PARTITION BY RANGE (id)",
    "CREATE TABLE tree_plain PARTITION OF tree FOR VALUES FROM (0) TO (5)",
    "CREATE TABLE tree_hashed PARTITION OF tree FOR VALUES FROM (5) TO (10) PARTITION BY HASH (c)",
    "CREATE TABLE tree_hashed_0 PARTITION OF tree_hashed FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE tree_hashed_1 PARTITION OF tree_hashed FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    " PARTITION BY HASH (c)",
    "CREATE TABLE tree_hashed_1_0 PARTITION OF tree_hashed_1 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE tree_hashed_1_1 PARTITION OF tree_hashed_1 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "INSERT INTO tree SELECT row_number() OVER () - 1, c FROM unnest(enum_range(NULL::color)) AS c",
    "CREATE UNLOGGED TABLE dull (id int PRIMARY KEY, t text DEFAULT E'\nPARTITION BY LIST ') PARTITION BY RANGE (id)",
    "CREATE TABLE dull_1 PARTITION OF dull FOR VALUES FROM (0) TO (9)",
    "CREATE UNLOGGED TABLE quick (id int PRIMARY KEY, t text DEFAULT E'\nPARTITION BY LIST ')",
    "INSERT INTO dull VALUES (1)",
    "CREATE TABLE months (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    'CREATE TABLE "months A" PARTITION OF months FOR VALUES FROM (0) TO (9)',
    "CREATE TABLE months_b PARTITION OF months FOR VALUES FROM (9) TO (19)",
    "INSERT INTO months VALUES (1), (11)",
    """DO $$ DECLARE leaf regclass; BEGIN
         FOR leaf IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relispartition LOOP
           EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', leaf);
         END LOOP;
       END $$""",
)
TABLES = (*KEYS, "tree", "tree_plain", "tree_hashed", "dull", "months")


@dataclass(frozen=True, slots=True)
class Place:
    """A chain of a database on 17, and the server of 18."""

    runs: Runs
    newer: str

    def target(self, database: str, *, is_newer: bool) -> Fleet:
        (node,) = self.runs.fleet.nodes
        dsn = make_conninfo(self.newer if is_newer else node.dsn, dbname=database)
        return replace(self.runs.fleet, nodes=(replace(node, dsn=dsn),))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    folder = tmp_path_factory.mktemp("divided")
    with fleet_of(folder / "fleet", [require_server(17), require_server(18)], schema=False) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def place(embedded: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("of-divided")
    # pg_dump 18 itself leaves out what a server of 18 refuses.
    tools = f'[tools]\npostgresql = "{require_server(17).programs}"\n'
    with database_on(embedded, SOURCE, folder, more=tools) as fleet, dropping_slots(fleet):
        dsn = fleet.primaries[0].dsn
        execute(dsn, *STATEMENTS)
        interrupt_detach(dsn)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        execute(dsn, "INSERT INTO tree VALUES (9, 'a'), (4, 'b')", "DELETE FROM enums WHERE id < 3")
        runs.increment(NAME)
        yield Place(runs, embedded.primaries[1].dsn("postgres"))


def interrupt_detach(dsn: str) -> None:
    """Leave a partition in the middle of DETACH … CONCURRENTLY, which waits for another's transaction."""
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM months")
        with psycopg.connect(dsn, autocommit=True) as session:
            timer = threading.Timer(2.0, session.cancel)
            timer.start()
            with pytest.raises(psycopg.errors.QueryCanceled):
                session.execute('ALTER TABLE months DETACH PARTITION "months A" CONCURRENTLY')


def rows_of(fleet: Fleet) -> dict[str, list[Any]]:
    with psycopg.connect(fleet.primaries[0].dsn) as connection:
        return {
            table: connection.execute(f"SELECT t::text FROM {table} AS t ORDER BY 1".encode()).fetchall()
            for table in TABLES
        }


@pytest.mark.parametrize("is_newer", [False, True], ids=["17", "18"])
def test_rows_are_found_whatever_their_partition_depends_on(place: Place, is_newer: bool) -> None:  # noqa: FBT001
    expected = rows_of(place.runs.fleet)
    # It is restored attached, and every output says so.
    assert expected["months"] == [("(11)",)]
    expected["months"] = [("(1)",), ("(11)",)]
    target = place.target(f"{SOURCE}_back", is_newer=is_newer)
    try:
        place.runs.restore(NAME, target)
        assert rows_of(target) == expected
        with psycopg.connect(target.primaries[0].dsn) as connection:
            query = "SELECT relname, relpersistence::text FROM pg_class WHERE relname IN ('dull', 'quick') ORDER BY 1"
            assert connection.execute(query).fetchall() == [("dull", "p" if is_newer else "u"), ("quick", "u")]
            # The plain branch has its own rows only, and each value is found by its key.
            for color in COLORS:
                query = f"SELECT count(*) FROM tree WHERE c = '{color}'"
                assert connection.execute(query.encode()).fetchone() == (1 + (color in "ab"),)
    finally:
        execute(with_database(target.primaries[0], "postgres").dsn, f"DROP DATABASE IF EXISTS {SOURCE}_back")


def test_a_partition_whose_detachment_was_interrupted_is_named_with_the_statement_that_finishes_it(
    place: Place,
) -> None:
    commit = place.runs.increment(NAME)
    (out,) = [out for out in commit.left_out if out.kind == LeftOutKind.PENDING_DETACH]
    assert out.name == "public.months A"
    statement = out.why.partition("To finish it: ")[2]
    assert statement == 'ALTER TABLE public.months DETACH PARTITION public."months A" FINALIZE;'
    execute(place.runs.fleet.primaries[0].dsn, statement)
    commit = place.runs.increment(NAME)
    assert not [out for out in commit.left_out if out.kind == LeftOutKind.PENDING_DETACH]


def test_a_row_that_belongs_to_another_partition_there_has_its_own_hint(place: Place) -> None:
    target = place.target(f"{SOURCE}_other", is_newer=False)
    place.runs.restore(NAME, target, scope=RestoreScope(schema_only=True))
    execute(
        target.primaries[0].dsn,
        "ALTER TABLE months DETACH PARTITION months_b",
        "ALTER TABLE months ATTACH PARTITION months_b FOR VALUES FROM (9) TO (10)",
    )
    request = RestoreRequest(NAME, scope=RestoreScope(data_only=True))
    with pytest.raises(LoadError, match="violates partition constraint") as raised:
        restore_fleet(plan_restore(place.runs.fleet, target, request), place.runs.spark, Silent())
    assert raised.value.hint.splitlines()[0] == OTHER_PARTITION
