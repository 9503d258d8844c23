"""The store's folder goes away while a create works on it: nothing is stored elsewhere, and the chain goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.progress import Silent
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.operations.crash_points import CrashPoint
from snapshots.records.documents import seal
from snapshots.records.store_identity import FLEET_KEY, StoreGoneError, StoreIdentity
from storage.local import LocalStore
from storage.store import StoreUnreachableError
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


@pytest.mark.parametrize("point", [CrashPoint.INTENT_STORED, CrashPoint.FINISHES_WRITTEN])
def test_an_empty_mount_point_gets_nothing_and_the_chain_continues(
    runs: Runs, tmp_path: Path, point: CrashPoint
) -> None:
    store, away = tmp_path / "store", tmp_path / "away"

    def unmount() -> None:
        store.rename(away)
        store.mkdir()

    insert(runs, 1)
    with pytest.raises(StoreUnreachableError, match="another folder is in its place"):
        create(runs, NAME, Moving(point, unmount))
    store.rmdir()
    away.rename(store)
    check_goes_on(runs)


def test_what_is_committed_is_not_in_the_store_of_another_fleet(runs: Runs, tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"

    def replace() -> None:
        store.rename(away)
        LocalStore(store).create(FLEET_KEY, seal(StoreIdentity("eeeeeeee", runs.fleet.name)))

    insert(runs, 1)
    with pytest.raises(StoreGoneError, match="in its place is a store of fleet eeeeeeee"):
        create(runs, NAME, Moving(CrashPoint.SEQUENCES_READ, replace))
    assert not [one for one in LocalStore(store).list("") if one.startswith("snapshots/")]
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
