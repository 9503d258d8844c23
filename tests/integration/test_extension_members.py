"""Objects that belong to extensions or to sessions are not in the DDL, and no check or restore misses them there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "members"
# Every server has plpgsql.
SCHEMA = (
    "CREATE TABLE item (id int PRIMARY KEY, name text)",
    "INSERT INTO item VALUES (1, 'one')",
    "CREATE SEQUENCE of_extension",
    "CREATE SEQUENCE own START 5",
    "ALTER EXTENSION plpgsql ADD SEQUENCE of_extension",
    'CREATE COLLATION of_extension FROM "C"',
    "ALTER EXTENSION plpgsql ADD COLLATION of_extension",
    'CREATE COLLATION own FROM "C"',
)
# pg_dump dumps the cast.
OF_SESSION = (
    'CREATE COLLATION pg_temp.of_session FROM "C"',
    "CREATE TYPE pg_temp.of_session AS (a int)",
    "CREATE FUNCTION pg_temp.of_session(pg_temp.of_session) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE CAST (pg_temp.of_session AS int) WITH FUNCTION pg_temp.of_session(pg_temp.of_session)",
    "COMMENT ON CAST (pg_temp.of_session AS int) IS 'of the session, too'",
)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, NAME) as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def test_what_extensions_and_sessions_create_is_not_expected_in_the_ddl(runs: Runs) -> None:
    (node,) = runs.fleet.nodes
    with psycopg.connect(node.dsn, autocommit=True) as session:
        for statement in OF_SESSION:
            session.execute(statement.encode())
        runs.full("daily")
    report = runs.check_one("daily")
    assert report.conflicts == []
    chain = read_chain(runs.fleet.store.open(), "daily")
    assert {one.name: one.is_of_extension for one in chain.sequences(node.id)} == {"of_extension": True, "own": False}
    facts = chain.database_facts(node.id)
    assert facts is not None
    assert [one.name for one in facts.collations] == ["own"]
    target = restore_target(runs.fleet)
    runs.restore("daily", target)
    with psycopg.connect(target.nodes[0].dsn) as connection:
        assert connection.execute("SELECT last_value, is_called FROM own").fetchall() == [(5, False)]
        assert connection.execute("SELECT count(*) FROM item").fetchall() == [(1,)]
