"""Copies of chains with merges in a second store: whatever the first has given up, each restore equals the shards.

Expected rows come from the live servers (COPY), and expected problems from what was removed before it was copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.copying.chains import SnapshotCopy, StoreCopy, copy_snapshots
from cutline.snapshots.copying.second_store import CopyPlace
from cutline.snapshots.merge import rewriting
from cutline.snapshots.records.commit import Void
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.merge_records import begin_key, find_merge, first_increment, merge_key, merge_numbers
from cutline.snapshots.records.proven_chains import read_full, snapshot_names
from cutline.storage.local import LocalStore
from cutline.storage.store import ObjectMissingError
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_and_capture, run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OTHER = "20260101T000000Z-0123456abc"
ONE_COPY = '[check]\nallow = ["one-copy"]\n'
TABLES = (
    "DROP TABLE IF EXISTS seen, bag",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
    "CREATE TABLE bag (text text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 'bag ' || n % 3 FROM generate_series(1, 30) n",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    folder = tmp_path_factory.mktemp("copied")
    try:
        fleet = start_fleet(folder / "fleet", shards=2, backups=0)
        target = start_fleet(folder / "target", shards=2, backups=0)
        yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    source, target = servers
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=ONE_COPY)
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), tmp_path)
    for node in ("s1", "s2"):
        found.execute(node, *TABLES)
    with dropping_slots(fleet):
        found.runs.init()
        found.runs.full("chain")
        found.states[0] = found.live_state()
        yield found


def take(place: ChangingFleet, count: int = 1) -> None:
    for _ in range(count):
        place.write()
        place.increment()


def second_of(place: ChangingFleet, name: str) -> Fleet:
    """The fleet as the file of a second store describes it."""
    return configure_fleet(place.servers, place.folder / f"{name}.toml", f"file://{place.folder}/{name}", more=ONE_COPY)


def copy(place: ChangingFleet, second: Fleet, code: int = 0) -> dict[str, Any]:
    """Copy the chain, and return what was copied of it."""
    found, document = run_here(place.fleet, "copy", "chain", "--to", str(second.path))
    assert found == code, document
    (one,) = document["stores"][0]["snapshots"]
    return dict(one)


def merge(fleet: Fleet, spark: Ready, *words: str) -> None:
    code, document = run_here(fleet, "merge", "chain", *words, spark=spark.running)
    assert code == 0, document


def check_second(place: ChangingFleet, second: Fleet, *increments: int) -> None:
    """The increments are restored from the second store, which is valid, and in which nothing is garbage."""
    code, checked = run_here(second, "check", "chain", spark=place.runs.spark.running)
    assert (code, checked["result"]) == (0, "one-copy"), checked
    runs = Runs(second, place.runs.spark)
    for number in increments:
        runs.restore("chain", place.target, number)
        assert [sorted_copies(node.dsn) for node in place.target.primaries] == place.states[number], number
    assert "complete" in run_as_text(second, "list")
    assert run_here(second, "show", "chain")[1]["name"] == "chain"
    assert run_here(second, "gc", "--grace", "0s", "--dry-run")[1]["objects"] == 0


def test_merges_are_copied_with_their_objects(place: ChangingFleet) -> None:
    second, spark = second_of(place, "second"), place.runs.spark
    take(place, 2)
    assert copy(place, second)["merges"] == []
    # A merge that died has been settled: the next has another turn.
    place.fleet.store.open().create(merge_key("chain", 1), seal(Void("chain", 1, OTHER)))
    merge(place.fleet, spark, "--to", "1")
    plan = run_here(place.fleet, "copy", "chain", "--to", str(second.path), "--dry-run")[1]
    copied = copy(place, second)
    assert (copied["increments"], copied["merges"], copied["objects"]) == ([], [1], plan["objects"])
    assert second.store.open().exists(merge_key("chain", 1, 2))
    take(place)
    merge(place.fleet, spark)
    take(place)
    copied = copy(place, second)
    assert (copied["increments"], copied["merges"], copied["behind"]) == ([3, 4], [3], 0)
    assert copy(place, second)["objects"] == 0
    check_second(place, second, 0, 1, 2, 3, 4)
    # The first store gives up what the second keeps: the mark is not copied.
    merge(place.fleet, spark, "--to", "3", "--drop-earlier", "--yes")
    take(place)
    assert copy(place, second)["increments"] == [5]
    assert first_increment(second.store.open(), "chain") == 0
    check_second(place, second, 0, 2, 5)


def test_the_second_store_merges_by_itself(place: ChangingFleet) -> None:
    """Of two merges at an increment, each store keeps its own; merges of other increments are still copied."""
    second, spark = second_of(place, "second"), place.runs.spark
    take(place, 2)
    copy(place, second)
    merge(second, spark, "--to", "1")
    merge(second, spark, "--to", "2", "--drop-earlier", "--yes")
    merge(place.fleet, spark, "--to", "1")
    merge(place.fleet, spark, "--to", "2")
    copied = copy(place, second)
    assert (copied["merges"], copied["objects"], copied["problems"]) == ([], 0, [])
    stores = [fleet.store.open() for fleet in (place.fleet, second)]
    operations = {(merged := find_merge(store, "chain", 2).merge) and merged.operation for store in stores}
    assert len(operations) == 2
    take(place)
    merge(place.fleet, spark, "--to", "3")
    take(place)
    copied = copy(place, second)
    assert (copied["increments"], copied["merges"]) == ([3, 4], [3])
    check_second(place, second, 2, 3, 4)
    code, refused = run_here(second, "restore", "chain", "--increment", "1", "--dry-run")
    assert (code, refused["error"]) == (3, "merged-away")
    take(place)
    copy(place, second)
    merge(second, spark, "--drop-earlier", "--yes")
    check_second(place, second, 5)


class KilledError(BaseException):
    """The process has died."""


def copy_and_die(place: ChangingFleet, second: Fleet, at: int, monkeypatch: pytest.MonkeyPatch) -> SnapshotCopy | None:
    """Copy the chain until the process dies when it has stored the object with this number; None if it died."""
    create, report, stored = LocalStore.create, StoreCopy("", is_dry=False), 0

    def store(self: LocalStore, key: str, body: bytes) -> None:
        nonlocal stored
        create(self, key, body)
        stored += 1
        if stored >= at:
            raise KilledError(key)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "create", store)
        try:
            copy_snapshots(place.fleet, CopyPlace(second.store, None), "chain", Silent(), report)
        except KilledError:
            return None
    return report.snapshots[0]


def test_an_empty_store_begins_with_the_merge(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the copy dies, the snapshot does not exist there, or it can be restored; the next copy completes it."""
    # The merges carry no object in which a row has changed.
    monkeypatch.setattr(rewriting, "DEAD_SHARE_MAX", 0)
    spark = place.runs.spark
    take(place, 2)
    merge(place.fleet, spark, "--to", "1")
    merge(place.fleet, spark, "--to", "2", "--drop-earlier", "--yes")
    take(place, 2)
    ended, at = None, 0
    while ended is None:
        at += 3
        second = second_of(place, f"second-{at}")
        ended = copy_and_die(place, second, at, monkeypatch)
        store = second.store.open()
        if not store.exists("fleet.json"):
            continue
        names = snapshot_names(store)
        if names and ended is None:
            read_full(store, "chain")
            assert run_here(second, "list")[1]["snapshots"][0]["begins_at"] == 2
            words = ["restore", "chain", "--to", str(place.target.path), "--replace", "--dry-run"]
            assert run_here(second, *words)[0] == 0
        copied = copy(place, second)
        assert (copied["behind"], copied["problems"]) == (0, [])
        if ended is None:
            assert run_here(second, "gc", "--grace", "0s", "--dry-run")[1]["objects"] == 0
    check_second(place, second, 2, 4)
    assert (ended.increments, ended.merges, ended.first) == ([2, 3, 4], [2], 2)
    assert merge_numbers(second.store.open(), "chain") == [1, 2]
    with pytest.raises(ObjectMissingError):
        second.store.open().read(next(iter(_dropped_keys(place))))
    # The copy of the copy has the same.
    third = second_of(place, "third")
    code, document = run_here(second, "copy", "chain", "--to", str(third.path))
    assert (code, document["stores"][0]["snapshots"][0]["increments"]) == (0, [2, 3, 4])
    check_second(place, third, 2, 3)
    take(place)
    merge(place.fleet, spark, "--drop-earlier", "--yes")
    take(place)
    check_gap(place, second)


