"""What reads no rows starts no JVM: dry runs, and the check of metadata."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import Runs, runs_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
# Prints the exit code, the programs of Spark that were started, and whether pyspark was imported.
NOTING = """
import json, sys
started = []
sys.addaudithook(lambda name, values: started.append(str(values[:2])) if name == "subprocess.Popen" else None)
from cutline.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, [one for one in started if "spark" in one or "java" in one], "pyspark" in sys.modules]))
"""


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store, a full snapshot `daily` and an increment."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("jvm"), spark) as found:
        found.full("daily")
        found.increment("daily")
        yield found


def noted(runs: Runs, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", NOTING, "--quiet", "--fleet", str(runs.fleet.path), *words],
        capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "words",
    [
        ("check", "daily", "--metadata-only"),
        ("check", "--metadata-only"),
        ("create", "weekly", "--dry-run"),
        ("create", "daily", "--incremental", "--dry-run"),
        ("create", "point", "--only-cut", "--dry-run"),
        ("restore", "daily", "--replace", "--dry-run"),
        ("restore-discard", "--dry-run"),
        ("prune", "--keep-full", "1", "--dry-run"),
        ("delete", "daily", "--force", "--dry-run"),
        ("gc", "--dry-run"),
    ],
    ids=" ".join,
)
def test_it_starts_no_jvm(runs: Runs, words: tuple[str, ...]) -> None:
    # A check that reads no rows is inconclusive.
    assert noted(runs, *words) == [4 if words[0] == "check" else 0, [], False]


def test_a_check_of_rows_starts_one(runs: Runs) -> None:
    code, started, is_imported = noted(runs, "check", "daily")
    assert (code, is_imported) == (0, True)
    assert started
