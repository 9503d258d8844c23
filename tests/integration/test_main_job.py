"""The main job: a bank at work, a full snapshot and five increments, and each of the six states restored.

Once with a folder as the store and once with S3. The last increment is taken with the bank at rest: that
state must equal the sources row for row, by PostgreSQL's own sorted COPY.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.bank import read_invariants
from embedded.bank_workload import BankWorkload
from embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from fleet.config import Fleet, load_fleet
from tests.s3_server import S3Server
from tests.snapshot_runs import Ready, Runs, chains_dropped, described, names_of_snapshots, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "main"
INCREMENTS = 5
TRANSACTIONS_BETWEEN = 100
WAIT_SECONDS = 0.05


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fresh second fleet, without the database that is restored into it."""
    directory = tmp_path_factory.mktemp("target") / "fleet"
    fleet = start_fleet(directory, shards=2, backups=0, schema=False)
    try:
        yield load_fleet(fleet.fleet_toml)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture(params=["folder", "s3"])
def runs(
    request: pytest.FixtureRequest, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> Iterator[Runs]:
    """The shared fleet with an empty store of each kind."""
    if request.param == "folder":
        fleet = described(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    else:
        server: S3Server = request.getfixturevalue("s3")
        fleet = described(shared_fleet, tmp_path / "fleet.toml", server.bucket("main-job"), server.options)
    with chains_dropped(fleet):
        yield Runs(fleet, Ready(spark))


def work(bank: BankWorkload) -> None:
    enough = bank.committed.total + TRANSACTIONS_BETWEEN
    while bank.committed.total < enough:
        assert bank.wait(WAIT_SECONDS)


def test_each_of_six_states_of_a_bank_at_work_comes_back(
    runs: Runs, target: Fleet, shared_fleet: EmbeddedFleet
) -> None:
    runs.init()
    with BankWorkload(shared_fleet.dsns(), clients=4, pause_seconds=0.005) as bank:
        commits = [runs.full(NAME)]
        for _ in range(INCREMENTS - 1):
            work(bank)
            commits.append(runs.increment(NAME))
        work(bank)
        bank.stop()
        crossed = bank.committed.cross
    commits.append(runs.increment(NAME))
    assert [commit.increment for commit in commits] == list(range(INCREMENTS + 1))
    assert all(commit.counts["transactions"] >= TRANSACTIONS_BETWEEN for commit in commits[1:])

    restored = [node.dsn for node in target.primaries]
    transfers = []
    for increment in range(INCREMENTS + 1):
        report = runs.restore(NAME, target, increment)
        assert report.increment == increment
        found = read_invariants(restored)
        assert found.hold, (increment, found)
        transfers.append(sum(found.transfers))
    assert transfers == sorted(set(transfers)), "every state has seen more than the one before"
    for source, copy in zip(shared_fleet.dsns(), restored, strict=True):
        assert sorted_copies(copy) == sorted_copies(source)

    report = runs.check_one(NAME)
    assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
    assert report.compared.transactions > 0
    assert report.compared.transactions <= crossed
    assert report.compared.partitions >= 4
    assert names_of_snapshots(runs.fleet) == [NAME]
