"""Append-only tables: inserts and truncates are restored; an update or delete refuses the next increment.

If PostgreSQL's counters can't tell whether rows were updated or deleted, every output warns. The tests compare with
PostgreSQL's COPY of the source, and with the number of rows that their statements change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.snapshots.create.full
import cutline.snapshots.create.spared_cut
from cutline.cli.commands.check import lines_of as check_lines
from cutline.cli.commands.create import lines_of as create_lines
from cutline.cli.output.commit_document import document_of as create_document
from cutline.cli.output.restore_report import document_of as restore_document
from cutline.cli.output.restore_report import lines_of as restore_lines
from cutline.embedded.server import stop_server
from cutline.fleet.config import Fleet
from cutline.nodes.connections import connect
from cutline.nodes.table_state import AppendOnlyChangedError, Counters, are_counters_unknown, has_changed, read_counters
from cutline.snapshots.records.proven_chains import increment_numbers
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute, refused, take_increment
from tests.servers.disasters import kill_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from tests.integration.conftest import FleetFactory

NAME = "logs"
RULES = '[groups]\nappend_only = ["public.log", "public.measured*"]\n'
SCHEMA = (
    "CREATE TABLE log (at int UNIQUE, what text)",
    "CREATE TABLE measured (day int, value int) PARTITION BY RANGE (day)",
    "CREATE TABLE measured_1 PARTITION OF measured FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE measured_2 PARTITION OF measured FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE keyed (id int PRIMARY KEY, what text)",
    "INSERT INTO log SELECT n, 'first' FROM generate_series(1, 50) AS n",
    "INSERT INTO measured SELECT n % 20, n FROM generate_series(1, 50) AS n",
    "INSERT INTO keyed SELECT n, 'first' FROM generate_series(1, 50) AS n",
)
FOLLOWED = (
    "INSERT INTO log SELECT n, 'second' FROM generate_series(51, 60) AS n",
    "INSERT INTO log VALUES (1, 'there is one') ON CONFLICT DO NOTHING",
    "BEGIN; UPDATE log SET what = 'gone anyway'; TRUNCATE log; INSERT INTO log VALUES (1, 'again'); COMMIT",
    "INSERT INTO measured VALUES (3, 1003), (13, 1013)",
    "TRUNCATE measured_2",
    "UPDATE keyed SET what = 'changed' WHERE id < 5",
    "DELETE FROM keyed WHERE id > 40",
    "VACUUM (FULL, ANALYZE) log",
)
# Each statement, and the counts that the refusal names after it, after HOT and after all statements before it.
HOT = ("UPDATE log SET what = 'hot' WHERE at = 1", "public.log (1 rows updated, 0 deleted)")
NOT_FOLLOWED = (
    ("UPDATE log SET at = 2 WHERE at = 1", "public.log (2 rows updated, 0 deleted)"),
    ("INSERT INTO log VALUES (2, 'x') ON CONFLICT (at) DO UPDATE SET what = 'y'",
     "public.log (3 rows updated, 0 deleted)"),
    ("MERGE INTO log USING (SELECT 2 AS at) AS s ON log.at = s.at WHEN MATCHED THEN DELETE",
     "public.log (3 rows updated, 1 deleted)"),
    ("BEGIN; INSERT INTO log VALUES (9, 'x'); DELETE FROM log WHERE at = 9; ROLLBACK",
     "public.log (3 rows updated, 2 deleted)"),
    ("UPDATE measured SET day = 11 WHERE day = 3 AND value = 1003",
     "public.log (3 rows updated, 2 deleted); public.measured_1 (0 rows updated, 1 deleted)"),
    ("DELETE FROM measured WHERE value = 1003",
     "public.measured_1 (0 rows updated, 1 deleted); public.measured_2 (0 rows updated, 1 deleted)"),
)  # fmt: skip
WARNING = (
    "warning: it is unknown whether rows of append-only tables were updated or deleted: PostgreSQL's counters were"
    " reset or are disabled (after ALTER TABLE … REPLICA IDENTITY FULL, the next increment copies the table again and"
    " captures all changes): public.log on s1; public.measured_1 on s1; public.measured_2 on s1"
)
TABLES = ["public.log", "public.measured_1", "public.measured_2"]


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, "logs", RULES) as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def counters(fleet: Fleet, table: str = "log") -> Counters:
    with connect(fleet.nodes[0]) as connection:
        (oid,) = connection.execute(f"SELECT 'public.{table}'::regclass::oid::bigint").fetchone() or (0,)
        return read_counters(connection, [oid])[oid]


def test_inserts_and_truncates_are_followed_and_the_rest_refuses_the_increment(runs: Runs) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)
    commit = runs.full(NAME)
    assert WARNING not in create_lines(commit)
    execute(source, *FOLLOWED)
    commit = runs.increment(NAME)
    assert {one.name for one in commit.left_out or ()} == set(TABLES)
    expected = sorted_copies(source)
    assert expected["public.log"] == b"1\tagain\n"
    runs.restore(NAME, restore_target(runs.fleet))
    assert sorted_copies(restore_target(runs.fleet).nodes[0].dsn) == expected
    assert_late_counts_refuse_the_next_increment(runs, source)
    for statement, counted in NOT_FOLLOWED:
        execute(source, statement)
        with refused(runs.fleet, "append-only-changed") as errors:
            take_increment(runs.fleet, NAME)
        assert counted in errors[0].message, statement
        assert errors[0].message.startswith(
            "node s1: rows of append-only tables were updated or deleted since increment 2"
        )
        assert "increment 2 itself may lack the earliest" in errors[0].message
        assert "REPLICA IDENTITY FULL" in (errors[0].hint or "")
    # Increment 2 differs from increment 1 only by what the late session wrote. The hint's remedy repairs the chain.
    runs.restore(NAME, restore_target(runs.fleet))
    found = sorted_copies(restore_target(runs.fleet).nodes[0].dsn)
    keyed, found_keyed = (set(rows.pop("public.keyed").splitlines()) for rows in (expected, found))
    assert found_keyed == keyed | {b"1000\treported"}
    assert found == expected
    for table in ("log", "measured_1", "measured_2"):
        execute(source, f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    runs.increment(NAME)
    execute(source, "UPDATE log SET what = 'followed'", "DELETE FROM measured WHERE value > 45")
    assert runs.increment(NAME).left_out == ()
    runs.restore(NAME, restore_target(runs.fleet))
    assert sorted_copies(restore_target(runs.fleet).nodes[0].dsn) == sorted_copies(source)


def assert_late_counts_refuse_the_next_increment(runs: Runs, source: str) -> None:
    """A session reports its UPDATE after the increment that it belongs to: the next increment is refused."""
    statement, counted = HOT
    with psycopg.connect(source, autocommit=True) as late:
        # A session that has just reported its counts reports again only when it is idle outside of a transaction.
        late.execute("INSERT INTO keyed VALUES (1000, 'reported')")
        late.execute(statement.encode())
        late.execute("BEGIN")
        assert counters(runs.fleet).rows == (0, 0)
        runs.increment(NAME)
        late.execute("COMMIT")
    assert counters(runs.fleet).rows == (1, 0)
    with refused(runs.fleet, "append-only-changed") as errors:
        take_increment(runs.fleet, NAME)
    assert counted in errors[0].message
    assert "since increment 2," in errors[0].message
    assert (
        "increment 2 itself may lack the earliest of these changes, because sessions report them late"
        in errors[0].message
    )


def test_an_update_during_a_create_is_found_before_the_commit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)

    def update_before(work: Callable[..., Any]) -> Callable[..., Any]:
        def update_and_work(*given: Any) -> Any:
            execute(source, "UPDATE log SET what = 'meanwhile' WHERE at = 1")
            return work(*given)

        return update_and_work

    with monkeypatch.context() as patched:
        patched.setattr(cutline.snapshots.create.full, "_copy", update_before(cutline.snapshots.create.full._copy))
        with pytest.raises(AppendOnlyChangedError) as raised:
            runs.full(NAME)
    assert "since this snapshot began" in raised.value.message
    runs.full(NAME)
    with monkeypatch.context() as patched:
        patched.setattr(
            cutline.snapshots.create.spared_cut,
            "take_cut",
            update_before(cutline.snapshots.create.spared_cut.take_cut),
        )
        with pytest.raises(AppendOnlyChangedError) as raised:
            runs.increment(NAME)
    assert "since the full snapshot," in raised.value.message
    assert increment_numbers(runs.fleet.store.open(), NAME) == []


def test_every_output_warns_that_counters_were_reset(runs: Runs) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)
    commit = runs.full(NAME)
    assert WARNING not in create_lines(commit)
    execute(source, "UPDATE keyed SET what = 'x'", "SELECT pg_stat_reset()")
    code, document = run_here(runs.fleet, "create", NAME, "--incremental", "--dry-run")
    assert (code, uncounted(document["left_out"])) == (0, TABLES)
    commit = runs.increment(NAME)
    assert WARNING in create_lines(commit)
    assert uncounted(create_document(commit)["left_out"]) == TABLES
    # No counter was reset since, but a later increment includes the unknown changes.
    commit = runs.increment(NAME)
    assert WARNING in create_lines(commit)
    report = runs.restore(NAME, restore_target(runs.fleet))
    assert WARNING in restore_lines(report)
    assert uncounted(restore_document(report)["not_in_snapshot"]) == TABLES
    assert WARNING not in restore_lines(runs.restore(NAME, restore_target(runs.fleet), 0))
    checked = runs.check(NAME)
    assert f"  {WARNING}" in check_lines(checked)
    assert uncounted(checked.to_json()["snapshots"][0]["warned"]) == TABLES
    for command, entry in ((("list",), ("snapshots", "warned")), (("show", NAME), ("left_out",))):
        # A list of several snapshots leaves what helps to `show`.
        text = WARNING if command[0] == "show" else re.sub(r" \(after .*?\)", "", WARNING)
        assert text in run_as_text(runs.fleet, *command)
        code, document = run_here(runs.fleet, *command)
        found = document[entry[0]] if len(entry) == 1 else document[entry[0]][0][entry[1]]
        assert (code, uncounted(found)) == (0, TABLES)
    # Changes after the reset are counted.
    execute(source, "DELETE FROM log WHERE at = 1")
    with refused(runs.fleet, "append-only-changed"):
        take_increment(runs.fleet, NAME)


def uncounted(left_out: list[dict[str, Any]]) -> list[str]:
    return sorted(one["name"] for one in left_out if one["kind"] == "uncounted_table")


def eventually(claim: Callable[[], bool]) -> bool:
    """Whether the claim becomes true within the time that a server needs to apply a setting."""
    deadline = time.monotonic() + 10
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_lost_counters_are_recognised(fleet_factory: FleetFactory, tmp_path: Path) -> None:
    embedded = fleet_factory(shards=1, backups=0)
    with own_database(embedded, tmp_path, "counting") as fleet:
        (node,) = fleet.nodes
        execute(node.dsn, *SCHEMA)
        server = embedded.primaries[0]
        before = counters(fleet)
        stop_server(server)
        embedded.start_node(server)
        assert counters(fleet) == before, "a server that was stopped keeps its counters"
        execute(node.dsn, "UPDATE log SET what = 'lost'")
        kill_server(server)
        embedded.start_node(server)
        after = counters(fleet)
        assert (after.rows, has_changed(before, after), are_counters_unknown(before, after)) == ((0, 0), False, True)
        execute(node.dsn, "UPDATE log SET what = 'counted' WHERE at < 4")
        # The server counts when it ends the session, which may be after its client has.
        assert eventually(lambda: counters(fleet).rows == (3, 0))
        assert has_changed(before, counters(fleet))
        # Resetting another table's counters keeps these, but makes the counters of the whole database unknown.
        now = counters(fleet)
        execute(node.dsn, "SELECT pg_stat_reset_single_table_counters('keyed'::regclass)")
        assert (counters(fleet).rows, are_counters_unknown(now, counters(fleet))) == ((3, 0), True)
        for setting in ("DATABASE counting", "ROLE postgres", "ROLE postgres IN DATABASE counting", "SYSTEM"):
            now = counters(fleet)
            assert not are_counters_unknown(now, now)
            execute(node.dsn, f"ALTER {setting} SET track_counts = off", "SELECT pg_reload_conf()")
            assert eventually(lambda now=now: are_counters_unknown(now, counters(fleet))), setting
            execute(node.dsn, f"ALTER {setting} RESET track_counts", "SELECT pg_reload_conf()")
            assert eventually(lambda now=now: counters(fleet) == now), setting
