"""The main job, by its commands on S3 and the like: a busy bank, a full snapshot, increments, restores of their states.

The last increment is checked by what is new in it, and taken while the bank is idle: its state must equal the sources
row for row, by PostgreSQL's own sorted COPY. The short form takes three increments and restores the last state and one
that the seed draws; the long form takes five and restores all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet, load_fleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, names_of_snapshots, sorted_copies
from tests.run.soak import SEED, SOAK_SECONDS
from tests.s3.kinds import NAMED_URL, ONE_KIND, S3Place
from tests.servers.dealt import start_fleet
from tests.stores.place import StorePlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "main"
INCREMENTS = 5 if SOAK_SECONDS else 3
STATES = range(INCREMENTS + 1)
RESTORED = [*STATES] if SOAK_SECONDS else [random.Random(SEED).randrange(INCREMENTS), INCREMENTS]
TRANSACTIONS_BETWEEN = 100
WAIT_SECONDS = 0.05


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A new second fleet, without the database that a restore creates."""
    directory = tmp_path_factory.mktemp("target") / "fleet"
    fleet = start_fleet(directory, shards=2, backups=0, schema=False, settings={"fsync": "off"}, like_shared=True)
    try:
        yield load_fleet(fleet.fleet_toml)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture(params=[ONE_KIND, "minio", "gs", "az", *["named_s3"] * bool(NAMED_URL)])
def runs(
    request: pytest.FixtureRequest, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> Iterator[Runs]:
    """The shared fleet with an empty bucket."""
    server: S3Place | StorePlace = request.getfixturevalue(request.param)
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", server.bucket("main-job"), server.options)
    with dropping_slots(fleet):
        yield Runs(fleet, Ready(spark))


def wait_for_transactions(bank: BankWorkload) -> None:
    enough = bank.committed.total + TRANSACTIONS_BETWEEN
    while bank.committed.total < enough:
        assert bank.wait(WAIT_SECONDS)


def test_every_state_of_a_busy_bank_is_restored_consistently(
    runs: Runs, target: Fleet, shared_fleet: EmbeddedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A restore writes there what was in doubt at the cut.
    monkeypatch.chdir(tmp_path)

    def snapshot(*words: str) -> dict[str, Any]:
        code, document = run_here(runs.fleet, *words, spark=runs.spark.running)
        assert code == 0, document
        return document

    snapshot("init")
    with BankWorkload(shared_fleet.dsns(), clients=4, pause_seconds=0.005) as bank:
        commits = [snapshot("create", NAME)]
        for _ in range(INCREMENTS - 1):
            wait_for_transactions(bank)
            commits.append(snapshot("create", NAME, "--incremental"))
        wait_for_transactions(bank)
        bank.stop()
        crossed = bank.committed.cross
    read = snapshot("check", NAME)
    commits.append(snapshot("create", NAME, "--incremental"))
    assert [commit["increment"] for commit in commits] == [*STATES]
    assert all(commit["transactions"] >= TRANSACTIONS_BETWEEN for commit in commits[1:])
    (listed,) = snapshot("list")["snapshots"]
    assert [one["number"] for one in listed["increments"]] == [*STATES][1:]

    restored = [node.dsn for node in target.primaries]
    transfers = []
    for increment in RESTORED:
        report = snapshot(
            "restore", NAME, "--increment", str(increment), "--to", str(target.path), "--replace", "--yes"
        )
        assert report["increment"] == increment
        found = read_invariants(restored)
        assert found.hold, (increment, found)
        transfers.append(sum(found.transfers))
    assert transfers == sorted(set(transfers)), "a later state has no more transfers than an earlier one"
    for source, copy in zip(shared_fleet.dsns(), restored, strict=True):
        assert sorted_copies(copy) == sorted_copies(source)

    (checked,) = read["snapshots"]
    assert read["result"] == checked["result"] == "valid"
    assert (checked["conflicts"], checked["skipped"]) == ([], [])
    assert 0 < checked["compared"]["transactions"] <= crossed
    assert checked["compared"]["partitions"] >= 4
    (newer,) = snapshot("check", NAME, "--since-last")["snapshots"]
    assert (newer["result"], newer["increment"]) == ("valid", INCREMENTS)
    assert newer["rests_on"] is not None
    assert newer["compared"]["objects"] < checked["compared"]["objects"]
    assert names_of_snapshots(runs.fleet) == [NAME]
