"""`list` of a real store: when cuts were made, when they were checked last, and a row per restore point."""

from __future__ import annotations

import csv
import io
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.in_process import run_and_capture, run_as_text, run_here
from tests.commands.snapshot_runs import COMMAND_SECONDS_MAX, Runs, command_line, runs_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "nightly"


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_on(shared_fleet, tmp_path_factory.mktemp("list"), spark) as found:
        found.full(NAME, comment='=1+1, "quoted"')
        found.increment(NAME)
        yield found


@pytest.fixture(scope="module")
def commits(runs: Runs) -> tuple[Commit, ...]:
    return read_chain(runs.fleet.store.open(), NAME).commits


def listed(runs: Runs) -> dict[str, Any]:
    code, document = run_here(runs.fleet, "list")
    assert code == 0
    (entry,) = document["snapshots"]
    assert isinstance(entry, dict)
    return entry


def flat(runs: Runs) -> list[dict[str, Any]]:
    code, document = run_here(runs.fleet, "list", "--flat")
    assert (code, document["schema"], document["warnings"]) == (0, "cutline/list-flat/1", [])
    rows = document["restore_points"]
    assert isinstance(rows, list)
    return rows


def test_every_document_says_when_the_cut_was_made(runs: Runs, commits: tuple[Commit, ...]) -> None:
    made_at = [commit.cut.made_at for commit in commits]
    began_at = [commit.created_at for commit in commits]
    # A cut is made after its command began, and before the next one begins.
    moments = [datetime.fromisoformat(str(one)) for pair in zip(began_at, made_at, strict=True) for one in pair]
    assert moments == sorted(moments)
    entry = listed(runs)
    (increment,) = entry["increments"]
    assert [(one["cut_at"], one["created_at"]) for one in (entry, increment)] == [*zip(made_at, began_at, strict=True)]
    shown = run_here(runs.fleet, "show", NAME)[1]
    assert [shown["cut_at"], shown["increments"][0]["cut_at"]] == made_at
    assert [row["cut_at"] for row in flat(runs)] == made_at
    safe_at = [commit.cut.safe_at for commit in commits]
    assert all(isinstance(one, str) for one in safe_at)
    assert [one["safe_at"] for one in (entry, increment)] == [row["safe_at"] for row in flat(runs)] == safe_at
    for text in (run_as_text(runs.fleet, "list"), run_as_text(runs.fleet, "list", "--flat")):
        assert all(str(one)[:19].replace("T", " ") + "Z" in text for one in made_at)


def test_a_row_stands_for_each_restore_point_in_json_and_in_csv(runs: Runs, commits: tuple[Commit, ...]) -> None:
    rows = flat(runs)
    assert [(row["snapshot"], row["increment"], row["type"]) for row in rows] == [
        (NAME, 0, "full"), (NAME, 1, "incremental"),
    ]  # fmt: skip
    assert [row["bytes"] for row in rows] == [commit.counts["bytes"] for commit in commits]
    assert [row["operation"] for row in rows] == [commit.operation for commit in commits]
    assert rows[0]["groups"] == ["public.account", "public.transfer"]
    assert rows[0]["nodes"] == [node.id for node in runs.fleet.primaries]
    assert sorted(rows[0]["baseline_nodes"]) == sorted(node.id for node in runs.fleet.nodes)
    for words in (("list", "--csv"), ("list", "--flat", "--csv")):
        code, text = run_and_capture(runs.fleet, *words)
        cells = list(csv.DictReader(io.StringIO(text, newline="")))
        assert code == 0
        assert [row["comment"] for row in cells] == ['\'=1+1, "quoted"', ""]
        assert [row["cut_at"] for row in cells] == [row["cut_at"] for row in rows]
        assert [int(row["bytes"]) for row in cells] == [row["bytes"] for row in rows]


def test_csv_and_json_exclude_each_other(runs: Runs) -> None:
    done = subprocess.run(
        [*command_line(runs.fleet, "list", "--flat", "--csv", "--json")],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--csv and --json are mutually exclusive" in done.stdout


def check(runs: Runs, *words: str) -> int:
    return run_here(runs.fleet, "check", *words, spark=runs.spark.running)[0]


def test_the_last_full_check_is_one_of_all_of_the_newest_restore_point(runs: Runs) -> None:
    before = datetime.now(UTC)
    assert (listed(runs)["last_check"], listed(runs)["last_full_check"]) == (None, None)
    # A part of it, or an earlier restore point, is not the whole.
    assert check(runs, NAME, "--metadata-only") == 4
    assert listed(runs)["last_check"]["result"] == "inconclusive"
    assert check(runs, NAME, "--increment", "0") == 0
    entry = listed(runs)
    assert (entry["last_check"]["increment"], entry["last_check"]["result"]) == (0, "valid")
    assert (entry["last_full_check"], entry["last_valid_check"]) == (None, None)
    title, full, _ = run_as_text(runs.fleet, "list").splitlines()[:3]
    assert full[title.index("checked") :].strip() == "just now, up to increment 0"
    assert check(runs) == 0
    entry = listed(runs)
    assert entry["last_full_check"] == entry["last_valid_check"] == entry["last_check"]
    assert (entry["last_check"]["increment"], entry["last_check"]["result"]) == (1, "valid")
    assert before < datetime.fromisoformat(entry["last_check"]["ended_at"]) < datetime.now(UTC)
    # One that sees less comes after it, and does not take its place.
    assert check(runs, NAME, "--metadata-only") == 4
    entry = listed(runs)
    assert (entry["last_check"]["result"], entry["last_full_check"]["result"]) == ("inconclusive", "valid")
    title, full, _ = run_as_text(runs.fleet, "list").splitlines()[:3]
    assert full[title.index("checked") :].startswith("valid just now")
    valid_at = entry["last_valid_check"]["ended_at"]
    assert [(row["check_result"], row["checked_at"], row["valid_at"]) for row in flat(runs)] == [
        ("valid", valid_at, valid_at)
    ] * 2
    checks = [one for one in run_here(runs.fleet, "history")[1]["operations"] if one["kind"] == "check"]
    # Those that began in the same second are in no order.
    checks.sort(key=lambda one: str(one["ended_at"]))
    assert [one["checked"][0]["full"] for one in checks] == [False, False, True, False]
