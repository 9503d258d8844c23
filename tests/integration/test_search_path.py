"""Rows that only functions of their own admit come back: those name what they need without a schema.

pg_dump's own script can't load such rows; what is restored is compared with PostgreSQL's COPY of the source.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.own_database import back, own_database
from tests.integration.refusing import execute
from tests.snapshot_runs import Ready, Runs, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embedded.fleet import EmbeddedFleet

NAME, DATABASE = "found", "pathed"
# What a superuser's session finds by itself, and what it finds because the database says so.
SCHEMAS = {"public": "", '"Né\nw"': f'ALTER DATABASE {DATABASE} SET search_path = "$user", "Né\nw", public'}
MADE = (
    "CREATE SCHEMA IF NOT EXISTS {0}",
    "SET search_path = {0}; CREATE FUNCTION plain(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT lower($1)'",
    "CREATE FUNCTION {0}.named(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN plain($1); END'",
    "CREATE DOMAIN {0}.small AS text CHECK ({0}.named(VALUE) = VALUE)",
    "CREATE TABLE {0}.t (id int PRIMARY KEY, v {0}.small, w text CHECK ({0}.named(w) <> 'never'),"
    " g text GENERATED ALWAYS AS ({0}.named(w)) STORED)",
    "INSERT INTO {0}.t VALUES (1, 'one', 'One'), (2, 'two', 'Two'), (3, NULL, NULL)",
)
CHANGES = ("UPDATE {0}.t SET w = 'New' WHERE id = 2", "INSERT INTO {0}.t VALUES (4, 'four', 'Four')")


@pytest.mark.parametrize("schema", SCHEMAS, ids=["usual", "set"])
def test_rows_whose_functions_look_by_the_search_path_come_back(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, schema: str
) -> None:
    with own_database(shared_fleet, tmp_path, DATABASE) as fleet:
        (source,) = (node.dsn for node in fleet.nodes)
        runs = Runs(fleet, Ready(spark))
        if SCHEMAS[schema]:
            execute(source, SCHEMAS[schema])
        execute(source, *(statement.format(schema) for statement in MADE))
        runs.init()
        runs.full(NAME)
        states = [sorted_copies(source)]
        execute(source, *(statement.format(schema) for statement in CHANGES))
        runs.increment(NAME)
        states.append(sorted_copies(source))
        for number, expected in enumerate(states):
            runs.restore(NAME, back(fleet), number)
            assert sorted_copies(back(fleet).nodes[0].dsn) == expected
