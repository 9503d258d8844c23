"""A store that an earlier version of Cutline wrote, with its DDL as scripts, is checked and restored as before.

old_store/store.tar.xz was written by the last commit that stored scripts. FIRST and THEN say what its snapshot and its
increment contain.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.nodes.connections import with_database
from fleet.programs.wheel import run_tool
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_shard import database_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STORE = Path(__file__).parent / "old_store" / "store.tar.xz"
FIRST = r"""
ALTER DATABASE old SET search_path = "Odd ""place", public;
CREATE SCHEMA "Odd ""place";
CREATE TABLE place (id bigint PRIMARY KEY, note text DEFAULT 'it''s; --');
CREATE TABLE child (id int PRIMARY KEY, place bigint REFERENCES place);
CREATE TABLE parent (c int, id int PRIMARY KEY);
CREATE TABLE heir (CONSTRAINT "Name; 'of" NOT NULL c, PRIMARY KEY (id)) INHERITS (parent);
CREATE TABLE numbered (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
ALTER SEQUENCE numbered_id_seq AS bigint MAXVALUE 9000000000;
CREATE FUNCTION atomic(a int) RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT CASE WHEN a > 1 THEN 1 ELSE 2 END; END;
CREATE FUNCTION quoted() RETURNS text LANGUAGE plpgsql AS $f$ BEGIN RETURN 'a;'; /* ; */ END $f$;
CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'it fired'; END $$;
CREATE INDEX one ON place (note);
CREATE INDEX two ON place (note, id);
COMMENT ON INDEX one IS E'\nALTER TABLE ONLY "public"."child"\n    ADD CONSTRAINT "x" FOREIGN KEY ';
COMMENT ON INDEX two IS ';DROP TABLE child;--';
CREATE MATERIALIZED VIEW summed AS SELECT count(*) AS n FROM place;
CREATE FUNCTION saw() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';
CREATE EVENT TRIGGER seen ON ddl_command_end EXECUTE FUNCTION saw();
INSERT INTO place SELECT n, 'p' || n FROM generate_series(1, 5) AS n;
INSERT INTO child VALUES (1, 1), (2, 5);
INSERT INTO heir VALUES (1, 1);
INSERT INTO numbered DEFAULT VALUES;
CREATE TRIGGER stops BEFORE UPDATE ON child FOR EACH ROW EXECUTE FUNCTION stop();
"""
THEN = """
CREATE TABLE "Odd ""place".later (id int PRIMARY KEY);
INSERT INTO "Odd ""place".later VALUES (7);
DELETE FROM child WHERE id = 2;
COMMENT ON CONSTRAINT child_place_fkey ON child IS 'a comment';
"""
DUMP = ("--schema-only", "--no-publications", "--restrict-key=same")
# pg_dump does not write it.
TYPE = "SELECT format('%s %s', seqtypid::regtype, seqmax) FROM pg_sequence"


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with tarfile.open(STORE) as tar:
        # The archive is our own; Python 3.11 has filters only from 3.11.4 on.
        for member in tar.getmembers():
            tar.extract(member, tmp_path)
    with database_on(shared_fleet, "old", tmp_path) as fleet:
        yield Runs(replace(fleet, nodes=fleet.primaries), Ready(spark))


@pytest.mark.parametrize(("increment", "statements"), [(0, FIRST), (1, FIRST + THEN)])
def test_scripts_of_an_earlier_version_are_restored(runs: Runs, increment: int, statements: str) -> None:
    (report,) = runs.check("old").snapshots
    assert (report.conflicts, report.compared.objects > 0) == ([], True)
    source, back = runs.fleet.nodes[0].dsn, with_database(runs.fleet.nodes[0], "old_back")
    with psycopg.connect(source) as connection:
        connection.execute(statements.encode())
    runs.restore("old", replace(runs.fleet, nodes=(back,)), increment)
    assert sorted_copies(back.dsn) == sorted_copies(source)
    assert run_tool("pg_dump", *DUMP, back.dsn).stdout == run_tool("pg_dump", *DUMP, source).stdout
    with psycopg.connect(back.dsn) as connection:
        assert connection.execute(TYPE).fetchall() == [("bigint 9000000000",)]
        assert connection.execute("SELECT n FROM public.summed").fetchall() == [(5,)]


OTHERS = ["public.heir", "public.numbered", "public.parent", "public.place"]
# Made after the full snapshot.
LATER = ['"Odd ""place".later']


@pytest.mark.parametrize(("increment", "rows"), [(0, b"1\t1\n2\t5\n"), (1, b"1\t1\n")])
def test_some_tables_of_an_earlier_version_are_restored(runs: Runs, increment: int, rows: bytes) -> None:
    back = with_database(runs.fleet.nodes[0], "old_back")
    report = runs.restore("old", replace(runs.fleet, nodes=(back,)), increment, groups=("public.child",))
    assert report.left_out == [
        'foreign key "child_place_fkey" of "public"."child" on s1',
        'rows of materialized view "public"."summed" on s1',
        f"rows of {4 + increment} other tables on s1: {', '.join(LATER[:increment] + OTHERS)}",
    ]
    assert {table: text for table, text in sorted_copies(back.dsn).items() if text} == {"public.child": rows}
