"""The script of `check --live --repair-script` on running servers: psql runs it, and the tables are those of the cut.

Shard s1 runs PostgreSQL 15, s2 the wheel's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.check.live import changes_since
from cutline.check.live.cut_comparison import LONG_RUNNING
from cutline.check.live.repair_script import repair_script
from cutline.check.live.report import LiveReport
from cutline.check.live.run import LiveRequest, check_live
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.progress import Silent
from cutline.nodes.programs import run_tool
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ONE_COPY = '[check]\nallow = ["one-copy"]\n'
HOSTILE = '"h""; DROP TABLE log; --\n\\! touch pwned\né"'
# A table with values that an UPDATE leaves out; one without a key, with equal lines; one without columns; one with an
# identity and a generated column; one with hostile names and values; one that is parsed differently under other
# settings; one that is copied whole, because its index calls a function of its owner.
TABLES = f"""
CREATE TABLE wide (id int PRIMARY KEY, m text, n int, t text);
ALTER TABLE wide ALTER t SET STORAGE EXTERNAL;
INSERT INTO wide SELECT i, 'm ' || i, 0, repeat(md5(i::text), 200) FROM generate_series(1, 5) i;
CREATE TABLE log (at int, line text);
ALTER TABLE log REPLICA IDENTITY FULL;
INSERT INTO log VALUES (1, 'a'), (1, 'b'), (2, 'x'), (2, 'x'), (2, 'x'), (3, NULL);
CREATE TABLE nothing ();
ALTER TABLE nothing REPLICA IDENTITY FULL;
INSERT INTO nothing SELECT FROM generate_series(1, 2);
CREATE TABLE fixed (
    id int PRIMARY KEY, i int GENERATED ALWAYS AS IDENTITY, g int GENERATED ALWAYS AS (id * 2) STORED, t text);
INSERT INTO fixed (id, t) VALUES (1, 'one'), (2, 'two'), (3, 'three');
CREATE TABLE {HOSTILE} (id text PRIMARY KEY, {HOSTILE} text);
INSERT INTO {HOSTILE} VALUES
    (E'k''; \\\\! touch pwned\\n:x \\\\', E'v''\\r\\n\\\\! touch pwned\\n''); DROP TABLE log;--'), ('', '');
