"""`check --restorable` builds every row that a restore would load, wherever the fold of the changes has left it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.snapshots.fold import limits
from cutline.spark.driver_session import DriverSession
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.own_database import own_database
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def reader(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, where: str) -> SparkSession:
    """Return the session of a check whose command reads all rows, or folds the changes, or leaves both to Spark."""
    if where == "command":
        return cast("SparkSession", DriverSession(not_started, 2))
    monkeypatch.setattr(limits, "CHANGES_MAX", limits.CHANGES_MAX if where == "driver" else 0)
    return spark


def not_started() -> SparkSession:
    raise AssertionError("few rows need no Spark")


FIRST = (
    "CREATE TABLE item (id int PRIMARY KEY, n int, v text)",
    "ALTER TABLE item ALTER v SET STORAGE EXTERNAL",
    "INSERT INTO item SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 40) AS i",
    "CREATE TABLE line (at int, what text)",
    "ALTER TABLE line REPLICA IDENTITY FULL",
    "INSERT INTO line SELECT i, 'line' FROM generate_series(1, 20) AS i",
)
# 40 - 2 + 5 items, of which one keeps a value that its update left out, and 20 - 1 + 2 lines.
THEN = (
    "UPDATE item SET n = 1 WHERE id = 7",
    "DELETE FROM item WHERE id IN (1, 2)",
    "INSERT INTO item SELECT i, 0, 'new' FROM generate_series(41, 45) AS i",
    "DELETE FROM line WHERE at = 3",
    "INSERT INTO line VALUES (50, 'more'), (50, 'more')",
)
ROWS = 40 - 2 + 5 + 20 - 1 + 2


@pytest.mark.parametrize("where", ["command", "driver", "jobs"])
def test_rows_that_increments_changed_are_built(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with own_database(shared_fleet, tmp_path, "restorable") as fleet:
        runs = Runs(fleet, Ready(spark))
        execute(fleet.nodes[0].dsn, *FIRST)
        # Only a superuser may give a database settings that the server does not know: an application's own.
        setting = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET app.tenant = 7', current_database()); END $$"
        execute(fleet.nodes[0].dsn, setting)
        runs.init()
        runs.full("small")
        execute(fleet.nodes[0].dsn, *THEN)
        runs.increment("small")
        session = reader(spark, monkeypatch, where)
        _, document = run_here(fleet, "check", "small", "--restorable", spark=session)
        assert document["snapshots"][0]["conflicts"] == []
        assert document["restorable"]["rows"] == {fleet.nodes[0].id: ROWS}
        assert document["restorable"]["ddl"] == "run"


CONSTRAINED = (
    "CREATE TYPE mood AS ENUM ('sad', 'happy')",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    "CREATE TABLE branch (id int PRIMARY KEY, code text UNIQUE, boss int REFERENCES branch, mood mood CHECK (id > 0))",
    "CREATE TABLE parts (id bigint, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)",
    "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')",
    "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM ('2026-02-01') TO (MAXVALUE)",
    "CREATE TABLE child (id int PRIMARY KEY, of varchar(9) REFERENCES branch (code), part_at date, part_id int,"
    " n positive, CONSTRAINT part_fkey FOREIGN KEY (part_at, part_id) REFERENCES parts (at, id))",
    "CREATE TABLE heir (own text UNIQUE) INHERITS (branch)",
    "ALTER TABLE heir REPLICA IDENTITY FULL",
    # NULLs are not equal, and refer to nothing.
    "INSERT INTO branch SELECT i, CASE WHEN i < 9 THEN E'c\\t' || i END, nullif(i / 2, 0)"
    " FROM generate_series(1, 12) AS i",
    "INSERT INTO parts SELECT i, date '2026-01-29' + i FROM generate_series(1, 6) i",
    "INSERT INTO child SELECT i, E'c\\t' || i, date '2026-01-29' + i, i, i FROM generate_series(1, 6) i",
    "INSERT INTO child VALUES (7, NULL, NULL, 99, NULL)",
    # A table's keys say nothing about those of its heirs.
    "INSERT INTO heir VALUES (1, E'c\\t1', 77, 'sad', 'own')",
)
CHANGED = (
    "UPDATE branch SET code = 'moved' WHERE id = 8",
    "INSERT INTO branch VALUES (20, E'c\\t8', 8)",
    "UPDATE child SET of = 'moved' WHERE id = 2",
    "DELETE FROM child WHERE id = 3",
    "DELETE FROM parts WHERE id = 3",
)
# What no trigger keeps from happening, such as that of a foreign key.
UNGUARDED = ("SET session_replication_role = replica", "DELETE FROM branch WHERE id = 8")


@pytest.mark.parametrize("where", ["command", "driver", "jobs"])
def test_constraints_are_evaluated_over_the_rows_at_the_cut(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with own_database(shared_fleet, tmp_path, "constrained") as fleet:
        runs, node = Runs(fleet, Ready(spark)), fleet.nodes[0]
        execute(node.dsn, *CONSTRAINED)
        runs.init()
        runs.full("small")
        execute(node.dsn, *CHANGED)
        runs.increment("small")
        session = reader(spark, monkeypatch, where)
        _, document = run_here(fleet, "check", "small", "--restorable", spark=session)
        assert document["snapshots"][0]["conflicts"] == []
        # Keys of branch, child and two partitions; two other unique keys; three references; two bounds; two checks, of
        # which the heir has one, too; and the domain's.
        assert document["restorable"]["other_constraints"] == 0
        assert document["restorable"]["constraints"] >= 4 + 2 + 3 + 2 + 2
        execute(node.dsn, *UNGUARDED)
        runs.increment("small")
        _, document = run_here(fleet, "check", "small", "--restorable", spark=reader(spark, monkeypatch, where))
        found = [(one["kind"], one["group"], one["detail"]) for one in document["snapshots"][0]["conflicts"]]
        details = {table: detail for kind, table, detail in found if kind == "restore"}
        assert details.keys() == {"public.branch", "public.child"}
        boss = "branch_boss_fkey (boss) that are not in public.branch (id): 1, for example 8"
        code = "child_of_fkey (of) that are not in public.branch (code): 1, for example moved"
        assert (boss in details["public.branch"], code in details["public.child"]) == (True, True), details


EXTENDED = (
    "CREATE EXTENSION citext",
    'CREATE SCHEMA "Sales"',
    "CREATE DOMAIN \"Sales\".email AS citext CHECK (VALUE ~ '@')",
    'CREATE TABLE "Sales".customer (id int PRIMARY KEY, email "Sales".email)',
    """INSERT INTO "Sales".customer VALUES (1, 'Ann@example.com')""",
    "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = \"Sales\", public', current_database()); END $$",
)


def test_ddl_that_needs_an_extension_is_run(tmp_path: Path, spark: SparkSession) -> None:
    """The role that runs the DDL does not create extensions: a superuser has done so before."""
    server = require_server(16)
    with fleet_of(tmp_path / "fleet", [server]) as servers:
        (node,) = servers.primaries
        execute(node.dsn(), *EXTENDED)
        drill = f'[drill]\npostgresql = "{server.programs}"\n'
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=drill)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full("small")
        _, document = run_here(fleet, "check", "small", "--restorable", spark=spark)
    assert (document["restorable"]["ddl"], document["restorable"]["ddl_detail"]) == ("run", None)
    assert document["snapshots"][0]["conflicts"] == []
