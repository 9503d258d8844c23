"""A chain with an object missing from the store is refused by name, and continues once the object is back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.messages import NEW_CHAIN
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations.committing import ObjectsNotStoredError
from cutline.snapshots.records.commit import Commit, Increment
from cutline.snapshots.records.proven_chains import commit_key, snapshot_names
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import create, execute, refused, take_increment
from tests.run.soak import SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "chain"
COMMITS = ["full", "first", "newest"]
PATTERNS = ["base/s1/*/*.parquet", "wal/s1/*/*2.parquet", "schema/s1/*/archive-*"]
# After these refusals, begin a new chain and continue the old one, as a refusal changes nothing. The long
# form does so after each.
AFTER = [*COMMITS, *PATTERNS] if SOAK_SECONDS else ["newest", PATTERNS[1]]


class BusyRuns(Runs):
    """Every increment has a change, and therefore a segment."""

    def increment(self, name: str) -> Commit:
        write(self)
        return Runs.increment(self, name)


def write(runs: Runs) -> None:
    execute(runs.fleet.nodes[0].dsn, "INSERT INTO busy DEFAULT VALUES")


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """One primary of the shared fleet, with a chain of two increments in a new store."""
    directory = tmp_path_factory.mktemp("store-refusals")
    fleet = configure_fleet(shared_fleet, directory / "fleet.toml", f"file://{directory}/store")
    fleet = replace(fleet, nodes=fleet.primaries[:1])
    found = BusyRuns(fleet, Ready(spark))
    execute(fleet.nodes[0].dsn, "CREATE TABLE busy (id serial PRIMARY KEY)")
    try:
        with dropping_slots(fleet):
            found.init()
            found.full(NAME)
            found.increment(NAME)
            found.increment(NAME)
            yield found
    finally:
        execute(fleet.nodes[0].dsn, "DROP TABLE busy")


def store_of(runs: Runs) -> Path:
    return Path(runs.fleet.store.url.removeprefix("file://"))


def newest_increment(runs: Runs) -> int:
    return len(list((store_of(runs) / "snapshots" / NAME / "increments").iterdir()))


@contextmanager
def object_removed(runs: Runs, key: str) -> Iterator[None]:
    """Take the object away from the store, and put it back at the end."""
    file, aside = store_of(runs) / key, store_of(runs).with_name("aside")
    file.rename(aside)
    try:
        yield
    finally:
        aside.rename(file)


@pytest.mark.parametrize("which", COMMITS)
def test_a_missing_commit_is_named_and_the_chain_continues_once_it_is_back(runs: Runs, which: str) -> None:
    number = {"full": 0, "first": 1, "newest": newest_increment(runs)}[which]
    key = commit_key(NAME, number)
    with object_removed(runs, key):
        with refused(runs.fleet, "snapshot-missing") as errors:
            take_increment(runs.fleet, NAME)
        (error,) = errors
        assert error.message.endswith(f"was committed, but its commit file is missing from the store: {key}")
        assert error.details["increment"] == number
        assert error.hint == f"fetch it from a copy of the store: snapshot repair {NAME} --from URL; or {NEW_CHAIN}"
        if number == 0:
            # A snapshot of the same name would collide with the increments of the old chain.
            with refused(runs.fleet, "snapshot-missing"):
                create(runs.fleet, NAME)
        if which in AFTER:
            runs.init()
            assert runs.full(f"after-{which}").increment == 0
            assert runs.increment(f"after-{which}").increment == 1
    if which in AFTER:
        assert runs.increment(NAME).increment == newest_increment(runs)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_missing_object_is_named_and_the_chain_continues_once_it_is_back(runs: Runs, pattern: str) -> None:
    file = next((store_of(runs) / "snapshots" / NAME).glob(pattern))
    key = str(file.relative_to(store_of(runs)))
    with object_removed(runs, key):
        with refused(runs.fleet, "chain-object-missing") as errors:
            take_increment(runs.fleet, NAME)
        assert f"object {key} of " in errors[0].message
        assert errors[0].details["object"] == key
    if pattern in AFTER:
        assert runs.increment(NAME).increment == newest_increment(runs)


def test_a_changed_global_id_rule_is_refused_until_it_is_set_back(runs: Runs) -> None:
    with refused(runs.fleet, "global-id-rule-changed") as errors:
        take_increment(replace(runs.fleet, global_id="xa"), NAME)
    assert errors[0].hint.startswith("change it back in fleet.toml")
    assert runs.increment(NAME).increment == newest_increment(runs)


def test_a_store_without_a_fleet_is_refused_until_init(runs: Runs, tmp_path: Path) -> None:
    elsewhere = Runs(replace(runs.fleet, store=StoreLocation(f"file://{tmp_path}/new")), runs.spark)
    with refused(runs.fleet, "store-not-initialised") as errors:
        create(elsewhere.fleet, NAME)
    assert errors[0].hint.endswith("run: snapshot init")
    elsewhere.init()
    assert elsewhere.full("first").increment == 0
    with refused(elsewhere.fleet, "store-of-another-fleet") as errors:
        create(replace(elsewhere.fleet, name="another"), "second")
    assert "'another'" in errors[0].message


def test_an_increment_continues_after_one_that_archived_and_died(runs: Runs) -> None:
    """The slot is ahead of the commits, but not of the archive: that is no gap."""
    commit = runs.increment(NAME)
    (store_of(runs) / commit_key(NAME, commit.increment)).unlink()
    shutil.rmtree(store_of(runs) / "operations" / commit.operation)
    assert runs.increment(NAME).increment == commit.increment


@pytest.mark.parametrize(
    ("point", "pattern"),
    [(CrashPoint.DDL_STORED, "base/s1/*/*.parquet"), (CrashPoint.RESOLVED, "wal/s1/*/*.parquet")],
)
def test_what_was_reported_as_stored_and_is_not_there_is_not_committed(
    runs: Runs, tmp_path: Path, point: CrashPoint, pattern: str
) -> None:
    """As with an executor that has the store's folder on a disk of its own."""
    name, lost = f"lost-{point.name.lower()}", list[str]()
    slots = slots_of(runs.fleet.nodes[0].dsn)

    def lose(reached: Reached) -> None:
        if reached.point == point:
            for file in (store_of(runs) / "snapshots" / name).glob(pattern):
                lost.append(str(file.relative_to(store_of(runs))))
                file.rename(tmp_path / file.name)

    with pytest.raises(ObjectsNotStoredError) as raised:
        create_full(runs.fleet, CreateRequest(name), runs.spark, Watching(lose))
    error = raised.value
    assert (error.exit_code, error.details["missing"], error.details["other_size"]) == (3, len(lost), 0)
    assert lost
    assert lost[0] in error.message
    assert not (store_of(runs) / commit_key(name, 0)).exists()
    assert slots_of(runs.fleet.nodes[0].dsn) == slots
    assert name not in snapshot_names(runs.fleet.store.open())


