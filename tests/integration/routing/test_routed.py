"""Restore three shards into one database and into two, and one into three: rows, keys, sequences, views."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from tests.commands.watching import Reached, Watching
from tests.integration.routing.routed_place import (
    GOOD,
    NAME,
    ROUTES,
    SINGLE,
    TABLES,
    RoutedPlace,
    with_database_name,
)
from tests.run.soak import SOAK_SECONDS, first

KILL_SECONDS_MAX = 600
ROOT = Path(__file__).parents[3]
KEYS_QUERY = (
    "SELECT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint WHERE contype = 'f' ORDER BY 1, 2"
)
SEQUENCES_QUERY = "SELECT (SELECT last_value FROM upward), (SELECT last_value FROM downward)"


def test_three_shards_become_one_database(place: RoutedPlace) -> None:
    report = place.restore(place.plan(1, "public.rate=all"))
    union = {table: sorted(line for rows in place.truth for line in rows[table]) for table in TABLES}
    union["rate"] = place.truth[0]["rate"]
    assert place.rows(1) == union
    assert [(one.node, one.rows) for one in report.nodes] == [("t1", sum(map(len, union.values())))]
    # All foreign keys hold in one database, and the sequence that counts down is furthest where it is lowest.
    assert place.query(1, KEYS_QUERY) == [("entry", "account"), ("entry", "rate"), ("person", "account")]
    assert place.query(1, SEQUENCES_QUERY) == [(102, -102)]
    assert place.query(1, "SELECT (SELECT sum FROM total) = (SELECT sum(balance) FROM account)") == [(True,)]
    assert report.left_out == []
    said = " / ".join(report.remarks)
    assert "furthest" in said
    assert "combined" in said
    assert "public.log" in said


def assert_two(place: RoutedPlace, report: RestoreReport) -> None:
    """Assert that two targets are as PostgreSQL's functions place the rows."""
    expected = place.expected(2)
    assert [place.rows(1), place.rows(2)] == expected
    assert all(rows[table] for rows in expected for table in TABLES)
    assert [one.rows for one in report.nodes] == [sum(map(len, rows.values())) for rows in expected]
    # Entries follow their account, rates are on both; persons are divided by their names.
    for number in (1, 2):
        assert place.query(number, KEYS_QUERY) == [("entry", "account"), ("entry", "rate")]
        assert place.query(number, SEQUENCES_QUERY) == [(102, -102)]
    assert [line.partition(":")[0] for line in report.left_out] == [
        f'foreign key "person_account_fkey" of "public"."person" on t{number}' for number in (1, 2)
    ]
    assert {one.table: one.route for one in report.routes}["public.rate"] == "all"


@pytest.mark.skipif(not SOAK_SECONDS, reason="the restore that is resumed below is the same, and more")
def test_three_shards_become_two(place: RoutedPlace) -> None:
    assert_two(place, place.restore(place.plan(2, *ROUTES)))


def check_ranges_and_nodes(place: RoutedPlace) -> None:
    """One shard becomes three."""
    routes = (
        "public.account=range(id, 0, 100, 250)", "public.entry=range(account, 0, 100, 250)", "public.person=node('t2')",
        "public.rate=node('t2')", "*=node('t3')",
    )  # fmt: skip
    fleet = place.single.fleet
    plan = plan_restore(fleet, place.target(3), RestoreRequest(SINGLE, routes=routes))
    report = restore_fleet(plan, place.runs.spark, Silent())
    truth, found = place.truth[0], [place.rows(number) for number in (1, 2, 3)]
    for table, field in (("account", 0), ("entry", 2)):
        for rows, low, high in zip(found, (0, 100, 250), (100, 250, 1 << 60), strict=True):
            assert rows[table] == [one for one in truth[table] if low <= int(one.split(b"\t")[field]) < high]
            assert rows[table]
    for table, target in (("person", 1), ("rate", 1), ("badge", 2), ("log", 2)):
        assert [rows[table] for rows in found] == [truth[table] if n == target else [] for n in range(3)]
    # Accounts and entries have the same ranges; the account of a person and the rate of an entry may be elsewhere.
    assert [place.query(number, KEYS_QUERY) for number in (1, 2, 3)] == [[("entry", "account")]] * 3
    assert [place.query(number, SEQUENCES_QUERY) for number in (1, 2, 3)] == [[(100, -100)]] * 3
    assert report.rows == sum(map(len, truth.values()))


