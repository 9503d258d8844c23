"""The store's folder goes away while a create works on it: nothing is stored elsewhere, and the chain goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.store_identity import StoreIdentity
from cutline.storage.local import LocalStore
from cutline.storage.store import StoreUnreachableError
from cutline.wal.segments.own_store import FLEET_KEY, StoreGoneError
from tests.commands.snapshot_runs import Runs, names_of_snapshots, runs_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "moved"


class Moving(Silent):
    """Calls `move` at a point."""

    def __init__(self, point: CrashPoint, move: Callable[[], object]) -> None:
        self.point, self.move = point, move

    def reached(self, point: str, *, node: str = "") -> None:
        if point == self.point:
            self.point, move = CrashPoint.RELEASED, self.move
            move()


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    for node in shared_fleet.primaries:
        execute(node.dsn(), "CREATE TABLE moved (id int PRIMARY KEY)")
    try:
        with runs_on(shared_fleet, tmp_path, spark) as found:
            found.full(NAME)
            yield found
    finally:
        for node in shared_fleet.primaries:
            execute(node.dsn(), "DROP TABLE moved")


@pytest.mark.parametrize("point", [CrashPoint.INTENT_STORED, CrashPoint.FINISHES_WRITTEN, CrashPoint.SEQUENCES_READ])
@pytest.mark.parametrize("is_full", [False, True], ids=["increment", "full"])
def test_a_folder_that_is_gone_is_not_made_again_and_the_chain_continues(
    runs: Runs, tmp_path: Path, point: CrashPoint, *, is_full: bool
) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    insert(runs, 1)
    with pytest.raises((StoreUnreachableError, StoreGoneError)):
        create(runs, "other" if is_full else NAME, Moving(point, lambda: store.rename(away)))
    assert not store.exists()
    away.rename(store)
    check_goes_on(runs)


@pytest.mark.parametrize("other", [False, True], ids=["nothing", "another store"])
@pytest.mark.parametrize("in_workers", [False, True], ids=["driver", "workers"])
@pytest.mark.parametrize("point", [CrashPoint.FINISHES_WRITTEN, CrashPoint.SEQUENCES_READ])
def test_what_is_in_its_place_is_not_taken_for_it(
    runs: Runs, tmp_path: Path, point: CrashPoint, monkeypatch: pytest.MonkeyPatch, *, in_workers: bool, other: bool
) -> None:
    """No slot is advanced past what is stored there, and nothing is committed."""
    store, away = tmp_path / "store", tmp_path / "away"
    if in_workers:
        monkeypatch.setattr("cutline.wal.drain.lags.SIDE_BY_SIDE_BYTES", -1)

    def replace() -> None:
        store.rename(away)
        store.mkdir()
        if other:
            LocalStore(store).create(FLEET_KEY, seal(StoreIdentity("eeeeeeee", runs.fleet.name)))

    insert(runs, 1)
    place = "a store of fleet eeeeeeee" if other else "nothing is there now"
    with pytest.raises(StoreGoneError, match=place):
        create(runs, NAME, Moving(point, replace))
    assert not list(store.glob("operations/*/outcome.json"))
    assert not list(store.glob("snapshots/*/increments/*"))
    shutil.rmtree(store)
    away.rename(store)
    check_goes_on(runs)


def create(runs: Runs, name: str, progress: Silent) -> None:
    take = create_increment if name == NAME else create_full
    take(runs.fleet, CreateRequest(name), runs.spark, progress)


def check_goes_on(runs: Runs) -> None:
    """The next increment has everything, and nothing else is there."""
    insert(runs, 2)
    assert runs.increment(NAME).increment == 1
    assert names_of_snapshots(runs.fleet) == [NAME]
    assert runs.check_one(NAME).result == "valid"


def insert(runs: Runs, number: int) -> None:
    for node in runs.fleet.primaries:
        with psycopg.connect(node.dsn) as connection:
            connection.execute("INSERT INTO moved VALUES (%s)", (number,))
