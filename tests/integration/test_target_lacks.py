"""If the target's server lacks something that a snapshot needs, it is named, and nothing of the restore stays there.

The source is a database on the shared fleet's first server, the target one on its second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.nodes.connections import with_database
from fleet.programs.wheel import run_tool
from restore.ddl.ddl import SchemaLoadError
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "lacking"
# PostgreSQL lets superusers create tablespaces within the data directory.
TABLESPACE = ("SET allow_in_place_tablespaces = on", "CREATE TABLESPACE \"fast 'disks'\" LOCATION ''")
SCHEMA = (
    "CREATE TABLE placed (id int PRIMARY KEY USING INDEX TABLESPACE \"fast 'disks'\", v text)"
    " TABLESPACE \"fast 'disks'\"",
    "CREATE INDEX placed_v ON placed (v) TABLESPACE \"fast 'disks'\"",
    "CREATE TABLE spread (id int PRIMARY KEY) PARTITION BY LIST (id) TABLESPACE \"fast 'disks'\"",
    "CREATE TABLE spread_1 PARTITION OF spread FOR VALUES IN (1)",
    "CREATE TABLE elsewhere (id int PRIMARY KEY)",
    "CREATE MATERIALIZED VIEW summed TABLESPACE \"fast 'disks'\" AS SELECT 1 AS n",
    "INSERT INTO placed VALUES (1, 'a'), (2, 'b')",
    "INSERT INTO spread VALUES (1)",
)
# The row that SECURITY LABEL would write; the command itself needs a label provider, which is a loaded module.
LABEL = """
INSERT INTO pg_seclabel (objoid, classoid, objsubid, provider, label)
SELECT 'elsewhere'::regclass, 'pg_class'::regclass, 0, 'guard', 'secret'
"""
DDL = ("--schema-only", "--no-publications", "--restrict-key=same")


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    servers = [primary.dsn("postgres") for primary in shared_fleet.primaries]
    try:
        execute(servers[0], *TABLESPACE)
        with own_database(shared_fleet, tmp_path, "lacking") as fleet:
            execute(fleet.nodes[0].dsn, *SCHEMA)
            found = Runs(fleet, Ready(spark))
            found.init()
            yield found
    finally:
        for server in servers:
            with psycopg.connect(server) as connection:
                names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'lacking'").fetchall()
            execute(server, *(f'DROP DATABASE "{name}" WITH (FORCE)' for (name,) in names))
            execute(server, "DROP TABLESPACE IF EXISTS \"fast 'disks'\"")


def test_tablespaces_and_security_labels_come_back_where_the_target_has_them(
    runs: Runs, shared_fleet: EmbeddedFleet
) -> None:
    (source,) = runs.fleet.nodes
    server = shared_fleet.primaries[1].dsn("postgres")
    target = replace(runs.fleet, nodes=(replace(source, dsn=shared_fleet.primaries[1].dsn("lacking_back")),))
    runs.full(NAME)
    execute(source.dsn, "INSERT INTO placed VALUES (3, 'c')", LABEL)
    runs.increment(NAME)

    assert_refused(runs, target, 0, "Tablespace \"fast 'disks'\" does not exist")
    execute(server, *TABLESPACE)
    runs.restore(NAME, target, 0)
    assert sorted_copies(target.nodes[0].dsn)["public.placed"] == b"1\ta\n2\tb\n"
    labelled = (' at SECURITY LABEL public.TABLE "elsewhere": ', ": SECURITY LABEL FOR ")
    assert_refused(runs, target, 1, 'security label provider "guard" is not loaded', *labelled)

    execute(source.dsn, "DELETE FROM pg_seclabel")
    runs.increment(NAME)
    runs.restore(NAME, target)
    restored = target.nodes[0].dsn
    assert sorted_copies(restored) == sorted_copies(source.dsn)
    assert run_tool("pg_dump", *DDL, restored).stdout == run_tool("pg_dump", *DDL, source.dsn).stdout


def assert_refused(runs: Runs, target: Fleet, increment: int, *said: str) -> None:
    """The restore is refused, with the server's reason and, where pg_restore tells, with object and statement."""
    before = databases(target)
    with pytest.raises(SchemaLoadError) as raised:
        runs.restore(NAME, target, increment)
    assert raised.value.message.startswith("node s1: the ")
    assert [text for text in said if text not in raised.value.message] == []
    assert databases(target) == before


def databases(fleet: Fleet) -> set[str]:
    with psycopg.connect(with_database(fleet.nodes[0], "postgres").dsn) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
