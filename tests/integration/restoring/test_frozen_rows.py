"""Rows of a table that one object has alone are stored frozen, so VACUUM need not visit it; --analyze visits all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 20_000
TABLES = f"""
CREATE TABLE alone (id int PRIMARY KEY, body text NOT NULL);
CREATE TABLE changed (LIKE alone INCLUDING ALL);
CREATE TABLE without_key (id int, body text);
CREATE TABLE small (LIKE alone INCLUDING ALL);
INSERT INTO alone SELECT i, md5(i::text) FROM generate_series(1, {ROWS}) AS i;
INSERT INTO changed TABLE alone;
INSERT INTO without_key TABLE alone;
INSERT INTO small VALUES (1, 'few');
CREATE FUNCTION fails(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
  IF i = 1 AND pg_backend_pid() <> 0 AND current_query() ^@ 'ANALYZE' THEN RAISE 'not now'; END IF; RETURN i; END $$;
CREATE TABLE odd (id int PRIMARY KEY);
CREATE INDEX ON odd (fails(id));
INSERT INTO odd VALUES (1), (2);
ALTER TABLE without_key REPLICA IDENTITY FULL
"""
ENDING = """
CREATE FUNCTION ends(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
  IF current_query() ^@ 'ANALYZE' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN i; END $$;
CREATE TABLE odd (id int PRIMARY KEY);
CREATE INDEX ON odd (ends(id));
INSERT INTO odd VALUES (1), (2)
"""
# PostgreSQL leaves some pages between its batches.
FROZEN_QUERY = "SELECT relallvisible > relpages / 2 FROM pg_class WHERE oid = %s::regclass AND relpages > 0"
ANALYZED_QUERY = "SELECT count(*) FROM pg_stat_user_tables WHERE last_analyze IS NOT NULL"


class Noted(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_only_tables_that_one_task_loads_alone_are_frozen(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with own_database(shared_fleet, tmp_path, "frozen") as fleet:
        runs, target = Runs(fleet, Ready(spark)), restore_target(fleet)
        (source,), (back,) = ([node.dsn for node in one.nodes] for one in (fleet, target))
        execute(source, TABLES)
        runs.init()
        runs.full("chain")
        execute(source, "UPDATE changed SET body = 'new' WHERE id = 7; INSERT INTO without_key VALUES (0, 'new')")
        runs.increment("chain")
        plan = plan_restore(fleet, target, RestoreRequest("chain", scope=RestoreScope(analyze=True)))
        noted = Noted()
        restore_fleet(plan, runs.spark, noted)
        assert [note for note in noted.notes if "odd" in note] == ["node s1: public.odd: not now"]
        assert sorted_copies(back) == sorted_copies(source)
        with psycopg.connect(back, autocommit=True) as connection:
            assert connection.execute(ANALYZED_QUERY).fetchone() == (4,)
            found = {
                name: connection.execute(FROZEN_QUERY, (name,)).fetchone()
                for name in ("alone", "changed", "without_key", "small")
            }
        assert found == {"alone": (True,), "changed": (False,), "without_key": (False,), "small": (False,)}


def test_a_session_that_is_lost_while_tables_are_analyzed_is_a_node_that_is_away(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with own_database(shared_fleet, tmp_path, "analyzed") as fleet:
        runs, target = Runs(fleet, Ready(spark)), restore_target(fleet)
        execute(fleet.primaries[0].dsn, ENDING)
        runs.init()
        runs.full("chain")
        with pytest.raises(NodeUnreachableError, match="node s1: "):
            runs.restore("chain", target, scope=RestoreScope(analyze=True))
