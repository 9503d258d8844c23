"""Generated columns whose functions read rows have the values of the source, whatever is loaded first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.spark.driver_session import DriverSession
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.integration.restoring.second_database import SecondDatabase, second_database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "computes", "computes_again"
ITEMS = 2000
# Tables are loaded from the largest to the smallest. Each function returns NULL while the rows that it reads are
# missing; one has a SQL body, one needs the search_path of its owner, and one reads rows of the same table.
STATEMENTS = (
    "CREATE TABLE country (code text PRIMARY KEY, name text)",
    "INSERT INTO country VALUES ('DE', 'Germany'), ('CH', 'Switzerland')",
    "CREATE FUNCTION name_of(c text) RETURNS text LANGUAGE sql IMMUTABLE"
    " RETURN (SELECT name FROM public.country WHERE code = c)",
    "CREATE FUNCTION shown(c text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN upper(name_of(c)); END'",
    "CREATE TABLE bank (id int PRIMARY KEY, cc text, country varchar(40) GENERATED ALWAYS AS (name_of(cc)) STORED)",
    "INSERT INTO bank SELECT g, CASE g % 2 WHEN 0 THEN 'DE' ELSE 'CH' END FROM generate_series(1, 200) g",
    # It reads what is itself computed from other rows.
    "CREATE FUNCTION country_of(b int) RETURNS text LANGUAGE plpgsql IMMUTABLE AS"
    " 'BEGIN RETURN (SELECT country FROM bank WHERE id = b); END'",
    'CREATE TABLE item (id int PRIMARY KEY, "at bank" int, cc text, pad text,'
    ' country text GENERATED ALWAYS AS (country_of("at bank")) STORED,'
    " loud text GENERATED ALWAYS AS (shown(cc)) STORED,"
    " plain text GENERATED ALWAYS AS (cc || '!') STORED)",
    f"INSERT INTO item SELECT g, g % 200 + 1, 'DE', repeat('x', 100) FROM generate_series(1, {ITEMS}) g",
    "CREATE TABLE part (id int PRIMARY KEY, above int)",
    "CREATE FUNCTION path_of(p int) RETURNS text LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN NULL; END'",
    "ALTER TABLE part ADD path text GENERATED ALWAYS AS (coalesce(path_of(above) || '/', '') || id) STORED",
    "CREATE OR REPLACE FUNCTION path_of(p int) RETURNS text LANGUAGE plpgsql IMMUTABLE AS"
    " 'BEGIN RETURN (SELECT path FROM public.part WHERE id = p); END'",
    *(f"INSERT INTO part VALUES ({g}, {g // 2 or 'NULL'})" for g in range(1, 9)),
)
ROWS_QUERY = """
SELECT (SELECT array_agg((id, country)::text ORDER BY id) FROM bank),
       (SELECT array_agg((id, country, loud, plain)::text ORDER BY id) FROM item),
       (SELECT array_agg((id, path)::text ORDER BY id) FROM part)
"""
# No UPDATE can compute these again.
UNSETTABLE = (
    "CREATE FUNCTION countries() RETURNS bigint LANGUAGE sql IMMUTABLE"
    " AS 'SELECT nullif(count(*), 0) FROM public.country'",
    "CREATE TABLE counted (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, pad text,"
    " n bigint GENERATED ALWAYS AS (countries()) STORED)",
    f"INSERT INTO counted (pad) SELECT repeat('x', 500) FROM generate_series(1, {ITEMS}) g",
)


def rows_of(dsn: str) -> tuple[Any, ...]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(ROWS_QUERY).fetchone() or ()


@pytest.fixture
def place(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[SecondDatabase]:
    session: Any = DriverSession(lambda: spark, 2)
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet, dropping_slots(fleet):
        execute(fleet.primaries[0].dsn, *STATEMENTS)
        runs = Runs(fleet, Ready(session))
        runs.init()
        runs.full("snp")
        with second_database(fleet, TARGET, tmp_path, session) as place:
            yield place


def test_generated_columns_are_computed_again_once_all_rows_are_there(place: SecondDatabase) -> None:
    source = rows_of(place.fleet.primaries[0].dsn)
    assert "(8,1/2/4/8)" in source[2]
    code, done = place.run("restore")
    assert code == 0, done
    assert rows_of(place.dsn) == source


def test_columns_of_existing_tables_are_named_with_the_statement_that_computes_them(place: SecondDatabase) -> None:
    code, done = place.run("restore", "--schema-only")
    assert code == 0, done
    code, done = place.run("restore", "--data-only")
    assert code == 0, done
    found = [line for line in done["warnings"] if "generated column" in line]
    assert any("column country of public.bank: 200 values differ" in line for line in found), found
    # Its values are those of the wrong ones that it reads.
    assert any("column country of public.item may have been computed from such values" in line for line in found)
    assert not any("plain" in line for line in found)
    statements = [one for line in found for one in re.findall("UPDATE .*", line)]
    assert len(statements) == len(found) == 4
    for _ in range(4):
        execute(place.dsn, *statements)
    assert rows_of(place.dsn) == rows_of(place.fleet.primaries[0].dsn)


def test_a_column_that_no_update_computes_is_named(place: SecondDatabase) -> None:
    execute(place.fleet.primaries[0].dsn, *UNSETTABLE)
    Runs(place.fleet, Ready(place.spark)).increment("snp")
    code, done = place.run("restore")
    assert code == 0, done
    line, *others = (line for line in done["warnings"] if "were computed again" not in line)
    assert f"node s1: generated column n of public.counted: {ITEMS} values differ" in line
    assert "UPDATE" not in line
    # Any of the others might have read it.
    assert len(others) == 4
    assert all("may have been computed from such values" in other for other in others), others
    assert rows_of(place.dsn) == rows_of(place.fleet.primaries[0].dsn)
