"""A copy has what the first store has, commits last; it survives a kill at every write, and repeats nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.config import Fleet, Retention, load_fleet
from cutline.fleet.progress import Reading, Silent
from cutline.fleet.record import Time
from cutline.snapshots.copying.chains import CopyCrashPoint, OtherChainError, SnapshotCopy, StoreCopy, copy_snapshots
from cutline.snapshots.copying.second_store import CopyPlace, NotACopyError, locate_copy
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations import ended_operations
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.open_operations import document_names, read_open_operations
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.operations.second_stores import FirstStoreChain, SecondStoreState, read_states
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.end_marks import has_end
from cutline.snapshots.records.operation_records import DELETE, MERGE, CopiedPoint, read_intent
from cutline.snapshots.records.proven_chains import SnapshotMissingError, commit_key, read_chain, snapshot_names
from cutline.snapshots.records.repair_records import read_repairs
from cutline.snapshots.records.store_identity import (
    FLEET_KEY,
    StoreIsCopyError,
    StoreOfAnotherFleetError,
    ensure_identity,
    read_identity,
)
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_deleted
from cutline.snapshots.removal.deletion import delete_snapshot
from cutline.snapshots.removal.gc import collect_garbage
from cutline.snapshots.removal.node_cleanup import OverdueError
from cutline.snapshots.removal.pinning import BeingRemovedError, pin_in_store
from cutline.snapshots.removal.pruning import prune_store
from cutline.snapshots.removal.removing import open_removals
from cutline.snapshots.repair.planning import RepairRequest, plan_repair
from cutline.snapshots.repair.running import run_repair
from cutline.storage.clock import utc_now
from cutline.storage.encryption.fleet_encryption import FleetEncryption
from cutline.storage.encryption.key_documents import StoreKeyError, ensure_data_key, find_data_key
from cutline.storage.encryption.key_source import KeySource
from cutline.storage.errors import UsageError
from cutline.storage.ids import new_operation_id
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore, StoreUnreachableError
from tests.commands.in_process import run_here, run_with_stderr
from tests.unit.made_commits import unused_url
from tests.unit.made_fleets import new_fleet
from tests.unit.made_garbage import StoreBuilder
from tests.unit.made_repairs import NAME, MadeShard, NoSpark, damage, item, log, restored, upserts

ROWS = [*(item(number, f"v{number}") for number in range(20)), *(log(f"line {number % 3}") for number in range(9))]
HISTORY = [upserts(100, item(1, "first")), upserts(1200, item(4, "second"), log("more")), upserts(2200, item(1, "x"))]
BORDERS = {"a": [[250, 1000], [2000], [3000]], "b": [[350, 1000], [1250, 2000], [3000]]}
POSITIONS = (1000, 2000, 3000)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class KilledError(BaseException):
    """The process has died."""


def new_shard(**more: Any) -> MadeShard:
    return MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS, **more)


def key_file(folder: Path, name: str, digits: str) -> FleetEncryption:
    path = folder / name
    path.write_text(digits * 32)
    path.chmod(0o600)
    return FleetEncryption(KeySource(path), "shop")


def place(encryption: FleetEncryption | None = None) -> CopyPlace:
    return CopyPlace(StoreLocation(unused_url(), encryption=encryption), encryption)


def copy(fleet: Fleet, second: CopyPlace, name: str | None = NAME, *, is_dry: bool = False) -> SnapshotCopy:
    report = StoreCopy(second.url, is_dry)
    copy_snapshots(fleet, second, name, Silent(), report)
    (copied,) = report.snapshots
    return copied


def copy_all(fleet: Fleet, second: CopyPlace) -> dict[str, SnapshotCopy]:
    report = copy_snapshots(fleet, second, None, Silent(), StoreCopy(second.url, is_dry=False))
    return {one.name: one for one in report.snapshots}


def fleet_of(fleet: Fleet, second: CopyPlace) -> Fleet:
    """The fleet as the second store's fleet file describes it."""
    return replace(fleet, store=second.location, encryption=second.encryption)


def check_restores(shard: MadeShard, second: CopyPlace, through: int = 2) -> None:
    """Both copies restore the state at every cut, from the second store alone."""
    there = replace_store(shard, second)
    for increment, position in enumerate(POSITIONS[: through + 1]):
        chain = read_chain(there.store, NAME, increment)
        for node in ("a", "b"):
            assert restored(there, chain, node) == shard.state_at(position), (increment, node)


def replace_store(shard: MadeShard, second: CopyPlace) -> MadeShard:
    there = object.__new__(MadeShard)
    there.__dict__.update(shard.__dict__)
    there.store = second.location.open()
    return there


def encrypted_shard(encryption: FleetEncryption) -> MadeShard:
    location = StoreLocation(unused_url(), encryption=encryption)
    ensure_data_key(location.open_raw(), encryption.read_key())
    return new_shard(location=location)


