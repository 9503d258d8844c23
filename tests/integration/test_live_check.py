"""`check --live` on running servers: no alarm under load, and damage of a standby, a table or an index is named.

Shard s1 runs PostgreSQL 15, whose standbys can't decode WAL and whose pages have no checksums; s2 runs the wheel's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.check.live import run as live_run
from cutline.check.live.ordered_snapshots import Shard
from cutline.check.live.repair_script import APPLY, repair_script
from cutline.check.live.report import (
    APPEND_ONLY,
    CUT_ROWS,
    INDEX,
    STANDBY_ROWS,
    UNREADABLE,
    LiveConflict,
    LiveReport,
    LiveVersion,
    RowRepair,
)
from cutline.check.live.run import LiveRequest, check_live
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode, stop_server
from cutline.fleet.progress import Reading, Silent
from cutline.nodes.groups import Column, Group
from cutline.nodes.programs import run_tool
from cutline.spark.amount import Amount, is_for_command
from tests.chains.folded_rows import session_without_spark
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.integration.documented_roles import BACKUP, DATABASE, grant, statements
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "daily"
GROUPS = '[groups]\nappend_only = ["public.event"]\n'
# A keyed table with values that are stored apart; one without a key; an append-only one; one whose index calls a
# function of its owner, so that it can only be copied whole; one that inherits; one with names that need quotes.
TABLES = """
CREATE TABLE item (id int PRIMARY KEY, name text, wide text);
ALTER TABLE item ALTER wide SET STORAGE EXTERNAL;
INSERT INTO item SELECT i, 'item ' || i, repeat(md5(i::text), 80) FROM generate_series(1, 3000) i;
CREATE TABLE log (at int, line text);
ALTER TABLE log REPLICA IDENTITY FULL;
INSERT INTO log SELECT i % 50, 'line' FROM generate_series(1, 2000) i;
CREATE TABLE event (at int, what text);
INSERT INTO event SELECT i, 'event ' || i FROM generate_series(1, 500) i;
CREATE FUNCTION own(text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT lower($1)';
CREATE TABLE owned (id int PRIMARY KEY, name text);
CREATE INDEX owned_name ON owned (public.own(name));
INSERT INTO owned SELECT i, 'Owned ' || i FROM generate_series(1, 500) i;
CREATE TABLE heir () INHERITS (log);
ALTER TABLE heir REPLICA IDENTITY FULL;
INSERT INTO heir VALUES (1, 'heir');
CREATE TABLE "Odd ""table" ("a b" int PRIMARY KEY);
INSERT INTO "Odd ""table" SELECT generate_series(1, 10);
CREATE TABLE nothing ();
ALTER TABLE nothing REPLICA IDENTITY FULL;
"""
# Every statement of the load changes rows that are being compared.
LOAD = (
    "UPDATE item SET name = name || '.' WHERE id % 7 = {n} % 7",
    "DELETE FROM item WHERE id % 11 = {n} % 11",
    "INSERT INTO item SELECT i, 'again', 'x' FROM generate_series(1, 3000) i ON CONFLICT DO NOTHING",
    "UPDATE log SET line = 'line ' || {n} WHERE at = {n} % 50",
    "INSERT INTO event VALUES ({n}, 'loaded')",
    "UPDATE owned SET name = 'Owned ' || {n} WHERE id % 5 = 0",
    "BEGIN; SAVEPOINT one; UPDATE log SET line = 'sub' WHERE at = 3; RELEASE one; SELECT pg_sleep(0.01); COMMIT",
    "BEGIN; DELETE FROM log WHERE at = 4; ROLLBACK",
    "SELECT * FROM item WHERE id % 3 = 0 FOR KEY SHARE",
    'TRUNCATE "Odd ""table"; INSERT INTO "Odd ""table" VALUES ({n})',
    "VACUUM item",
    "VACUUM FULL log",
)


# How long a standby may take to replay what was written, and to report which versions it needs.
REPLAY_SECONDS_MAX = 60

# How many standbys need versions that were current before a transaction.
NEEDED_QUERY = """
SELECT count(*) FROM (SELECT backend_xmin FROM pg_stat_replication
                      UNION ALL SELECT xmin FROM pg_replication_slots WHERE slot_type = 'physical') AS held (oldest)
 WHERE oldest::text::bigint < %s
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    folder = tmp_path_factory.mktemp("live")
    # A vacuum of the primary would send its pages again, and replace those that a test has altered on a standby.
    settings = {"hot_standby_feedback": "on", "max_prepared_transactions": "20", "autovacuum": "off"}
    settings["wal_receiver_status_interval"] = "1s"
    with fleet_of(folder / "fleet", [require_server(15), None], backups=1, settings=settings) as fleet:
        for dsn in fleet.dsns():
            execute(dsn, TABLES)
        yield fleet


@pytest.fixture(scope="module")
def runs(servers: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("live-store")
    fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=GROUPS)
    with dropping_slots(fleet):
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def check(runs: Runs, name: str | None = None, **options: Any) -> LiveReport:
    """Check the fleet: as a command does it with so little, in threads unless a cut is compared."""
    spark = runs.spark if name else Ready(session_without_spark())
    return check_live(runs.fleet, LiveRequest(name, **options), spark, Silent())


@dataclass(frozen=True)
class Noted(Ready):
    """A SparkSource that notes the amounts of work."""

    amounts: list[Amount] = field(default_factory=list)

    def begin(self, *given: object) -> None:
        self.amounts.extend(one for one in given if isinstance(one, Amount))


def test_the_tables_of_small_standbys_are_compared_without_spark(runs: Runs, servers: EmbeddedFleet) -> None:
    noted = Noted(session_without_spark())
    report = check_live(runs.fleet, LiveRequest(), noted, Silent())
    assert (report.result, report.skipped) == ("valid", [])
    (amount,) = noted.amounts
    assert is_for_command(amount, "local[2]", runs.fleet.store)
    # Both copies of every table are read.
    query = "SELECT sum(pg_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relnamespace = 2200"
    least = 0
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            least += 2 * connection.execute(query).fetchall()[0][0]
    assert amount.page_bytes is not None
    assert amount.page_bytes >= least > 0


def told(report: LiveReport) -> list[tuple[str, str, str | None, str | None]]:
    return [(one.kind, one.node, one.other_node, one.group) for one in report.conflicts]


@contextmanager
def loaded(dsns: list[str]) -> Iterator[Callable[[], int]]:
    """Run the load on all shards during the block; yield the number of statements so far."""
    ended, done, problems = threading.Event(), [0], list[Exception]()

    def run(dsn: str) -> None:
        number = 0
        with psycopg.connect(dsn, autocommit=True) as connection:
            # A pause, so that the check gets its share of the processors.
            while not ended.wait(0.03):
                number += 1
                statement = LOAD[number % len(LOAD)].format(n=number)
                try:
                    with suppress(psycopg.errors.DeadlockDetected):
                        connection.execute(statement.encode())
                except psycopg.Error as error:
                    problems.append(error)
                    return
                done[0] += 1

    threads = [threading.Thread(target=run, args=[dsn]) for dsn in dsns for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: done[0]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not problems
    # The last statement may have deleted rows that other tests read.
    for dsn in dsns:
        execute(dsn, LOAD[2])


def test_a_busy_fleet_raises_no_alarm(runs: Runs, servers: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small rounds and tasks, so that tables are divided.
    monkeypatch.setattr(live_run, "ROUND_BYTES", 400_000)
    monkeypatch.setattr(LiveRequest, "task_pages", 20)
    suspects: list[int] = []
    confirm = live_run._LiveRun._confirm_round

    def counting(run: live_run._LiveRun) -> None:
        suspects.append(sum(len(one.pages) for check in run.checks for one in check.suspects))
        confirm(run)

    monkeypatch.setattr(live_run._LiveRun, "_confirm_round", counting)
    runs.full(NAME)
    with loaded(servers.dsns()) as done, BankWorkload(servers.dsns(), clients=2, pause_seconds=0.02):
        first = check(runs)
        began = done()
        runs.increment(NAME)
        second = check(runs, NAME, rows=5)
        assert done() > began
    for report in (first, second):
        assert report.conflicts == []
        # Only a table that is rewritten all the time, or copied whole, may remain unproven.
        names = {part.what.rpartition(" on ")[0] for part in report.skipped}
        assert names <= {"public.log", "public.heir", "public.owned", 'public."Odd ""table"'}, report.skipped
        for shard in report.shards:
            assert shard.compared.tables >= 7
    # The test would prove nothing if nothing had been in motion.
    assert sum(suspects) > 0
    quiet = check(runs)
    assert (quiet.result, quiet.skipped) == ("valid", [])
    assert [shard.compared.tables for shard in quiet.shards] == [9, 9]


def page_of(dsn: str, table: str, condition: str) -> tuple[int, str]:
    """Return the page of the row, and the table's file; everything is written to disk first."""
    query = f"SELECT (ctid::text::point)[0]::int, pg_relation_filepath('{table}') FROM {table} WHERE {condition}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        # A reader that sets hint bits or removes dead versions after the checkpoint would write the whole page into the
        # WAL, and the standby would get it back. Versions can be removed once no snapshot of a standby needs them.
        (newest,) = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone() or (0,)
        deadline = time.monotonic() + REPLAY_SECONDS_MAX
        while connection.execute(NEEDED_QUERY, (newest,)).fetchone() != (0,):
            assert time.monotonic() < deadline, "a standby still needs old versions"
            connection.execute("SELECT pg_current_xact_id()")
            time.sleep(0.1)
        connection.execute(f"VACUUM {table}".encode())
        connection.execute(f"SELECT count(*) FROM {table}".encode())
        connection.execute("CHECKPOINT")
        return connection.execute(query.encode()).fetchall()[0]


def alter(servers: EmbeddedFleet, node: EmbeddedNode, file: str, before: bytes, after: bytes) -> None:
    """Replace the bytes of a row in a file of a stopped server; the unused part of its page may have older copies."""
    # A server that does not stop in time is stopped without a checkpoint, and then gets its page back from the WAL.
    execute(node.dsn(), "CHECKPOINT")
    stop_server(node)
    path = node.data_directory / file
    body = path.read_bytes()
    assert before in body
    path.write_bytes(body.replace(before, after))
    servers.start_node(node)


def replayed(runs: Runs) -> None:
    """Wait until the standbys have replayed everything, so that their files can be altered."""
    for node in runs.fleet.nodes:
        if node.backup_of:
            with psycopg.connect(runs.fleet.node(node.backup_of).dsn, autocommit=True) as primary:
                (position,) = primary.execute("SELECT pg_current_wal_lsn()::text").fetchone() or ("",)
            with psycopg.connect(node.dsn, autocommit=True) as standby:
                behind = "SELECT pg_last_wal_replay_lsn() < %s::pg_lsn"
                deadline = time.monotonic() + REPLAY_SECONDS_MAX
                while standby.execute(behind, (position,)).fetchone() == (True,):
                    assert time.monotonic() < deadline, f"{node.id} has not replayed {position}"
                    time.sleep(0.05)


def edited(script: str) -> str:
    """Return the script as an operator edits it to let all sections run."""
    return script.replace("\nROLLBACK;", "\nCOMMIT;").replace(rf"\set {APPLY} no", rf"\set {APPLY} yes")


def psql(dsn: str, script: str, folder: Path) -> str:
    """Run the script with psql; return what it prints."""
    file = folder / "script.sql"
    file.write_bytes(script.encode(errors="surrogateescape"))
    return run_tool("psql", "--no-psqlrc", "--quiet", f"--file={file}", dsn).stdout


def run_script(dsn: str, report: LiveReport, folder: Path) -> None:
    """Let all sections of the repair script run in one database."""
    psql(dsn, edited(repair_script(report)), folder)


def test_a_byte_that_changed_on_a_standby_is_named_and_its_page_can_be_sent_again(
    runs: Runs, servers: EmbeddedFleet, tmp_path: Path
) -> None:
    dsn, standby = servers.primaries[0].dsn(), servers.node("s1-b1")
    execute(dsn, "UPDATE item SET name = 'precious value' WHERE id = 1234")
    page, file = page_of(dsn, "item", "id = 1234")
    replayed(runs)
    alter(servers, standby, file, b"precious value", b"prezious value")
    report = check(runs, rows=3)
    assert told(report) == [(STANDBY_ROWS, "s1", "s1-b1", "public.item")]
    (conflict,) = report.conflicts
    assert (report.exit_code, conflict.pages) == (1, (page,))
    assert "1 row has other contents on the standby" in conflict.detail
    (row,) = conflict.rows
    values = [copy.line.split("\t")[1] for copy in row.copies if copy.line]
    assert (row.key, values) == ("1234", ["precious value", "prezious value"])
    code, document = run_here(runs.fleet, "check", "--live", spark=runs.spark.running)
    assert (code, document["result"], document["conflicts"][0]["rows"]) == (1, "conflicts", [])
    # The primary sends the whole page, which replaces the standby's.
    run_script(dsn, report, tmp_path)
    assert check(runs).result == "valid"


def test_a_page_that_a_standby_can_not_read_is_named_and_the_others_are_compared(
    runs: Runs, servers: EmbeddedFleet, tmp_path: Path
) -> None:
    dsn, standby = servers.primaries[1].dsn(), servers.node("s2-b1")
    execute(dsn, "UPDATE item SET name = 'precious value' WHERE id = 77")
    page, file = page_of(dsn, "item", "id = 77")
    replayed(runs)
    alter(servers, standby, file, b"precious value", b"prezious value")
    report = check(runs)
    assert told(report) == [(UNREADABLE, "s2-b1", None, "public.item")], report
    assert report.conflicts[0].pages == (page,)
    assert "invalid page" in report.conflicts[0].detail
    run_script(dsn, report, tmp_path)
    assert check(runs).result == "valid"


def test_rows_that_nobody_wrote_since_the_cut_must_be_those_of_the_cut(
    runs: Runs, servers: EmbeddedFleet, tmp_path: Path
) -> None:
    name, primary = "cut", servers.primaries[0]
    execute(primary.dsn(), "UPDATE item SET name = 'treasured value' WHERE id = 99")
    runs.full(name)
    runs.increment(name)
    report = check(runs, name)
    assert (report.result, report.skipped) == ("valid", []), report.skipped
    for shard in report.shards:
        assert shard.cut is not None
        assert (shard.cut.tables, shard.cut.written, shard.cut.differing) == (9, 0, 0)
        assert shard.cut.equal == shard.compared.rows
    # What is written later differs rightly.
    execute(primary.dsn(), "UPDATE item SET name = 'later' WHERE id = 5", "DELETE FROM item WHERE id = 6",
            "INSERT INTO item VALUES (9999, 'new', '')")  # fmt: skip
    report = check(runs, name)
    cut = report.shards[0].cut
    assert cut is not None
    assert (report.result, cut.written, cut.differing) == ("valid", 3, 0)
    # What changes without being written is wrong, and the standby and the cut agree on it.
    _, file = page_of(primary.dsn(), "item", "id = 99")
    replayed(runs)
    alter(servers, primary, file, b"treasured value", b"treazured value")
    report = check(runs, name, rows=2, repairs=True)
    assert told(report) == [
        (CUT_ROWS, "s1", None, "public.item"),
        (STANDBY_ROWS, "s1", "s1-b1", "public.item"),
    ]
    of_cut, of_standby = report.conflicts
    names = [copy.line.split("\t")[1] for copy in of_standby.rows[0].copies if copy.line]
    assert names == ["treazured value", "treasured value", "treasured value"]
    assert [copy.of for copy in of_cut.rows[0].copies] == ["s1", "cut at increment 1"]
    script = repair_script(replace_conflicts(report))
    assert script.count("UPDATE ONLY") == 1
    psql(primary.dsn(), edited(script), tmp_path)
    assert check(runs, name).result == "valid"


def replace_conflicts(report: LiveReport) -> LiveReport:
    """Return the report with its repairs only."""
    return structs.replace(report, conflicts=[])


def test_rows_that_left_an_append_only_table_are_missed_changes(runs: Runs, servers: EmbeddedFleet) -> None:
    name = "events"
    runs.full(name)
    execute(servers.dsns()[0], "UPDATE event SET what = 'changed' WHERE at = 17")
    report = check(runs, name, rows=3)
    assert told(report) == [(APPEND_ONLY, "s1", None, "public.event")]
    assert [copy.line for copy in report.conflicts[0].rows[0].copies] in ([None, "17\tevent 17"], ["17\tchanged", None])
    # The table is right again after a base copy.
    runs.full("events-2")
    assert check(runs, "events-2").result == "valid"


def test_an_index_that_does_not_fit_its_table_is_named_where_amcheck_is(
    runs: Runs, servers: EmbeddedFleet, tmp_path: Path
) -> None:
    report = check(runs, indexes=True)
    assert report.result == "inconclusive"
    assert {part.what for part in report.skipped} == {f"indexes on {node.id}" for node in runs.fleet.nodes}
    assert all("CREATE EXTENSION amcheck" in part.why for part in report.skipped)
    for dsn in servers.dsns():
        execute(dsn, "CREATE EXTENSION amcheck SCHEMA public")
    replayed(runs)
    report = check(runs, indexes=True)
    assert report.result == "valid", report.skipped
    assert all(shard.compared.indexes >= 2 * 6 for shard in report.shards)
    # As if the order of texts had changed with a new version of a library.
    dsn = servers.dsns()[1]
    execute(dsn, "CREATE OR REPLACE FUNCTION own(text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT reverse($1)'")
    replayed(runs)
    report = check(runs, indexes=True)
    assert told(report) == [(INDEX, "s2", None, "public.owned"), (INDEX, "s2-b1", None, "public.owned")]
    assert {one.index for one in report.conflicts} == {'"public"."owned_name"'}
    assert repair_script(report).count('REINDEX INDEX CONCURRENTLY "public"."owned_name";') == 1
    run_script(dsn, report, tmp_path)
    replayed(runs)
    assert check(runs, indexes=True).result == "valid"


def test_indexes_of_a_table_with_a_page_that_can_not_be_read_are_not_called_damaged(
    runs: Runs, servers: EmbeddedFleet, tmp_path: Path
) -> None:
    dsn, standby = servers.primaries[1].dsn(), servers.node("s2-b1")
    for each in servers.dsns():
        execute(each, "CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
    intact = check(runs, indexes=True)
    assert intact.result == "valid"
    execute(dsn, "UPDATE item SET name = 'priceless value' WHERE id = 78")
    page, file = page_of(dsn, "item", "id = 78")
    replayed(runs)
    # A check in between would read the page on the primary, which may send the page again.
    alter(servers, standby, file, b"priceless value", b"prizeless value")
    report = check(runs, indexes=True)
    assert told(report) == [(UNREADABLE, "s2-b1", None, "public.item")], report
    assert [(part.what, part.why) for part in report.skipped] == [
        ('index "public"."item_pkey" on s2-b1', f"could not be checked: page {page} of its table can't be read")
    ]
    # The rows on the page do not count as compared.
    with psycopg.connect(dsn) as connection:
        query = "SELECT count(*) FROM item WHERE ctid >= %s::tid AND ctid < %s::tid"
        (on_page,) = connection.execute(query, (f"({page},0)", f"({page + 1},0)")).fetchone() or (0,)
    before, after = intact.shards[1].compared, report.shards[1].compared
    assert (after.tables, after.partial_tables, before.rows - after.rows) == (9, 1, on_page)
    assert "REINDEX" not in repair_script(report)
    run_script(dsn, report, tmp_path)
    assert check(runs, indexes=True).result == "valid"


COLUMNS = (Column("id", "integer", 23, -1, 0), Column("name", "text", 25, -1, 1), Column("wide", "text", 25, -1, 2))
# The row that the script changes, the file of the index that it rebuilds, and the newest lock of rows that it locks. (A
# change that was rolled back leaves its xid behind, so the changed row is in another table.)
STATE = """
SELECT name, pg_relation_filenode('item_pkey'), (SELECT max(xmax::text::bigint) FROM owned) FROM item WHERE id = 4
"""


def test_a_repair_script_changes_nothing_until_it_is_edited_and_never_in_another_database(
    runs: Runs, servers: EmbeddedFleet, tmp_path: Path
) -> None:
    nodes = {node.id: node.dsn for node in runs.fleet.nodes}

    def state(dsn: str) -> list[Any]:
        with psycopg.connect(dsn) as connection:
            return connection.execute(STATE).fetchall()

    report = check(runs)
    execute(nodes["s1"], "DELETE FROM item WHERE id = 4", "INSERT INTO item VALUES (4, 'plain', '')")
    with psycopg.connect(nodes["s1"]) as connection:
        query = "SELECT ctid::text, xmin::text::bigint, pg_relation_filenode('item') FROM item WHERE id = 4"
        place, xmin, file = connection.execute(query).fetchall()[0]
        ((page,),) = connection.execute("SELECT (ctid::text::point)[0]::int FROM owned LIMIT 1").fetchall()
    # Without standard_conforming_strings, the value would not end at its quote.
    version = LiveVersion(place, xmin, file, b"4\tplain\t\n")
    group = Group(1, "public", "item", "default", 1, COLUMNS)
    report.repairs = [RowRepair("s1", group, 1, 1, b"4\t'; \\\\endif \\\\\t\n", (version,))]
    report.conflicts = [
        LiveConflict(STANDBY_ROWS, "1 row is missing", "s1", "s1-b1", "public.owned", pages=(page,)),
        LiveConflict(INDEX, "index item_pkey", "s1-b1", group="public.item", index='"public"."item_pkey"'),
    ]
    replayed(runs)
    script = repair_script(report)
    assert script.count(", for node s1, database bank: ") == 3
    before = {node: state(dsn) for node, dsn in nodes.items()}
    sloppy = "-c standard_conforming_strings=off"
    for node, dsn in nodes.items():
        told = psql(make_conninfo(dsn, options=sloppy), script, tmp_path)
        assert told.count("nothing was done") == (2 if node == "s1" else 3)
        if node != "s1":
            told = psql(make_conninfo(dsn, options=sloppy), edited(script), tmp_path)
            assert told.count("this is another server or database, so nothing was done") == 3
    assert psql(make_conninfo(nodes["s1"], dbname="postgres"), edited(script), tmp_path).count("nothing was done") == 3
    replayed(runs)
    assert {node: state(dsn) for node, dsn in nodes.items()} == before
    assert psql(nodes["s1"], edited(script), tmp_path).count("nothing was done") == 0
    ((name, index, locked),) = state(nodes["s1"])
    ((_, index_before, locked_before),) = before["s1"]
    assert (name, index != index_before, locked > locked_before) == ("'; \\endif \\", True, True)


def test_a_check_continues_without_the_nodes_that_it_can_not_reach(
    runs: Runs, servers: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, standby, primary = "away", servers.node("s1-b1"), servers.primaries[1]
    runs.full(name)
    stop_server(standby)
    try:
        report = check(runs, name)
        assert (report.exit_code, report.conflicts, list(report.unreachable)) == (6, [], ["s1-b1"])
        # The other shard is compared with its standby, and both with the cut.
        assert [shard.compared.tables for shard in report.shards] == [0, 9]
        assert [shard.cut.tables for shard in report.shards if shard.cut] == [9, 9]
        code, document = run_here(runs.fleet, "check", "--live", spark=runs.spark.running)
        assert (code, document["unreachable"][0]["node"]) == (6, "s1-b1")
    finally:
        servers.start_node(standby)
    replayed(runs)
    stop_server(primary)
    try:
        report = check(runs, name)
        assert (report.exit_code, report.conflicts, list(report.unreachable)) == (6, [], ["s2"])
        assert [part.what for part in report.skipped] == ["rows of shard s2 in snapshot away", "shard s2"]
        (shard,) = report.shards
        assert (shard.shard, shard.compared.tables, shard.cut and shard.cut.tables) == ("s1", 9, 9)
    finally:
        servers.start_node(primary)
    replayed(runs)
    # Nodes that are lost while they are compared.
    monkeypatch.setattr(live_run, "ROUND_BYTES", 400_000)
    monkeypatch.setattr(LiveRequest, "task_pages", 20)
    rounds = live_run._LiveRun._compare_round
    for lost in (standby, primary):
        left = [lost]

        def losing(run: live_run._LiveRun, shares: Any, left: list[EmbeddedNode] = left) -> Any:
            found = rounds(run, shares)
            if left:
                stop_server(left.pop(), immediate=True)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(live_run._LiveRun, "_compare_round", losing)
            try:
                report = check(runs, name)
            finally:
                servers.start_node(lost)
        assert (report.exit_code, report.conflicts) == (6, [])
        assert lost.id in report.unreachable
        other = report.shards[0 if lost is primary else 1]
        assert other.compared.tables == 9
        assert report.of("s2" if lost is primary else "s1").compared.tables < 9
        assert [shard.shard for shard in report.shards if shard.cut] == (["s1"] if lost is primary else ["s1", "s2"])
    replayed(runs)
    assert check(runs, name).result == "valid"


def test_a_commit_that_waits_for_a_synchronous_standby_is_no_difference(
    runs: Runs, servers: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby shows the transaction already, and its primary, which can't know when, does not."""
    monkeypatch.setattr("cutline.check.live.ordered_snapshots.AHEAD_SECONDS_MAX", 1.0)
    name, dsn = "waiting", servers.dsns()[0]
    runs.full(name)
    execute(dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    writer = threading.Thread(target=execute, args=[dsn, "UPDATE item SET name = 'waits' WHERE id = 500"])
    writer.start()
    try:
        awaited = "SELECT count(*) FROM item WHERE name = 'waits'"
        with psycopg.connect(servers.node("s1-b1").dsn(), autocommit=True) as standby:
            while standby.execute(awaited).fetchone() != (1,):
                time.sleep(0.05)
        with psycopg.connect(dsn, autocommit=True) as primary:
            assert primary.execute(awaited).fetchone() == (0,)
        report = check(runs, name)
    finally:
        execute(dsn, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        writer.join()
    assert (report.result, report.conflicts) == ("inconclusive", [])
    (part,) = report.skipped
    assert (part.what, "committed on s1-b1 is still running" in part.why) == ("rows of shard s1", True)
    (shard, _) = report.shards
    # The old row, which is that of the cut.
    assert shard.cut is not None
    assert (shard.cut.written, shard.cut.differing) == (0, 0)
    report = check(runs, name)
    cut = report.shards[0].cut
    assert cut is not None
    assert (report.result, cut.written, cut.differing) == ("valid", 1, 0)


def test_a_standby_that_does_not_replay_is_left_out_by_name(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cutline.check.live.ordered_snapshots.REPLAY_SECONDS_MAX", 0.5)
    standby = runs.fleet.node("s1-b1").dsn
    execute(standby, "SELECT pg_wal_replay_pause()")
    try:
        report = check(runs)
    finally:
        execute(standby, "SELECT pg_wal_replay_resume()")
    assert (report.result, report.exit_code) == ("inconclusive", 4)
    assert [part.what for part in report.skipped] == ["standby s1-b1"]
    assert "its replay is paused" in report.skipped[0].why
    # The other shard was compared.
    assert report.shards[1].compared.tables == 9


class Told(Silent):
    """Keeps the readings."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []

    def tell(self, reading: Reading) -> None:
        self.readings.append(reading)


def test_a_label_that_was_renamed_while_the_standby_lags_is_no_conflict(
    runs: Runs, servers: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn, standby = servers.primaries[0].dsn(), servers.node("s1-b1").dsn()
    execute(dsn, "CREATE TYPE color AS ENUM ('red')", "CREATE TABLE colored (id int PRIMARY KEY, c color)",
            "INSERT INTO colored VALUES (1, 'red')")  # fmt: skip
    replayed(runs)
    names = ["red"]
    turns = live_run.take_turns

    @contextmanager
    def renaming(shard: Shard, *arguments: Any) -> Iterator[Any]:
        with turns(shard, *arguments) as taken:
            if shard.primary.id != "s1":
                yield taken
                return
            execute(standby, "SELECT pg_wal_replay_pause()")
            names.append(f"red {len(names)}")
            execute(dsn, f"ALTER TYPE color RENAME VALUE '{names[-2]}' TO '{names[-1]}'")
            try:
                yield taken
            finally:
                execute(standby, "SELECT pg_wal_replay_resume()")

    with monkeypatch.context() as patch:
        patch.setattr(live_run, "take_turns", renaming)
        report = check(runs)
    assert (report.exit_code, report.conflicts) == (4, [])
    assert [(part.what, part.why) for part in report.skipped] == [("public.colored on s1-b1", live_run.RENAMED)]
    replayed(runs)
    assert check(runs).result == "valid"
    execute(dsn, "DROP TABLE colored", "DROP TYPE color")


def test_reading_is_slow_if_it_shall_be(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(live_run, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(live_run, "UNIT_SECONDS", 0.05)
    fast, slow = check(runs), check_live(runs.fleet, LiveRequest(bytes_per_second=4_000_000), runs.spark, told)
    assert slow.result == "valid"
    # The amount that was read grows in steps of some seconds, and ends with everything.
    last = {reading.node: reading for reading in told.readings if reading.unit == "bytes"}
    assert all(reading.done == reading.total for reading in last.values()), last
    assert len({reading.done for reading in told.readings if reading.node == "s1"}) > 2
    size = max(shard.compared.bytes for shard in slow.shards)
    # Both nodes are read one after the other.
    assert slow.seconds >= 2 * size / 4_000_000 > 0
    assert fast.shards[0].compared.rows == slow.shards[0].compared.rows


def test_the_role_that_takes_snapshots_suffices(runs: Runs, servers: EmbeddedFleet) -> None:
    name = "by-role"
    runs.full(name)
    grant(servers.dsns(), (line.replace(f'"{DATABASE}"', '"bank"') for line in statements("create")))
    try:
        replayed(runs)
        nodes = tuple(replace(node, dsn=make_conninfo(node.dsn, user=BACKUP)) for node in runs.fleet.nodes)
        report = check(Runs(replace(runs.fleet, nodes=nodes), runs.spark), name, indexes=True)
    finally:
        for dsn in servers.dsns():
            execute(dsn, f"DROP OWNED BY {BACKUP}", f"DROP ROLE {BACKUP}")
    # amcheck needs a grant of its own.
    assert {part.what for part in report.skipped} == {f"indexes on {node.id}" for node in runs.fleet.nodes}
    assert all("GRANT EXECUTE ON FUNCTION" in part.why for part in report.skipped)
    assert (report.conflicts, [shard.cut.equal for shard in report.shards if shard.cut]) == (
        [], [shard.compared.rows for shard in report.shards]
    )  # fmt: skip


def test_a_restored_database_is_compared_by_its_contents(runs: Runs, servers: EmbeddedFleet, tmp_path: Path) -> None:
    """Nobody knows what was written since, so rows that differ prove nothing; the script would make them equal."""
    name, dsn = "restored", servers.dsns()[0]
    runs.full(name)
    runs.restore(name, runs.fleet)
    replayed(runs)
    report = check(runs, name)
    assert (report.result, report.skipped) == ("valid", []), report.skipped
    execute(dsn, "UPDATE item SET name = 'other' WHERE id = 12", "DELETE FROM item WHERE id = 13",
            "INSERT INTO log VALUES (77, 'new')")  # fmt: skip
    report = check(runs, name, rows=5, repairs=True)
    assert (report.result, report.conflicts) == ("inconclusive", [])
    assert {part.what: part.why.split(",")[0] for part in report.skipped} == {
        "public.item on s1": "2 rows differ from the cut", "public.log on s1": "1 row differs from the cut",
    }  # fmt: skip
    cut = report.shards[0].cut
    assert cut is not None
    assert (cut.differing, cut.unproven) == (0, 3)
    assert all("a restore replaced it" in rows.why for rows in report.unproven)
    shown = {rows.group: [[copy.line for copy in row.copies] for row in rows.rows] for rows in report.unproven}
    assert {rows.group: rows.differing for rows in report.unproven} == {"public.item": 2, "public.log": 1}
    assert {len(rows) for rows in shown.values()} == {1, 2}
    run_script(dsn, report, tmp_path)
    replayed(runs)
    assert check(runs, name).result == "valid"