def _dropped_keys(place: ChangingFleet) -> list[str]:
    store = place.fleet.store.open()
    full = read_full(store, "chain")
    return [entry.key for entry in full.own_objects if entry.kind == "base" and not store.exists(entry.key)]


def check_gap(place: ChangingFleet, second: Fleet) -> None:
    """The second store has increments up to 4; 5 was given up before it was copied, for the merge at 5."""
    copied = copy(place, second, code=1)
    assert [(one["object"], one["kind"], one["increment"]) for one in copied["problems"]] == [
        (begin_key("chain", 5), "given-up", 5)
    ]
    assert (copied["increments"], copied["behind"]) == ([], 2)
    code, text = run_and_capture(place.fleet, "copy", "chain", "--to", str(second.path), "--dry-run")
    # No object is damaged.
    assert (code, text.startswith(f"warning: {copied['problems'][0]['detail']}\n")) == (1, True), text
    assert first_increment(second.store.open(), "chain") == 2
    check_second(place, second, 4)
    fourth = second_of(place, "fourth")
    assert "snapshot copy chain --to URL" in copied["problems"][0]["hint"]
    assert copy(place, fourth)["increments"] == [5, 6]
    check_second(place, fourth, 5, 6)


class Dropping(Silent):
    """Merges the first store and gives up what is earlier as soon as a commit is copied."""

    def __init__(self, place: ChangingFleet) -> None:
        self.place, self.is_done = place, False

    def reached(self, point: str, *, node: str = "") -> None:
        if point == "commit copied" and not self.is_done:
            self.is_done = True
            merge(self.place.fleet, self.place.runs.spark, "--drop-earlier", "--yes")


def test_what_is_given_up_while_it_is_copied_is_named(place: ChangingFleet) -> None:
    second = second_of(place, "second")
    take(place, 3)
    report = StoreCopy("", is_dry=False)
    copy_snapshots(place.fleet, CopyPlace(second.store, None), "chain", Dropping(place), report)
    (copied,) = report.snapshots
    assert [(one.kind, one.increment) for one in copied.problems] == [("given-up", 1)]
    assert "while they were copied" in copied.problems[0].detail
    assert (copied.increments, copied.through) == ([0], 0)
    check_second(place, second, 0)