@pytest.mark.parametrize("forms", ["plain to plain", "plain to encrypted", "encrypted to another key"])
def test_the_second_store_restores_every_cut_by_itself(forms: str, tmp_path: Path) -> None:
    first, other = key_file(tmp_path, "first", "11"), key_file(tmp_path, "other", "22")
    shard = encrypted_shard(first) if forms.startswith("encrypted") else new_shard()
    fleet = replace(shard.fleet, encryption=first if forms.startswith("encrypted") else None)
    shard.take()
    second = place(None if forms == "plain to plain" else other)
    copied = copy(fleet, second)
    assert (copied.increments, copied.behind, copied.problems, copied.present.objects) == ([0, 1, 2], 0, [], 0)
    chain = read_chain(shard.store, NAME)
    assert copied.copied.objects == sum(len(list(commit.named_and_listed)) for commit in chain.commits)
    if forms == "encrypted to another key":
        # The stored bytes are those of the first store, under the same data key.
        chains = [read_chain(location.open(), NAME) for location in (shard.location, second.location)]
        assert chains[0] == chains[1]
        objects = [key for key in shard.location.open_raw().list("snapshots") if "/base/" in key or "/wal/" in key]
        there = second.location.open()
        assert [there.read(key) for key in objects] == [shard.store.read(key) for key in objects]
        assert not find_data_key(shard.location.open_raw(), first.read_key()).is_of_copy
        with pytest.raises(StoreKeyError):
            find_data_key(second.location.open_raw(), first.read_key())
    else:
        check_restores(shard, second)
    if forms != "plain to plain":
        raw = second.location.open_raw()
        assert all(raw.read(key).endswith(b"cutline\x01") for key in raw.list("snapshots"))
    again = copy(fleet, second)
    assert (again.increments, again.copied.objects) == ([], 0)


def test_the_encrypted_copy_of_a_plain_store_is_read_and_repairs_it(tmp_path: Path) -> None:
    shard, second = new_shard(), place(key_file(tmp_path, "key", "11"))
    chain = shard.take()
    copy(shard.fleet, second)
    assert read_chain(second.location.open(), NAME) == chain
    ddl = next(entry for entry in chain.full.own_objects if entry.kind == "archive")
    damage(shard, ddl.key)
    file = tmp_path / "second.toml"
    file.write_text(
        f'name = "shop"\nstore = "{second.location.url}"\n[[node]]\nid = "a"\ndsn = "dbname=a"\n'
        f'[encryption]\nkey_file = "{tmp_path}/key"\n'
    )
    report = repair(shard.fleet, str(file))
    assert report.unrepaired == []
    new = read_chain(shard.store, NAME).ddl_object("a")
    assert new is not None
    assert shard.store.read(new.key) == b"ddl"


def repair(fleet: Fleet, other: str | None = None) -> Any:
    planned = plan_repair(fleet, RepairRequest(NAME, other), NoSpark(), Silent())  # type: ignore[arg-type]
    return run_repair(fleet, planned, NoSpark(), Silent())  # type: ignore[arg-type]


@dataclass
class Deadly:
    """Kills the process before or after the n-th object is stored in a store, counting from 1."""

    url: str
    at: int
    after: bool
    puts: int = field(default=0)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        create = InMemoryStore.create

        def create_and_die(store: InMemoryStore, key: str, body: bytes) -> None:
            if store.url == self.url:
                self.puts += 1
                if self.puts > self.at or (self.puts == self.at and not self.after):
                    raise KilledError
            create(store, key, body)
            if store.url == self.url and self.puts == self.at:
                raise KilledError

        monkeypatch.setattr(InMemoryStore, "create", create_and_die)


