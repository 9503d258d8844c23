"""`check --restorable` builds every row that a restore would load, wherever the fold of the changes has left it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.snapshots.fold import limits
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


@pytest.mark.parametrize("changes_max", [limits.CHANGES_MAX, 0], ids=["driver", "jobs"])
def test_rows_that_increments_changed_are_built(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes_max: int
) -> None:
    with own_database(shared_fleet, tmp_path, "restorable") as fleet:
        runs = Runs(fleet, Ready(spark))
        execute(fleet.nodes[0].dsn, *FIRST)
        runs.init()
        runs.full("small")
        execute(fleet.nodes[0].dsn, *THEN)
        runs.increment("small")
        monkeypatch.setattr(limits, "CHANGES_MAX", changes_max)
        _, document = run_here(fleet, "check", "small", "--restorable", spark=spark)
        assert document["snapshots"][0]["conflicts"] == []
        assert document["restorable"]["rows"] == {fleet.nodes[0].id: ROWS}
