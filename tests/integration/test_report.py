"""`report` and `show --timeline` of a real chain: what they show is what happened."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.cli.output.tables import time_text
from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Runs, removing_new_transfers, runs_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW = "INSERT INTO transfer VALUES (gen_random_uuid(), 1, 10001, 0, '2026-01-01')"
ACROSS = "across both shards"
ROWS = 7
KINDS = ("full", "increment", "check")


@pytest.fixture(scope="module")
def committed() -> list[datetime]:
    """When the transaction across both shards was committed: before and after."""
    return []


@pytest.fixture(scope="module")
def runs(
    shared_fleet: EmbeddedFleet,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    committed: list[datetime],
) -> Iterator[Runs]:
    """A full snapshot; an increment of seven rows, with a transaction in flight across its cut; one after its end.

    Then a check of all but the last increment.
    """
    with (
        runs_on(shared_fleet, tmp_path_factory.mktemp("report"), spark) as found,
        removing_new_transfers(shared_fleet.dsns()),
    ):
        first, second = (node.dsn for node in found.fleet.primaries)
        found.full("daily", comment="<script>alert(1)</script>")
        for _ in range(ROWS):
            execute(first, ROW)
        for dsn in (first, second):
            execute(dsn, f"BEGIN; {ROW}; PREPARE TRANSACTION '{ACROSS}'")
        try:
            found.increment("daily")
        finally:
            committed.append(datetime.now(UTC))
            for dsn in (first, second):
                execute(dsn, f"COMMIT PREPARED '{ACROSS}'")
            committed.append(datetime.now(UTC))
        found.increment("daily")
        assert run_here(found.fleet, "check", "daily", "--increment", "1", spark=spark)[0] == 0
        yield found


@pytest.fixture(scope="module")
def document(runs: Runs) -> dict[str, Any]:
    code, found = run_here(runs.fleet, "report", "daily")
    assert code == 0
    return found


def test_points_have_the_times_and_transactions_of_their_cuts(runs: Runs, document: dict[str, Any]) -> None:
    (snapshot,) = document["snapshots"]
    points = snapshot["points"]
    assert [one["increment"] for one in points] == [0, 1, 2]
    # Prepared on both shards at the second cut, committed before the third.
    assert [(one["in_flight"], one["included_early"]) for one in points] == [(0, 0), (1, 0), (0, 0)]
    assert [one["global_transactions"] for one in points] == [0, 0, 1]
    assert points[1]["transactions"] == ROWS
    times = [datetime.fromisoformat(one["cut_at"]) for one in points]
    assert times == sorted(times)
    # Less than a day shows no growth in a day.
    assert snapshot["growth_bytes_per_day"] is None
    assert snapshot["bytes"] == sum(one["bytes"] for one in points)
    # Two spans have no median.
    assert document["gaps"] == {"median_seconds": None, "limit_seconds": None, "found": []}


def test_nodes_that_are_idle_have_no_lag_and_say_since_when_they_are(
    document: dict[str, Any], committed: list[datetime]
) -> None:
    before, after = committed
    last = document["snapshots"][0]["points"][2]
    cut_at = datetime.fromisoformat(last["cut_at"])
    assert last["lags"].keys() == {"s1", "s2"}
    for lag in last["lags"].values():
        # The servers and this process have one clock, and commits have times in milliseconds.
        assert 0 <= lag["seconds"] <= last["cut_seconds"] + 1.0
        idle_since = cut_at - timedelta(seconds=lag["idle_seconds"])
        assert before - timedelta(milliseconds=1) <= idle_since <= after
    safe_at = cut_at - timedelta(seconds=max(lag["seconds"] for lag in last["lags"].values()))
    assert last["safe_at"] == time_text(safe_at)


def test_phases_are_those_of_each_command_and_no_longer_than_it(runs: Runs, document: dict[str, Any]) -> None:
    phases = {kind: {one["phase"]: one for one in document["phases"] if one["kind"] == kind} for kind in KINDS}
    assert phases["full"].keys() >= {"check nodes", "slots", "copy", "cut", "archive WAL", "commit"}
    assert phases["increment"].keys() >= {"check the chain", "cut", "archive WAL", "commit"}
    assert phases["check"].keys() >= {"check commits", "read WAL archive", "fold changes"}
    assert {one["operations"] for one in phases["increment"].values()} == {2}
    full, *increments = document["snapshots"][0]["points"]
    # The outcome comes after the commit, which says how long it took until then; both are rounded.
    taken = sum(one["mean_seconds"] for one in phases["full"].values())
    assert full["seconds"] - 0.1 <= taken <= full["seconds"] + 5.0
    longest = sum(one["longest_seconds"] for one in phases["increment"].values())
    assert longest >= max(one["seconds"] for one in increments) - 0.1
    assert document["operations"] == {"read": 4, "are_all": True, "untimed": 0}


def test_the_check_is_there_with_what_it_compared(runs: Runs, document: dict[str, Any]) -> None:
    (check,) = document["checks"]
    assert (check["snapshot"], check["increment"], check["result"]) == ("daily", 1, "valid")
    figures = check["figures"]
    assert (figures["skipped"], figures["examples"], figures["conflicts"]) == (0, [], 0)
    rows = 0
    for node in runs.fleet.nodes:
        with psycopg.connect(node.dsn) as connection:
            (counted,) = connection.execute(
                "SELECT (SELECT count(*) FROM account) + (SELECT count(*) FROM transfer)"
            ).fetchone() or (0,)
            rows += counted
    # What was written after the base copies is no row of theirs: on two nodes seven rows, on all four one.
    assert figures["compared"]["rows"] == rows - 2 * ROWS - 4
    history = run_here(runs.fleet, "history")[1]["operations"]
    # It may have begun in the same second as the increment before it: then either may be the first.
    (ended,) = (one for one in history if one["kind"] == "check")
    assert ended["checked"][0]["figures"] == figures
    assert ended["phases"].keys() >= {"check daily", "read WAL archive"}


def test_the_page_and_the_terminal_show_the_chain(
    runs: Runs, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.html"
    assert run_as_text(runs.fleet, "report", "--html", str(file)) == f"{file}: 1 snapshot, 3 restore points\n"
    page = file.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "2 valid, 1 unknown" in page
    # The fonts of such a terminal lack the blocks.
    monkeypatch.setenv("TERM", "linux")
    assert run_as_text(runs.fleet, "show", "daily", "--timeline").isascii()
    monkeypatch.setenv("TERM", "xterm")
    shown = run_as_text(runs.fleet, "show", "daily", "--timeline")
    assert "2 valid, 1 unknown" in shown
    (flight,) = (line for line in shown.splitlines() if line.lstrip().startswith("in flight"))
    assert (flight.count("█"), flight.count("▁"), flight.split()[-1]) == (1, 2, "1")
    _, with_timeline = run_here(runs.fleet, "show", "daily", "--timeline")
    same = ("snapshots", "phases", "checks", "fleet")
    assert {name: with_timeline["timeline"][name] for name in same} == {name: document[name] for name in same}
    assert datetime.fromisoformat(with_timeline["timeline"]["made_at"]) <= datetime.now(UTC)