@pytest.mark.parametrize("after", [False, True])
def test_a_copy_that_dies_is_an_older_state_and_is_continued(*, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every write in turn: what the second store shows can be restored, and the next copy completes it."""
    borders = {node: [[1000], [2000], [3000]] for node in ("a", "b")}
    shard = MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, borders, {"a": 1, "b": 1})
    shard.take()
    puts, shown = 0, set[int]()
    while True:
        puts += 1
        second = place()
        with monkeypatch.context() as patched:
            deadly = Deadly(second.location.url, puts, after)
            deadly.patch(patched)
            try:
                copy(shard.fleet, second)
            except KilledError:
                pass
            else:
                break
        there = second.location.open()
        if there.exists("fleet.json"):
            names = snapshot_names(there)
            through = read_chain(there, NAME).last.increment if names else -1
            shown.add(through)
            check_restores(shard, second, through)
            assert read_open_operations(there) == ()
        copied = copy(shard.fleet, second)
        assert (copied.behind, copied.problems) == (0, [])
        assert read_chain(there, NAME) == read_chain(shard.store, NAME)
        assert set(there.list("snapshots")) == set(shard.store.list("snapshots"))
    assert shown == {-1, 0, 1, 2}


def test_a_second_run_reads_and_writes_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, second = new_shard(), place()
    shard.take()
    copy(shard.fleet, second)
    used: list[str] = []
    read, create = InMemoryStore.read_range, InMemoryStore.create

    def count_read(store: InMemoryStore, key: str, start: int, length: int) -> bytes:
        used.append(key)
        return read(store, key, start, length)

    def count_create(store: InMemoryStore, key: str, body: bytes) -> None:
        raise AssertionError(key)

    monkeypatch.setattr(InMemoryStore, "read_range", count_read)
    monkeypatch.setattr(InMemoryStore, "create", count_create)
    assert copy(shard.fleet, second).copied.objects == 0
    assert [key for key in used if key.endswith((".parquet", ".zst"))] == []
    monkeypatch.setattr(InMemoryStore, "create", create)


@pytest.fixture
def fleet() -> Fleet:
    return new_fleet()


@pytest.fixture
def builder(fleet: Fleet) -> StoreBuilder:
    """Commits in the fleet's store."""
    return StoreBuilder(fleet.store.open())


def test_increments_follow_and_only_the_new_ones_are_copied(fleet: Fleet, builder: StoreBuilder) -> None:
    second, there = place(), place_store
    builder.take_full("daily")
    builder.take_increment("daily")
    assert copy(fleet, second, "daily").increments == [0, 1]
    chain = builder.take_increment("daily", copies=True)
    builder.take_full("other")
    assert copy(fleet, second, "daily", is_dry=True).increments == [2]
    assert copy_all(fleet, second).keys() == {"daily", "other"}
    assert read_chain(there(second), "daily") == chain
    assert copy(fleet, second, "daily").increments == []
    # Segments of a create that failed are not listed, and not copied.
    builder.store_segments("daily", chain.full.operation, [builder.next_number(chain)])
    assert copy(fleet, second, "daily").copied.objects == 0


def place_store(second: CopyPlace) -> ObjectStore:
    return second.location.open()


def test_an_increment_taken_during_the_copy_follows_in_the_next(fleet: Fleet, builder: StoreBuilder) -> None:
    second = place()
    builder.take_full("daily")

    class Taking(Silent):
        taken = False

        def reached(self, point: str, *, node: str = "") -> None:
            if not self.taken:
                self.taken = True
                builder.take_increment("daily")

    report = copy_snapshots(fleet, second, "daily", Taking(), StoreCopy("", is_dry=False))
    assert report.snapshots[0].increments == [0]
    assert copy(fleet, second, "daily").increments == [1]


def test_what_is_damaged_is_named_and_ends_only_its_own_chain(fleet: Fleet, builder: StoreBuilder) -> None:
    second = place()
    builder.take_full("daily")
    builder.take_increment("daily")
    segment = builder.take_increment("daily").last.segments["a"][-1].key
    builder.take_increment("daily")
    builder.take_full("other")
    body = builder.store.read(segment)
    builder.store.delete(segment)
    builder.store.create(segment, bytes(len(body)))
    copied = copy_all(fleet, second)
    assert [(one.key, one.kind, one.node, one.increment) for one in copied["daily"].problems] == [
        (segment, "digest", "a", 2)
    ]
    assert (copied["daily"].increments, copied["daily"].behind, copied["other"].behind) == ([0, 1], 2, 0)
    assert read_chain(place_store(second), "daily").last.increment == 1
    # Once it is back, the copy goes on.
    builder.store.delete(segment)
    builder.store.create(segment, body)
    assert copy(fleet, second, "daily").increments == [2, 3]


def test_a_damaged_commit_is_named_and_what_precedes_it_is_copied(fleet: Fleet, builder: StoreBuilder) -> None:
    second, key = place(), commit_key("daily", 1)
    builder.take_full("daily")
    builder.take_increment("daily")
    builder.store.delete(key)
    builder.store.create(key, b"{}")
    copied = copy(fleet, second, "daily")
    assert ([one.key for one in copied.problems], copied.increments, copied.behind) == ([key], [0], 1)


def test_a_damaged_record_of_the_primaries_is_named_after_everything_else_is_copied(
    fleet: Fleet, builder: StoreBuilder
) -> None:
    second, key = place(), "baselines/0000000000000001.json"
    builder.take_full("daily")
    builder.store.create(key, b"{}")
    with pytest.raises(ManifestError, match=key):
        copy_all(fleet, second)
    assert read_chain(place_store(second), "daily") == read_chain(builder.store, "daily")
    assert not place_store(second).exists(key)


def test_a_copy_brings_repairs_with_the_objects_that_supersede_damaged_ones() -> None:
    shard, second = new_shard(), place()
    chain = shard.take()
    copied_before = place()
    copy(shard.fleet, copied_before)
    damaged = chain.segments("a")[2]
    damage(shard, damaged.key)
    assert repair(shard.fleet).unrepaired == []
    for target in (second, copied_before):
        assert copy(shard.fleet, target).behind == 0
        check_restores(shard, target)
        assert read_chain(place_store(target), NAME) == read_chain(shard.store, NAME)
    assert not place_store(second).exists(damaged.key)


def test_a_copy_that_was_repaired_by_itself_keeps_its_repairs() -> None:
    shard, second = new_shard(), place()
    chain = shard.take()
    copy(shard.fleet, second)
    there = replace_store(shard, second)
    key = chain.segments("a")[2].key
    damage(there, key)
    second_fleet = fleet_of(shard.fleet, second)
    assert repair(second_fleet).unrepaired == []
    assert copy(shard.fleet, second).behind == 0
    check_restores(shard, second)


def copied_up_to(
    shard: MadeShard, second: CopyPlace, commits: int, last: CopyCrashPoint = CopyCrashPoint.COMMITTED
) -> None:
    """Copy the first commits of the chain, or up to another crash point's n-th time, and then let the copy die."""
    left = [commits]

    class Dying(Silent):
        def reached(self, point: str, *, node: str = "") -> None:
            left[0] -= point == last
            if not left[0]:
                raise KilledError

    with pytest.raises(KilledError):
        copy_snapshots(shard.fleet, second, NAME, Dying(), StoreCopy(second.url, is_dry=False))


@pytest.mark.parametrize("last", [CopyCrashPoint.REPAIRS_STORED, CopyCrashPoint.COMMITTED])
def test_a_copy_between_two_repaired_stores_goes_on_after_it_has_died(last: CopyCrashPoint) -> None:
    shard, second = new_shard(), place()
    chain = shard.take()
    copied_up_to(shard, second, 1)
    damage(replace_store(shard, second), chain.full.segments["a"][0].key)
    assert repair(fleet_of(shard.fleet, second)).unrepaired == []
    # Both are of restore points that the second store lacks.
    for key in (chain.increments[0].segments["a"][-1].key, chain.last.segments["a"][-1].key):
        damage(shard, key)
        assert repair(shard.fleet).unrepaired == []
    copied_up_to(shard, second, 1, last)
    assert len(read_repairs(second.location.open(), NAME)) == 3
    copied = copy(shard.fleet, second)
    assert (copied.problems, copied.behind) == ([], 0)
    assert len(read_repairs(second.location.open(), NAME)) == 3
    check_restores(shard, second)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_copy_goes_on_if_both_stores_were_repaired_by_themselves(tmp_path: Path, *, is_encrypted: bool) -> None:
    shard, second = new_shard(), place(key_file(tmp_path, "key", "11") if is_encrypted else None)
    chain = shard.take()
    copied_up_to(shard, second, 2)
    there, second_fleet = replace_store(shard, second), fleet_of(shard.fleet, second)
    for key in (chain.full.segments["a"][0].key, chain.increments[0].segments["a"][0].key):
        damage(there, key)
        assert repair(second_fleet).unrepaired == []
    # The first is of a restore point that the second store has, and the others are of one that it lacks.
    for key in (chain.full.segments["b"][1].key, chain.last.segments["a"][-1].key):
        damage(shard, key)
        assert repair(shard.fleet).unrepaired == []
    damage(shard, read_chain(shard.store, NAME).last.segments["a"][-1].key)
    assert repair(shard.fleet).number == 3
    preview = copy(shard.fleet, second, is_dry=True)
    assert (preview.problems, preview.increments) == ([], [2])
    copied = copy(shard.fleet, second)
    assert (copied.problems, copied.increments, copied.behind) == ([], [2], 0)
    check_restores(shard, second)
    # Its own repairs come first, and it needs nothing of what it has itself.
    repairs = read_repairs(there.store, NAME)
    assert [[one.increment for one in each.replacements] for each in repairs] == [[0], [1], [2], [2]]
    assert [one.operation for one in repairs[2:]] == [one.operation for one in read_repairs(shard.store, NAME)[1:]]
    assert collect_garbage(second_fleet, 0.0, Silent()).garbage == []
    check_restores(shard, second)
    request = CheckRequest(NAME, metadata_only=True)
    (checked,) = check_snapshots(second_fleet, request, NoSpark(), Silent()).snapshots  # type: ignore[arg-type]
    # The made commits are wrong in other ways.
    told = " ".join(f"{one.object} {one.detail}" for one in checked.conflicts)
    assert not [one.operation for one in repairs if one.operation in told or f"repairs/{one.number:016d}" in told]
    stored = {key: there.store.read(key) for key in there.store.list("snapshots")}
    assert copy(shard.fleet, second).increments == []
    assert {key: there.store.read(key) for key in there.store.list("snapshots")} == stored


def test_an_object_changed_in_the_copy_is_found_there_and_repaired_from_the_first_store() -> None:
    shard, second = new_shard(), place()
    chain = shard.take()
    copy(shard.fleet, second)
    ddl = next(entry for entry in chain.full.own_objects if entry.kind == "archive")
    damage(replace_store(shard, second), ddl.key)
    second_fleet = fleet_of(shard.fleet, second)
    planned = plan_repair(second_fleet, RepairRequest(NAME), NoSpark(), Silent())  # type: ignore[arg-type]
    assert [one.key for one in planned.damages] == [ddl.key]
    assert repair(second_fleet, shard.location.url).unrepaired == []


def test_a_snapshot_deleted_in_one_store_stays_in_the_other(fleet: Fleet, builder: StoreBuilder) -> None:
    """The first store's deletions are not copied, and what the second store deleted never comes back."""
    second = place()
    for name in ("old", "new"):
        builder.take_full(name)
        builder.take_increment(name)
    copy_all(fleet, second)
    builder.put_tombstone("old")
    assert copy_all(fleet, second).keys() == {"new"}
    assert read_chain(place_store(second), "old").last.increment == 1
    with pytest.raises(SnapshotDeletedError):
        copy(fleet, second, "old")
    there = fleet_of(fleet, second)
    delete_snapshot(there, "new", Silent(), lambda _: None, force=False)
    assert copy(fleet, second, "new").left_out.startswith("it was deleted in memory://")
    assert snapshot_names(place_store(second)) == ["old"]


def test_retention_of_the_second_store_needs_no_node(fleet: Fleet, builder: StoreBuilder) -> None:
    """FLEET's nodes don't exist. Pruned increments are not copied again."""
    second = place()
    for name in ("old", "new"):
        builder.take_full(name)
        builder.take_increment(name, copies=True)
    copy_all(fleet, second)
    there = fleet_of(fleet, second)
    result = prune_store(there, Retention(last=1, only_full=2), Silent(), lambda _: None, force=False)
    assert [one.is_done for one in result.removed] == [True]
    pruned = result.removed[0].mark
    assert (pruned.slots, pruned.nodes) == ((), ())
    assert read_chain(place_store(second), pruned.snapshot).last.increment == 0
    assert copy(fleet, second, pruned.snapshot).increments == []
    report = collect_garbage(there, 0.0, Silent())
    assert (report.garbage, report.unsettled, report.open_operations) == ([], "", ())
    assert [key for key in report.kept if key.reason == "unclear"] == []


def test_gc_settles_a_dead_merge_of_the_second_store_without_any_node(fleet: Fleet, builder: StoreBuilder) -> None:
    """In the first store, the nodes tell the time, so it stays open until one of them answers."""
    second = place()
    builder.take_full("daily")
    builder.take_increment("daily")
    copy(fleet, second, "daily")
    an_hour_ago = Time.of(utc_now() - timedelta(hours=1))
    for one, left in ((fleet, 1), (fleet_of(fleet, second), 0)):
        store = one.store.open()
        merge = structs.replace(new_operation(MERGE, "daily", 1, ("a",)), turn=1, expires_at=an_hour_ago)
        begin(store, merge)
        collect_garbage(one, 0.0, Silent())
        assert len(open_leases(store)) == left


def test_a_prune_settles_a_removal_of_the_second_store_that_died_before_its_mark(
    fleet: Fleet, builder: StoreBuilder
) -> None:
    """Until then no pin is possible, because the removal may not see it."""
    second = place()
    builder.take_full("daily")
    copy(fleet, second, "daily")
    there, store = fleet_of(fleet, second), place_store(second)
    running = new_operation(DELETE, "daily", 0, ())
    dead = structs.replace(new_operation(DELETE, "daily", 0, ()), began_at=Time.of(utc_now() - timedelta(hours=1)))
    for intent in (running, dead):
        begin(store, intent)
    prune_store(there, Retention(last="all"), Silent(), lambda _: None, force=False)
    assert open_removals(store) == [running]
    with pytest.raises(BeingRemovedError):
        pin_in_store(store, "daily", 0)
    record_outcome(store, running, "failed")
    assert [one.increment for one in pin_in_store(store, "daily", 0).in_force] == [0]


def test_a_removal_of_the_second_store_that_was_settled_meanwhile_removes_nothing(
    fleet: Fleet, builder: StoreBuilder
) -> None:
    """Its process was suspended, and a pin may not have seen its intent."""
    second = place()
    builder.take_full("daily")
    copy(fleet, second, "daily")
    store = place_store(second)

    class Settled(Silent):
        def tell(self, reading: Reading) -> None:
            (intent,) = open_removals(store)
            record_outcome(store, intent, "failed", "found without a mark")

    with pytest.raises(OverdueError, match="was suspended for too long"):
        delete_snapshot(fleet_of(fleet, second), "daily", Settled(), lambda _: None, force=True)
    assert snapshot_names(store) == ["daily"]


def test_gc_keeps_what_an_unfinished_copy_has_stored(fleet: Fleet, builder: StoreBuilder) -> None:
    second = place()
    chain = builder.take_full("daily")
    copy(fleet, second, "daily")
    store = place_store(second)
    store.delete(commit_key("daily", 0))
    for kind in ("intent", "outcome"):
        store.delete(f"operations/{chain.full.operation}/{kind}.json")
    there = fleet_of(fleet, second)
    assert collect_garbage(there, 0.0, Silent()).garbage == []
    with pytest.raises(SnapshotMissingError):
        delete_snapshot(there, "daily", Silent(), lambda _: None, force=False)
    delete_snapshot(there, "daily", Silent(), lambda _: None, force=True)
    assert is_deleted(store, "daily")
    assert store.list("snapshots") == []


@dataclass
class Deleting(Silent):
    """Deletes the snapshot in a store as soon as its full snapshot, or whatever `at` says, is copied."""

    store: ObjectStore
    name: str = "daily"
    at: str = "commit copied"

    def reached(self, point: str, *, node: str = "") -> None:
        if point == self.at and not is_deleted(self.store, self.name):
            StoreBuilder(self.store).put_tombstone(self.name)
            for key in self.store.list(f"snapshots/{self.name}"):
                self.store.delete(key)


@pytest.mark.parametrize("where", ["first", "second"])
def test_a_snapshot_deleted_while_it_is_copied_is_left_out(fleet: Fleet, builder: StoreBuilder, where: str) -> None:
    """In the first store, whose objects are then missing, or in the second, whose tombstone then counts."""
    second = place()
    builder.take_full("daily")
    builder.take_increment("daily")
    deleting = Deleting(builder.store if where == "first" else place_store(second))
    report = copy_snapshots(fleet, second, "daily", deleting, StoreCopy("", is_dry=False))
    (copied,) = report.snapshots
    assert (copied.increments, copied.problems) == ([0], [])
    assert "while it was copied" in copied.left_out
    assert snapshot_names(place_store(second)) == (["daily"] if where == "first" else [])


def test_a_snapshot_deleted_before_its_repair_is_copied_is_left_out() -> None:
    """The copy has read the repair's document before, and copies it after the objects."""
    shard, second = new_shard(), place()
    chain = shard.take()
    copy(shard.fleet, second)
    damage(shard, chain.segments("a")[2].key)
    assert repair(shard.fleet).unrepaired == []
    deleting = Deleting(shard.store, NAME, at="object copied")
    report = copy_snapshots(shard.fleet, second, None, deleting, StoreCopy("", is_dry=False))
    (copied,) = report.snapshots
    assert copied.problems == []
    assert "deleted" in copied.left_out
    assert "while it was copied" in copied.left_out


def test_no_snapshot_is_taken_in_a_copy(fleet: Fleet, builder: StoreBuilder) -> None:
    second = place()
    builder.take_full("daily")
    copy(fleet, second, "daily")
    identity = read_identity(place_store(second), fleet)
    assert identity.fleet_id == read_identity(builder.store, fleet).fleet_id
    with pytest.raises(StoreIsCopyError, match="is a copy"):
        create_increment(fleet_of(fleet, second), CreateRequest("daily"), NoSpark(), Silent())  # type: ignore[arg-type]


def test_a_store_that_is_no_copy_is_refused(fleet: Fleet, builder: StoreBuilder) -> None:
    """A store of its own, that of another fleet, and a chain that went its own way."""
    builder.take_full("daily")
    for other in (new_fleet(), replace(fleet, store=new_fleet().store)):
        with pytest.raises(StoreOfAnotherFleetError):
            copy(fleet, CopyPlace(other.store, None), "daily")
    second = place()
    for key in builder.store.list(""):
        place_store(second).create(key, builder.store.read(key))
    with pytest.raises(NotACopyError, match="not a copy"):
        copy(fleet, second, "daily")
    with pytest.raises(UsageError, match="the fleet's own store"):
        locate_copy(fleet, fleet.store.url)
    other, target = new_fleet(), place()
    StoreBuilder(other.store.open()).take_full("daily")
    copy(fleet, target, "daily")
    store = place_store(target)
    store.delete(commit_key("daily", 0))
    store.create(commit_key("daily", 0), other.store.open().read(commit_key("daily", 0)))
    with pytest.raises(OtherChainError):
        copy(fleet, target, "daily")


def test_an_encrypted_store_is_not_copied_where_no_key_is_named(tmp_path: Path) -> None:
    encryption = key_file(tmp_path, "key", "11")
    shard = encrypted_shard(encryption)
    file = tmp_path / "second.toml"
    file.write_text('name = "shop"\nstore = "memory://plain-second"\n[[node]]\nid = "a"\ndsn = "dbname=a"\n')
    with pytest.raises(UsageError, match="names no key"):
        locate_copy(replace(shard.fleet, encryption=encryption), str(file))


def test_an_ended_chain_is_shown_as_ended_in_the_copy(fleet: Fleet, builder: StoreBuilder) -> None:
    second = place()
    chain = builder.take_full("daily")
    builder.end_chain(chain)
    copy(fleet, second, "daily")
    assert has_end(place_store(second), "daily", chain.full.chain)
    assert read_intent(place_store(second), chain.full.operation).snapshot == "daily"


def test_the_mark_of_an_ended_chain_is_copied_after_its_last_restore_point(fleet: Fleet, builder: StoreBuilder) -> None:
    """Otherwise gc there removes segments that the next copy expects, and the commit that lists them follows."""
    second = place()
    builder.take_full("daily")
    chain = builder.take_increment("daily")
    segment = chain.last.segments["a"][-1].key
    body = builder.store.read(segment)
    builder.end_chain(chain)
    builder.store.delete(segment)
    assert copy(fleet, second, "daily").behind == 1
    assert not has_end(place_store(second), "daily", chain.full.chain)
    builder.store.create(segment, body)
    assert copy(fleet, second, "daily").increments == [1]
    assert has_end(place_store(second), "daily", chain.full.chain)


def test_an_unreachable_second_store_ends_the_command(
    fleet: Fleet, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = place()
    builder.take_full("daily")

    def refuse(store: InMemoryStore, key: str, body: bytes) -> None:
        raise StoreUnreachableError(url=store.url, reason="gone")

    monkeypatch.setattr(InMemoryStore, "create", refuse)
    with pytest.raises(StoreUnreachableError):
        copy(fleet, second, "daily")


def copying_fleet(tmp_path: Path, *second: str) -> Fleet:
    """A fleet whose file names second stores in these folders; its own store is in the folder `store`."""
    file = tmp_path / "fleet.toml"
    copies = "".join(f'[[copy]]\nto = "{tmp_path}/{one}"\n' for one in second)
    file.write_text(f'name = "shop"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "a"\ndsn = "dbname=a"\n{copies}')
    fleet = load_fleet(file)
    ensure_identity(fleet.store.open(), fleet)
    return fleet


def test_a_second_store_that_refuses_does_not_keep_the_copy_from_the_next(tmp_path: Path) -> None:
    """The first `[[copy]]` names a store in which snapshots are taken; the second one is new."""
    fleet = copying_fleet(tmp_path, "other", "second")
    StoreBuilder(fleet.store.open()).take_full("daily")
    other = LocalStore(tmp_path / "other")
    other.create(FLEET_KEY, fleet.store.open().read(FLEET_KEY))
    code, document = run_here(fleet, "copy", "--all")
    assert (code, document["error"]) == (3, "not-a-copy")
    assert str(tmp_path / "other") in document["message"]
    assert snapshot_names(LocalStore(tmp_path / "second")) == ["daily"]


def test_damage_is_told_although_the_copy_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another snapshot, and on the way to another store."""
    fleet = copying_fleet(tmp_path, "second", "third", "other")
    store, other = fleet.store.open(), LocalStore(tmp_path / "other")
    other.create(FLEET_KEY, store.read(FLEET_KEY))
    builder = StoreBuilder(store)
    builder.take_full("daily")
    segment = builder.take_increment("daily").last.segments["a"][-1].key
    store.delete(segment)
    store.create(segment, b"damaged")
    create, is_away = LocalStore.create, False

    def refuse(there: LocalStore, key: str, body: bytes) -> None:
        if is_away and "third" in there.url:
            raise StoreUnreachableError(url=there.url, reason="gone")
        create(there, key, body)

    monkeypatch.setattr(LocalStore, "create", refuse)
    run_here(fleet, "copy", "--all")
    is_away = True
    builder.take_full("later")
    err = io.StringIO()
    code, out = run_with_stderr(err, fleet, "copy", "--all", "--json")
    document = json.loads(out)
    assert (code, document["error"]) == (6, "store-unreachable")
    assert [
        [(one["snapshot"], [problem["object"] for problem in one["problems"]]) for one in each["snapshots"]]
        for each in document["details"]["stores"]
    ] == [[("daily", [segment]), ("later", [])]] * 2 + [[]]
    warned = err.getvalue()
    assert f"object {segment} of a:" in warned
    # The error of the next store, too.
    assert "is a store in which snapshots are taken, not a copy" in warned
    chains = {"daily": chain_to(2), "later": chain_to(1)}
    (last,) = [one for one in read_states(store, document_names(store), chains, 9) if "second" in one.url]
    assert last.points.keys() == {"daily", "later"}


def test_what_a_copy_has_done_and_found_before_an_error_is_in_its_report(
    fleet: Fleet, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = place()
    builder.take_full("daily")
    builder.take_increment("daily")
    builder.store.create("baselines/0000000000000001.json", b"{}")
    create = InMemoryStore.create

    def refuse(store: InMemoryStore, key: str, body: bytes) -> None:
        if key == commit_key("daily", 1):
            raise StoreUnreachableError(url=store.url, reason="gone")
        create(store, key, body)

    report = StoreCopy(second.url, is_dry=False)
    with monkeypatch.context() as patched:
        patched.setattr(InMemoryStore, "create", refuse)
        with pytest.raises(StoreUnreachableError):
            copy_snapshots(fleet, second, None, Silent(), report)
    (copied,) = report.snapshots
    assert (copied.name, copied.increments, copied.through, copied.behind) == ("daily", [0], 0, 1)
    assert "baselines/0000000000000001.json" in report.damaged_record


def chain_to(last: int, first: int = 0, stored_at: datetime = LONG_AGO) -> FirstStoreChain:
    return FirstStoreChain(first, last, stored_at)


def test_what_was_deleted_in_the_second_store_is_not_behind(fleet: Fleet) -> None:
    """It is not copied again, so no copy could bring it up to date; once a complete copy has found that out."""
    store, began = fleet.store.open(), utc_now()
    to, at = "s3://elsewhere/shop", Time.of(began)

    def record(number: int, snapshot: str, code: int, **increments: int) -> None:
        copied = tuple(CopiedPoint(to, name, increment, at, 0) for name, increment in increments.items())
        command = Command("copy", snapshot, new_operation_id(began + timedelta(seconds=number)))
        record_without_intent(store, command, at, "", Ending("done", code=code, copied=copied))

    def behind() -> Mapping[str, int]:
        (state,) = read_states(store, document_names(store), {"old": chain_to(1), "new": chain_to(1)}, 1)
        assert (state.url, state.points.keys()) == (to, {"old", "new"})
        return state.behind

    record(1, "", 0, old=0, new=0)
    assert behind() == {"old": 1, "new": 1}
    record(2, "new", 0, new=1)
    assert behind() == {"old": 1, "new": 0}
    # The copy of `old` has failed.
    record(3, "", 1, new=1)
    assert behind() == {"old": 1, "new": 0}
    record(4, "", 0, new=1)
    assert behind() == {"new": 0}


def test_snapshots_that_are_missing_or_stuck_in_the_second_store_are_told(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading ends as soon as all is known.
    monkeypatch.setattr(ended_operations, "AT_ONCE", 1)
    store, began = fleet.store.open(), utc_now()

    def after(seconds: int) -> datetime:
        return began + timedelta(seconds=seconds)

    def record(seconds: int, snapshot: str, **increments: int) -> None:
        at = Time.of(after(seconds))
        copied = tuple(CopiedPoint("s3://elsewhere", name, number, at, 0) for name, number in increments.items())
        command = Command("copy", snapshot, new_operation_id(after(seconds)))
        record_without_intent(store, command, at, "", Ending("done", code=0, copied=copied))

    def state(**chains: FirstStoreChain) -> SecondStoreState:
        (found,) = read_states(store, document_names(store), chains, 1)
        return found

    old, deleted, new = chain_to(5), chain_to(2), chain_to(1, stored_at=after(25))
    record(10, "old", old=5)
    # No complete copy is known: nothing was copied of what no record names.
    assert state(old=old, new=new).missing == ("new",)
    record(20, "", old=5)
    # A snapshot that is older than the complete copy was deleted in the second store.
    found = state(old=old, deleted=deleted, new=new)
    assert (found.missing, found.behind, found.stuck) == (("new",), {"old": 0}, {})
    record(30, "new", new=1)
    assert state(old=old, deleted=deleted, new=new).missing == ()
    # Increment 5 was the last that was copied.
    assert [state(old=chain_to(7, first)).stuck for first in (5, 6, 7)] == [{}, {"old": 6}, {"old": 7}]
    # Nothing is stuck of a snapshot that was deleted there.
    record(40, "", new=1)
    found = state(old=chain_to(7, 6), new=new)
    assert (found.missing, found.behind, found.stuck) == ((), {"new": 0}, {})


def test_the_command_that_copies_all_snapshots_names_the_store_that_was_given(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'name = "f"\nstore = "{tmp_path}/store"\n[[node]]\nid = "s1"\ndsn = "host=nowhere"\n')
    for to, named in (([], ""), (["--to", "/a b"], " --to '/a b'")):
        code, document = run_here(load_fleet(fleet), "copy", *to)
        assert code == 2
        assert document["hint"].endswith(f" copy --all{named}")