def test_an_increment_whose_segment_is_not_there_is_not_committed_and_the_next_copies_the_node_again(
    runs: Runs, tmp_path: Path
) -> None:
    wal = store_of(runs) / "snapshots" / NAME / "wal"
    known, number = set(wal.glob("s1/*/*.parquet")), newest_increment(runs)
    lost: dict[Path, Path] = {}

    def lose(reached: Reached) -> None:
        if reached.point == CrashPoint.RESOLVED:
            lost.update({file: tmp_path / file.name for file in set(wal.glob("s1/*/*.parquet")) - known})
            for file, aside in lost.items():
                file.rename(aside)

    write(runs)
    with pytest.raises(ObjectsNotStoredError, match=f"store {runs.fleet.store.url} lacks snapshots/{NAME}/wal/s1/"):
        create_increment(runs.fleet, CreateRequest(NAME), runs.spark, Watching(lose))
    assert newest_increment(runs) == number
    # The slot is past what was lost: that is found, whoever asks.
    commit = runs.increment(NAME)
    assert commit.increment == number + 1
    assert isinstance(commit, Increment)
    assert "advanced the slot" in commit.renewed["s1"].reason
    # No later increment takes them for its own.
    for file, aside in lost.items():
        aside.rename(file)
    runs.increment(NAME)
    assert runs.check_one(NAME).conflicts == []