def check_names(place: RoutedPlace) -> None:
    """A column names the target of each row."""
    place.restore(place.plan(3, "public.account=column(region)", groups=("public.account",)))
    every = sorted(line for rows in place.truth for line in rows["account"])
    for number in (1, 2, 3):
        wanted = [line for line in every if line.split(b"\t")[1] == b"t%d" % number]
        assert wanted
        assert place.rows(number)["account"] == wanted


@pytest.mark.parametrize("check", first([check_ranges_and_nodes, check_names]))
def test_rows_go_where_a_column_says(place: RoutedPlace, check: Callable[[RoutedPlace], None]) -> None:
    check(place)


def test_a_restore_that_lacks_only_its_outcome_reports_its_routes(place: RoutedPlace) -> None:
    def then(reached: Reached) -> None:
        if reached.point == RestoreCrashPoint.SLOTS_RELEASED:
            raise NodeUnreachableError("node t2: it is gone", hint="bring it back")

    request = RestoreRequest(SINGLE, groups=("*.badge", "*.log"), routes=("*.badge=hash(id)", "*=all"))
    fleet, target = place.single.fleet, place.target(2)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(fleet, target, request), place.runs.spark, Watching(then))
    report = resume_restore(fleet, target, RestoreRequest(SINGLE), place.runs.spark, Silent())
    assert [tuple(one) for one in report.routes] == [("public.badge", "hash(id)"), ("public.log", "all")]
    assert "s1 go to t1, t2" in report.remarks


def test_a_restore_killed_in_the_load_is_resumed_and_loads_nothing_twice(place: RoutedPlace) -> None:
    target = place.target(2)
    words = ["restore", NAME, "--to", str(target.path), "--increment", str(GOOD)]
    words += [word for route in ROUTES for word in ("--route", route)]
    program = [
        sys.executable,
        "-m",
        "tests.faults.signalled_command",
        "SIGKILL",
        str(RestoreCrashPoint.ROWS_LOADED),
        "1",
    ]
    done = subprocess.run(
        [*program, "--", "--fleet", str(place.runs.fleet.path), *words],
        capture_output=True, text=True, timeout=KILL_SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stdout, done.stderr)
    # As if the process had ended between the commits of two databases: the second has none of the tasks of the first.
    (loading,) = (name for name in place.databases() if name.startswith("elsewhere_restoring"))
    with psycopg.connect(
        with_database_name(place.servers.dsns()[1]).replace("/elsewhere", f"/{loading}")
    ) as connection:
        (ledger,) = connection.execute(
            "SELECT format('%I.ledger', nspname) FROM pg_namespace WHERE nspname LIKE 'cutline%'"
        ).fetchone() or ("",)
        connection.execute(f"TRUNCATE {ledger}, {', '.join(TABLES)}".encode())
    reordered = place.folder / "reordered.toml"
    text = target.path.read_text()
    reordered.write_text(text.replace('"t1"', '"t0"').replace('"t2"', '"t1"').replace('"t0"', '"t2"'))
    with pytest.raises(UnfinishedRestoreError, match=r"on t1 belongs to shard t2, not to t1"):
        resume_restore(place.runs.fleet, load_fleet(reordered), RestoreRequest(NAME), place.runs.spark, Silent())
    report = resume_restore(place.runs.fleet, target, RestoreRequest(NAME), place.runs.spark, Silent())
    assert_two(place, report)
    assert report.is_resumed