CREATE TABLE parsed (id int PRIMARY KEY, a text[], d date, m money, v interval);
INSERT INTO parsed VALUES (1, ARRAY['a', NULL], '2026-02-01', 1234.5::numeric::money, '-1 day 2 hours');
CREATE FUNCTION own(text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT lower($1)';
CREATE TABLE owned (id int PRIMARY KEY, name text);
CREATE INDEX owned_name ON owned (public.own(name));
INSERT INTO owned VALUES (1, 'Owned'), (2, 'Lost');
CREATE TABLE child (id int PRIMARY KEY REFERENCES wide ON DELETE CASCADE);
INSERT INTO child SELECT id FROM wide;
"""
NAMES = ("wide", "log", "nothing", "fixed", HOSTILE, "parsed", "owned", "child")
# What differs later, on s1 and s2.
DIFFERENCES = (
    "UPDATE wide SET m = 'other' WHERE id = 3", "DELETE FROM child WHERE id = 5", "DELETE FROM wide WHERE id = 5",
    "UPDATE log SET line = 'b' WHERE line = 'a'", "DELETE FROM log WHERE line IS NULL",
    "UPDATE log SET line = 'y' WHERE ctid = ANY (ARRAY(SELECT ctid FROM log WHERE line = 'x' LIMIT 2))",
    "DELETE FROM fixed WHERE id IN (2, 3)",
    "INSERT INTO fixed (id, i, t) OVERRIDING SYSTEM VALUE VALUES (2, 77, 'two')",
    f"UPDATE {HOSTILE} SET {HOSTILE} = 'harmless'", "INSERT INTO wide VALUES (6, 'new', 1, '')",
    "UPDATE parsed SET a = NULL, d = NULL, m = NULL, v = NULL", "UPDATE owned SET name = 'Other' WHERE id = 1",
    "DELETE FROM owned WHERE id = 2",
)  # fmt: skip
OF_SHARD = (
    "INSERT INTO nothing DEFAULT VALUES",
    "DELETE FROM nothing WHERE ctid = ANY (ARRAY(SELECT ctid FROM nothing LIMIT 1))",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    folder = tmp_path_factory.mktemp("live-repair")
    with fleet_of(folder / "fleet", [require_server(15), None], backups=0) as fleet:
        for dsn in fleet.dsns():
            execute(dsn, TABLES)
        yield fleet


@pytest.fixture(scope="module")
def runs(servers: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("live-repair-store")
    fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=ONE_COPY)
    with dropping_slots(fleet):
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def rows(dsn: str, query: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(query.encode()).fetchall()


def tables_of(dsn: str) -> dict[str, list[Any]]:
    return {name: rows(dsn, f"SELECT t::text FROM {name} AS t ORDER BY 1") for name in NAMES}


def check(runs: Runs, name: str, **options: Any) -> LiveReport:
    return check_live(runs.fleet, LiveRequest(name, **options), runs.spark, Silent())


def test_a_commit_that_waits_for_a_standby_for_long_is_no_conflict(
    runs: Runs, servers: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, dsn = "waiting", servers.dsns()[1]
    local = make_conninfo(dsn, options="-c synchronous_commit=local")
    runs.full(name)
    execute(local, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")

    def wait() -> None:
        with suppress(psycopg.Error):
            execute(dsn, "UPDATE wide SET n = 5 WHERE id = 1")

    waiter = threading.Thread(target=wait)
    try:
        while rows(local, "SHOW synchronous_standby_names") != [("nobody",)]:
            time.sleep(0.05)
        waiter.start()
        while not rows(local, "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"):
            time.sleep(0.05)
        for number in range(3):
            execute(local, f"UPDATE wide SET n = {number} WHERE id = 2")
            runs.increment(name)
        monkeypatch.setattr(changes_since, "SEGMENTS_AT_ONCE", 1)
        report = check(runs, name)
        assert (report.conflicts, report.skipped) == ([], [])
        assert sum(shard.cut.written for shard in report.shards if shard.cut) == 1
        # If the search ends before it is found, that is no proof.
        monkeypatch.setattr(changes_since, "SEGMENTS_READ_MAX", 1)
        report = check(runs, name)
        assert (report.exit_code, report.conflicts) == (4, [])
        assert [LONG_RUNNING in part.why for part in report.skipped] == [True]
    finally:
        execute(local, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        waiter.join()
    assert check(runs, name).result == "valid"


def test_the_script_makes_all_tables_those_of_the_cut(runs: Runs, servers: EmbeddedFleet, tmp_path: Path) -> None:
    name = "shapes"
    runs.full(name)
    for dsn in servers.dsns():
        # Its newest image leaves out the long value.
        execute(dsn, "UPDATE wide SET n = 7 WHERE id = 3")
    runs.increment(name)
    runs.restore(name, runs.fleet)
    wanted = {dsn: tables_of(dsn) for dsn in servers.dsns()}
    for dsn, statement in zip(servers.dsns(), OF_SHARD, strict=True):
        execute(dsn, *DIFFERENCES, statement)
        # The database's own settings would read some values differently.
        execute(dsn, *(f"ALTER DATABASE bank SET {setting}" for setting in (
            "array_nulls = off", "datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'")))  # fmt: skip
    report = check(runs, name, rows=20, repairs=True)
    assert {part.what.rpartition(" on ")[0] for part in report.skipped} >= {"public.log", "public.owned"}
    for node, dsn in zip(("s1", "s2"), servers.dsns(), strict=True):
        # The sections for the other node do nothing here.
        script = tmp_path / f"{node}.sql"
        text = repair_script(report)
        assert "public.owned 1: the database has 1 row that the snapshot lacks, but their places" in text
        # The row of `child` comes before the row that it refers to.
        edited = text.replace("\nROLLBACK;", "\nCOMMIT;").replace("\n-- SET LOCAL", "\nSET LOCAL")
        script.write_bytes(edited.encode(errors="surrogateescape"))
        run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={script}", dsn)
        # A table that is copied whole gets the row that it lacks; the other is for the operator.
        assert rows(dsn, "SELECT name FROM owned ORDER BY id") == [("Other",), ("Lost",)]
        execute(dsn, "UPDATE owned SET name = 'Owned' WHERE id = 1")
        execute(dsn, *(f"ALTER DATABASE bank RESET {name}" for name in ("array_nulls", "datestyle", "intervalstyle")))
        assert tables_of(dsn) == wanted[dsn]
    assert check(runs, name).result == "valid"
    assert not Path("pwned").exists()


def test_a_row_that_was_written_since_is_left_alone_although_it_is_at_the_same_place(
    runs: Runs, servers: EmbeddedFleet
) -> None:
    name, dsn = "reuse", servers.dsns()[1]
    # The index keeps updates from being chained in the page, so that VACUUM frees the place.
    execute(dsn, "CREATE TABLE reused (id int PRIMARY KEY, name text)", "CREATE INDEX ON reused (name)",
            "INSERT INTO reused VALUES (1, 'first')")  # fmt: skip
    runs.full(name)
    runs.restore(name, runs.fleet)
    execute(dsn, "UPDATE reused SET name = 'wrong'")
    report = check(runs, name, repairs=True)
    ((repair,),) = ([one for one in report.repairs if one.group.table == "reused"],)
    place = repair.versions[0].place
    for number in range(10):
        execute(dsn, f"UPDATE reused SET name = 'written since {number}'", "VACUUM (INDEX_CLEANUP ON) reused")
        if number and rows(dsn, "SELECT ctid::text FROM reused") == [(place,)]:
            break
    else:
        pytest.fail(f"no version came to {place} again")
    (statement,) = [line for line in repair_script(report).splitlines() if line.startswith("UPDATE")]
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert connection.execute(statement.encode()).rowcount == 0
