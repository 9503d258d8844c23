"""Where a dump and restore with pg_dump does not reproduce a database exactly, Cutline differs in the same way.

The same database is restored twice, with pg_dump and psql and with Cutline, and the two copies are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "dumped"
DUMP = ("--no-publications", "--restrict-key=same")
FIRST = (
    "CREATE TABLE whole (id int PRIMARY KEY, v text) PARTITION BY LIST (id)",
    "CREATE TABLE a_part PARTITION OF whole FOR VALUES IN (1, 2)",
    "CREATE TABLE other_part PARTITION OF whole FOR VALUES IN (3)",
    "CREATE TABLE parent (id int PRIMARY KEY, inherited text)",
    "CREATE TABLE heir (own text DEFAULT 'own', PRIMARY KEY (id)) INHERITS (parent)",
    "INSERT INTO whole VALUES (1, 'a'), (2, 'b'), (3, 'c')",
    "INSERT INTO heir VALUES (1, 'i', 'before'), (2, 'i', 'also before'), (3, NULL, NULL)",
    "CREATE TABLE place (id int PRIMARY KEY)",
    "CREATE TABLE measured (id int PRIMARY KEY, place int REFERENCES place) PARTITION BY RANGE (id)",
    "CREATE TABLE measured_1 PARTITION OF measured FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE measured_2 PARTITION OF measured FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE child (id int PRIMARY KEY, place int REFERENCES place, v text)",
    "INSERT INTO place VALUES (1), (2)",
    "INSERT INTO measured VALUES (1, 1), (11, 2)",
    "INSERT INTO child VALUES (1, 1, 'one'), (2, 2, 'two')",
    # It is left out with its foreign key if only some tables are restored.
    "COMMENT ON CONSTRAINT child_place_fkey ON child IS 'a comment'",
)
THEN = (
    # It keeps the constraint name that it inherited, and comes before its former parent in a dump.
    "ALTER TABLE whole DETACH PARTITION a_part",
    "UPDATE a_part SET v = 'alone' WHERE id = 1",
    # In the child table the new column follows the child's own columns; a dump puts it before them.
    "ALTER TABLE parent ADD later text DEFAULT 'for all rows'",
    "UPDATE heir SET later = 'now' WHERE id = 2",
    "INSERT INTO heir (id, inherited, own, later) VALUES (4, 'i', 'after', 'l')",
    "UPDATE measured SET place = 1 WHERE id = 11",
    "INSERT INTO child VALUES (3, NULL, 'three')",
)
COLUMNS = """
SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'heir'::regclass AND attnum > 0
"""
HEIRS = "SELECT id, inherited, later, own FROM heir ORDER BY 1"
NAMES = "SELECT conrelid::regclass::text, conname FROM pg_constraint WHERE contype = 'n' ORDER BY 1, 2"


def test_a_restore_differs_from_the_source_only_as_a_pg_dump_does(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with own_database(shared_fleet, tmp_path, "as_dump") as fleet:
        (source,) = fleet.nodes
        runs = Runs(fleet, Ready(spark))
        execute(source.dsn, *FIRST)
        runs.init()
        runs.full(NAME)
        execute(source.dsn, *THEN)
        runs.increment(NAME)
        runs.restore(NAME, restore_target(fleet))
        ours, theirs = restore_target(fleet).nodes[0].dsn, with_database(source, "as_dump_by_pg_dump").dsn
        execute(with_database(source, "postgres").dsn, "CREATE DATABASE as_dump_by_pg_dump TEMPLATE template0")
        run_tool("pg_dump", *DUMP, f"--file={tmp_path / 'script'}", source.dsn)
        run_tool("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={tmp_path / 'script'}", theirs)

        assert sorted_copies(ours) == sorted_copies(theirs)
        # Rows have no order.
        of_both = (run_tool("pg_dump", "--schema-only", *DUMP, one).stdout for one in (ours, theirs))
        assert next(of_both) == next(of_both)
        # By column name the rows equal the source's. The differences are those that the documentation lists.
        assert rows(ours, HEIRS) == rows(source.dsn, HEIRS)
        assert rows(source.dsn, COLUMNS) == [("id inherited own later",)]
        assert rows(ours, COLUMNS) == [("id inherited later own",)]
        assert ("whole", "whole_id_not_null") in rows(source.dsn, NAMES)
        assert ("whole", "whole_id_not_null1") in rows(ours, NAMES)
        assert ("a_part", "whole_id_not_null") in rows(ours, NAMES)
        assert_selected_tables_are_restored_alone(runs, source.dsn)


def assert_selected_tables_are_restored_alone(runs: Runs, source: str) -> None:
    """Restore some tables of the snapshot, without the tables that they reference."""
    target = restore_target(runs.fleet)
    report = runs.restore(NAME, target, groups=("public.measured*", "public.child"))
    assert sorted(report.left_out) == [
        'foreign key "child_place_fkey" of "public"."child" on s1',
        'foreign key "measured_place_fkey" of "public"."measured" on s1',
        "rows of 5 other tables on s1: public.a_part, public.heir, public.other_part, public.parent, public.place",
    ]
    expected = sorted_copies(source)
    for table, text in sorted_copies(target.nodes[0].dsn).items():
        rows_expected = expected[table] if table.startswith(("public.measured_", "public.child")) else b""
        assert text == rows_expected, table
    assert expected["public.child"]


def rows(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()
