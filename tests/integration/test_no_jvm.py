"""What reads no rows starts no JVM: dry runs, and the check of metadata. Nor does what reads few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.noted_command import noted
from tests.commands.snapshot_runs import Runs, runs_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What reads rows would start it, however few.
BY_SPARK = "from tests.run.by_spark import work_by_spark; work_by_spark()\n"


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store, a full snapshot `daily` and an increment."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("jvm"), spark) as found:
        found.full("daily")
        found.increment("daily")
        yield found


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
        ("prune", "--keep-last", "1", "--dry-run"),
        ("delete", "daily", "--force", "--dry-run"),
        ("gc", "--dry-run"),
    ],
    ids=" ".join,
)
def test_it_starts_no_jvm(runs: Runs, words: tuple[str, ...]) -> None:
    # A check that reads no rows is inconclusive.
    assert noted(runs.fleet, *words, before=BY_SPARK) == [4 if words[0] == "check" else 0, [], False]


def test_few_rows_and_large_objects_need_no_jvm(runs: Runs) -> None:
    (node, *_) = runs.fleet.primaries
    execute(node.dsn, "SELECT lo_from_bytea(4711, 'few bytes')")
    try:
        assert noted(runs.fleet, "create", "large", "--large-objects")[:2] == [0, []]
        assert noted(runs.fleet, "check", "daily", "--restorable")[:2] == [0, []]
        assert noted(runs.fleet, "drill", "large")[1] == []
    finally:
        execute(node.dsn, "SELECT lo_unlink(4711)")
