"""A command reads each commit of a chain once, except where a second read protects the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.local import LocalStore
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Runs, runs_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "read-once"


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_on(shared_fleet, tmp_path_factory.mktemp("read-once"), spark) as found:
        yield found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each object was read that existed."""
    counts, read_range = Counter[str](), LocalStore.read_range

    def counted(store: LocalStore, key: str, start: int, length: int) -> bytes:
        body = read_range(store, key, start, length)
        counts[key] += 1
        return body

    monkeypatch.setattr(LocalStore, "read_range", counted)
    return counts


def test_a_command_reads_each_commit_of_a_chain_once(runs: Runs, reads: Counter[str]) -> None:
    def commits_read(*words: str) -> dict[int, int]:
        """Run a command; return how often it read each commit, by increment."""
        reads.clear()
        code, document = run_here(runs.fleet, *words, spark=runs.spark.running)
        assert code == 0, document
        return {number: count for number in range(5) if (count := reads[commit_key(NAME, number)])}

    increment = ("create", NAME, "--incremental")
    assert commits_read("create", NAME) == {}
    # An increment reads its predecessor again right before its own commit: the lock may have been lost in between.
    assert commits_read(*increment) == {0: 2}
    assert commits_read(*increment) == {0: 1, 1: 2}
    assert commits_read(*increment) == {0: 1, 2: 2}
    assert commits_read(*increment, "--dry-run") == {0: 1, 3: 1}
    assert commits_read("check", NAME) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert commits_read("restore", NAME, "--replace", "--dry-run") == {0: 1, 1: 1, 2: 1, 3: 1}
    # The newest increment says whether a failover has lost what it has.
    assert commits_read("restore", NAME, "--increment", "0", "--replace", "--dry-run") == {0: 1, 3: 1}
