"""A repair replaces what is damaged, survives a kill at every write, and leaves nothing that gc would not remove."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cutline.check.commit_entries import check_entries
from cutline.check.live.report import LiveReport
from cutline.check.report import Conflict, Doubt, Findings, SnapshotReport
from cutline.cli.commands.show import document_of, lines_of
from cutline.cli.output.arguments import CommandContext
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.operations import settling
from cutline.snapshots.operations.committing import RepairSupersededError, decide
from cutline.snapshots.operations.leases import SnapshotInUseError, check_not_in_use, hold_lease
from cutline.snapshots.operations.object_lists import read_chain_lists, replace_by_lists
from cutline.snapshots.operations.open_operations import read_open_intents, read_open_operations
from cutline.snapshots.operations.operation import Operation, commit_operation, new_operation
from cutline.snapshots.operations.settling import settle_in_store
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Previous, StoredObject
from cutline.snapshots.records.commit_rules import count_listed, definition_counts
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.proven_chains import SnapshotMissingError, commit_key, read_as_committed, read_chain
from cutline.snapshots.records.repair_records import Repair, RepairVoid, read_repair, read_repairs, repair_key
from cutline.snapshots.removal.pruning import increments_of
from cutline.snapshots.repair import running
from cutline.snapshots.repair.planning import Method, RepairPlan, RepairRequest, plan_repair
from cutline.snapshots.repair.running import RepairOutdatedError, RepairReport, run_repair
from cutline.snapshots.repair.second_store import NoSecondStoreError
from cutline.storage import storing
from cutline.storage.clock import utc_now
from cutline.storage.encryption.fleet_encryption import DataKey
from cutline.storage.errors import SnapshotError, StoppedError, UsageError
from cutline.storage.location import StoreLocation
from cutline.storage.store import (
    AnswerLostError,
    ObjectMissingError,
    ObjectStore,
    StoreUnreachableError,
    WritingRefusedError,
)
from cutline.wal.segments.segments import read_events
from tests.commands.in_process import run_and_capture, run_as_text, run_here, run_with_stderr
from tests.unit import made_repairs
from tests.unit.made_commits import increment_commit, unused_url
from tests.unit.made_garbage import preview_gc, run_gc
from tests.unit.made_lists import shorten_lists
from tests.unit.made_repairs import (
    NAME,
    Change,
    MadeShard,
    NoSpark,
    Transaction,
    damage,
    deletes,
    item,
    log,
    restored,
    upserts,
)

ROWS = [*(item(number, f"v{number}") for number in range(20)), *(log(f"line {number % 3}") for number in range(9))]
HISTORY = [
    upserts(100, item(1, "first")),
    deletes(220, item(2, "v2"), log("line 1")),
    Transaction(300, (Change("U", item(3, "prepared")),), prepared=1100),
    upserts(1200, item(4, "second"), log("more")),
    deletes(1300, item(5, "v5")),
    upserts(2200, item(1, "third")),
]
BORDERS = {"a": [[250, 1000], [2000], [3000]], "b": [[350, 1000], [1250, 2000], [3000]]}
KILLED = "killed"


def new_shard(**more: Any) -> MadeShard:
    return MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS, **more)


def plan(shard: MadeShard, **request: Any) -> RepairPlan:
    return plan_repair(shard.fleet, RepairRequest(NAME, **request), NoSpark(), Silent())  # type: ignore[arg-type]


def run(shard: MadeShard, planned: RepairPlan) -> RepairReport:
    return run_repair(shard.fleet, planned, NoSpark(), Silent())  # type: ignore[arg-type]


def repair(shard: MadeShard, **request: Any) -> RepairReport:
    return run(shard, plan(shard, **request))


def copy_of(shard: MadeShard) -> StoreLocation:
    """A second store with the same objects."""
    location = StoreLocation(unused_url())
    for key in shard.location.open_raw().list(""):
        location.open_raw().create(key, shard.location.open_raw().read(key))
    return location


def check_whole(shard: MadeShard) -> Chain:
    """Both copies restore the state at every cut."""
    for increment, position in enumerate((1000, 2000, 3000)):
        chain = read_chain(shard.store, NAME, increment)
        for node in ("a", "b"):
            assert restored(shard, chain, node) == shard.state_at(position), (increment, node)
    return read_chain(shard.store, NAME)


def test_the_made_shard_is_whole_without_a_repair() -> None:
    shard = new_shard()
    shard.take()
    assert not check_whole(shard).applied.repairs
    assert plan(shard).damages == ()


@pytest.mark.parametrize(("node", "number"), [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 3), ("b", 4), ("b", 5)])
@pytest.mark.parametrize("body", [None, b"x"], ids=["missing", "wrong size"])
def test_a_segment_is_rebuilt_from_the_other_archive(node: str, number: int, body: bytes | None) -> None:
    """The transaction prepared at 300 is split: its PREPARE and its COMMIT PREPARED are in different increments."""
    shard = new_shard()
    segment = shard.take().segments(node)[number - 1]
    damage(shard, segment.key, body)
    report = repair(shard)
    assert report.unrepaired == []
    repaired = check_whole(shard)
    new = repaired.segments(node)[number - 1]
    assert new.key != segment.key
    assert repaired.original(new) == segment
    assert (new.after, new.through, new.changes, new.events) == (
        segment.after, segment.through, segment.changes, segment.events,
    )  # fmt: skip


def test_a_segment_that_begins_before_the_other_archive_is_refused_by_name() -> None:
    shard = new_shard()
    first = shard.take().segments("b")[0]
    damage(shard, first.key)
    planned = plan(shard)
    assert planned.is_empty
    assert [one.key for one in planned.unrepairable] == [first.key]
    assert "the archive of a begins at 0/96, after the beginning of the segment at 0/32" in planned.unrepairable[0].why


def test_what_has_one_copy_comes_only_from_another_store() -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    ddl = next(entry for entry in chain.full.own_objects if entry.kind == "archive")
    damage(shard, ddl.key)
    assert "no other copy contains it" in plan(shard).unrepairable[0].why
    report = repair(shard, other=other.url)
    (new,) = report.replaced[0].objects
    assert shard.store.read(new.key) == b"ddl"
    assert read_chain(shard.store, NAME).ddl_object("a") == new


def test_a_missing_object_is_put_back_and_needs_no_document() -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    keys = [chain.base_entries("a")[0].key, chain.segments("a")[0].key]
    bodies = [shard.store.read(key) for key in keys]
    for key in keys:
        damage(shard, key, None)
    report = repair(shard, other=other.url)
    assert (sorted(report.put_back), report.number) == (sorted(keys), None)
    assert [shard.store.read(key) for key in keys] == bodies
    assert check_whole(shard).applied.repairs == ()
    with pytest.raises(ObjectMissingError):
        read_repair(shard.store, NAME, 1)


def findings_of(chain: Chain) -> tuple[list[Conflict], list[Doubt]]:
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    check_entries(chain, findings)
    return findings.report.conflicts, findings.report.doubts


def test_a_check_finds_nothing_new_about_the_objects_of_a_repair() -> None:
    """They belong to the operation of the repair, and not to that of the commit."""
    shard = new_shard()
    chain = shard.take()
    ddl, base = (next(one for one in chain.full.own_objects if one.kind == kind) for kind in ("archive", "base"))
    segment = chain.segments("a")[2]
    other = copy_of(shard)
    for key in (ddl.key, base.key):
        damage(shard, key)
    assert len(repair(shard, other=other.url).replaced) == 2
    damage(shard, segment.key)
    assert [one.copy for one in repair(shard).replaced] == ["b"]
    repaired = read_chain(shard.store, NAME)
    made = {doubt.object: doubt for doubt in findings_of(chain)[1]}
    assert findings_of(repaired)[0] == findings_of(chain)[0]
    assert findings_of(repaired)[1] == [doubt for key, doubt in made.items() if key != segment.key]
    assert repaired.up_to(0).digest != chain.up_to(0).digest


def test_a_second_store_is_trusted_only_by_digest() -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    key = chain.base_entries("a")[0].key
    damage(shard, key, None)
    other.open().delete(key)
    other.open().create(key, b"other")
    planned = plan(shard, other=other.url)
    assert [step.method for step in planned.steps] == [Method.REBUILD_ROWS]
    run(shard, planned)
    check_whole(shard)


def test_a_second_store_must_be_a_store_and_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written: a folder by its path, also a relative one, or by a URL."""
    monkeypatch.chdir(tmp_path)
    shard = new_shard(location=StoreLocation(f"file://{tmp_path}/own"))
    shard.take()
    for place in (f"{tmp_path}/own", f"file://{tmp_path}/own/", "own", "./own"):
        with pytest.raises(UsageError, match="names the fleet's own store"):
            plan(shard, other=place)
    with pytest.raises(NoSecondStoreError, match=r"no store at .*nowhere: it has no fleet\.json"):
        plan(shard, other=f"{tmp_path}/nowhere")


def test_in_an_encrypted_store_the_new_object_is_bound_to_its_key() -> None:
    shard = new_shard(location=StoreLocation(unused_url(), encryption=DataKey(bytes(32))))
    chain = shard.take()
    other = copy_of(shard)
    ddl = next(entry for entry in chain.full.own_objects if entry.kind == "archive")
    raw = shard.location.open_raw()
    for key in (ddl.key, chain.segments("a")[1].key):
        body = raw.read(key)
        raw.delete(key)
        raw.create(key, bytes(len(body)))
    report = repair(shard, other=other.url)
    assert len(report.replaced) == 2
    repaired = read_chain(shard.store, NAME)
    new = repaired.ddl_object("a")
    assert new is not None
    assert new.digest != ddl.digest
    assert shard.store.read(new.key) == b"ddl"
    segment = repaired.segments("a")[1]
    assert len(read_events(shard.store, segment)) == segment.events


def test_an_object_in_an_object_list_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    shorten_lists(monkeypatch)
    listing(shard, monkeypatch)
    chain = read_chain_lists(shard.store, shard.take())
    listed = [entry for entry in chain.base_entries("a") if not isinstance(entry, StoredObject)]
    assert listed
    key = next(key for key in chain.full.object_sizes if "/base/a/" in key)
    damage(shard, key, None)
    report = repair(shard)
    assert report.unrepaired == []
    repaired = read_chain_lists(shard.store, read_chain(shard.store, NAME))
    assert key not in repaired.full.object_sizes
    assert len(set(repaired.full.object_sizes) - set(chain.full.object_sizes)) == len(report.replaced[0].objects)
    # A second look finds nothing.
    assert plan(shard).damages == ()


def test_a_lost_object_list_counts_as_all_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    shorten_lists(monkeypatch)
    listing(shard, monkeypatch)
    chain = shard.take()
    key = next(entry.key for entry in chain.base_entries("a"))
    damage(shard, key, None)
    assert repair(shard).unrepaired == []
    repaired = read_chain(shard.store, NAME)
    assert all(isinstance(entry, StoredObject) for entry in repaired.base_entries("a"))
    assert restored(shard, repaired, "a") == shard.state_at(3000)


def listing(shard: MadeShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the shard's full snapshot name object lists."""
    commit = made_repairs.commit_operation

    def commit_listed(store: Any, operation: Any, made: Any) -> None:
        made = replace_by_lists(store, made, Silent())
        counts = made_repairs.count_listed({"a"}, made)
        commit(store, operation, structs.replace(made, counts=made.counts | counts))

    monkeypatch.setattr(made_repairs, "commit_operation", commit_listed)


def test_a_replacement_that_is_damaged_in_turn_is_replaced_again() -> None:
    shard = new_shard()
    chain = shard.take()
    damage(shard, chain.segments("a")[2].key)
    damage(shard, chain.base_entries("a")[0].key)
    repair(shard)
    repaired = read_chain(shard.store, NAME)
    new = [key for key in (*object_keys(repaired),) if key not in object_keys(chain)]
    for key in new:
        damage(shard, key)
    report = repair(shard)
    assert (report.number, report.unrepaired) == (2, [])
    assert len(check_whole(shard).applied.repairs) == 2
    shown = read_chain(shard.store, NAME)
    assert [one["number"] for one in document_of(Entry(NAME, shown), shown)["repairs"]] == [1, 2]
    lines = [line for line in lines_of(Entry(NAME, shown), shown) if isinstance(line, str)]
    assert [line.split(" of ")[0] for line in lines if " replaced " in line] == ["repair 1", "repair 2"]
    assert {garbage.why for garbage in preview_gc(shard.store).garbage} == set()


def object_keys(chain: Chain) -> set[str]:
    return {key for commit in chain.commits for key in commit.object_sizes}


def test_the_next_increment_continues_a_repaired_chain() -> None:
    """What an increment names of earlier commits is what they list, not what has superseded it."""
    shard = new_shard()
    chain = shard.take()
    last = chain.segments("a")[-1]
    damage(shard, last.key)
    repair(shard)
    repaired = read_chain(shard.store, NAME)
    assert repaired.last.digest == chain.last.digest
    assert repaired.digest != chain.digest
    assert repaired.up_to(1).digest == chain.up_to(1).digest
    number = chain.last.increment + 1
    made = increment_commit(number, chain.full.operation)
    cut = structs.replace(made.cut, nodes=chain.last.cut.nodes)
    idle = {node: repaired.original(repaired.segments(node)[-1]) for node in ("a", "b")}
    operation = shard.builder.begin_create(NAME, number)
    made = structs.replace(
        made, operation=operation.id, cut=cut, segments={"a": (), "b": ()}, idle=idle, history=repaired.next_history,
    )  # fmt: skip
    made = structs.replace(made, previous=Previous(repaired.last.operation, repaired.last.digest))
    counts = count_listed({"a"}, made) | definition_counts(
        structs.replace(repaired, increments=(*repaired.increments, made))
    )
    commit_operation(shard.store, Operation(operation), structs.replace(made, counts=counts))
    assert read_chain(shard.store, NAME).last.idle["a"] == repaired.segments("a")[-1]
    assert read_as_committed(shard.store, NAME).last.idle["a"] == last


def shard_without_commits() -> tuple[MadeShard, StoreLocation, list[str]]:
    """A shard whose store has lost its commits, a copy of the store that has them, and their keys."""
    shard = new_shard()
    shard.take()
    other = copy_of(shard)
    keys = [commit_key(NAME, number) for number in (0, 1, 2)]
    for key in keys:
        damage(shard, key, None)
    return shard, other, keys


def test_missing_commits_are_put_back_from_a_second_store_that_belongs_here() -> None:
    shard, other, keys = shard_without_commits()
    with pytest.raises(SnapshotMissingError):
        plan(shard)
    planned = plan(shard, other=other.url)
    assert [commit.key for commit in planned.commits] == keys
    assert run(shard, planned).put_back == keys
    check_whole(shard)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_commit_is_put_back_only_as_it_was_planned(*, is_gone: bool) -> None:
    shard, other, keys = shard_without_commits()
    planned = plan(shard, other=other.url)
    copied = other.open()
    body = copied.read(keys[1])
    copied.delete(keys[1])
    if not is_gone:
        # The beginning, as in an answer that was cut short.
        copied.create(keys[1], body[:-100])
    report = run(shard, planned)
    assert report.put_back == keys[:1]
    assert [one.key for one in report.unrepaired] == keys[1:]
    assert [shard.store.exists(key) for key in keys] == [True, False, False]


def test_a_commit_of_a_store_that_went_its_own_way_is_refused() -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    for key in (commit_key(NAME, 2), f"operations/{chain.last.operation}/outcome.json"):
        damage(shard, key, None)
    # The other store has another increment 2, which no operation here has recorded.
    planned = plan(shard, other=other.url)
    assert planned.commits == ()
    damage(shard, commit_key(NAME, 1), None)
    planned = plan(shard, other=other.url)
    assert [commit.key for commit in planned.commits] == [commit_key(NAME, 1)]
    assert [one.key for one in planned.unrepairable] == [commit_key(NAME, 2)]


@dataclass
class Dying:
    """A store that stops answering before or after its n-th put, as if the process were killed there."""

    store: ObjectStore
    puts: int
    after: bool
    is_dead: bool = False

    def create(self, key: str, body: bytes) -> None:
        self.check()
        self.puts -= 1
        if self.puts == 0 and not self.after:
            self.is_dead = True
        self.check()
        self.store.create(key, body)
        if self.puts == 0:
            self.is_dead = True
        self.check()

    def check(self) -> None:
        if self.is_dead:
            raise KeyboardInterrupt(KILLED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("stored_offset", "encode", "decode", "stored_size"):
            raise AttributeError(name)
        self.check()
        return getattr(self.store, name)


@dataclass(frozen=True)
class DyingLocation:
    dying: Any
    url: str = "memory://dying"
    options: Any = None
    encryption: Any = None

    def open(self) -> Any:
        return self.dying

    def open_raw(self) -> Any:
        return self.dying


def puts_of(damaging: Callable[[MadeShard, Chain], object]) -> int:
    shard = new_shard()
    damaging(shard, shard.take())
    counting = Dying(shard.store, 1_000_000, after=True)
    run_repair(with_store(shard.fleet, counting), plan(shard), NoSpark(), Silent())  # type: ignore[arg-type]
    return 1_000_000 - counting.puts


def with_store(fleet: Fleet, dying: Dying | Losing) -> Fleet:
    return replace(fleet, store=DyingLocation(dying))  # type: ignore[arg-type]


def damage_both(shard: MadeShard, chain: Chain) -> None:
    damage(shard, chain.segments("a")[2].key)
    damage(shard, chain.base_entries("b")[0].key)


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_write_leaves_the_chain_readable_and_nothing_for_ever(
    after: bool,  # noqa: FBT001  # a parameter
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = puts_of(damage_both)
    assert count >= 5
    for put in range(1, count + 1):
        shard = new_shard()
        chain = shard.take()
        damage_both(shard, chain)
        before = set(shard.store.list(""))
        planned, dying = plan(shard), Dying(shard.store, put, after)
        with pytest.raises(StoppedError):
            run_repair(with_store(shard.fleet, dying), planned, NoSpark(), Silent())  # type: ignore[arg-type]
        # The chain is as before or repaired, never in between.
        repairs = read_chain(shard.store, NAME).applied.repairs
        assert len(repairs) <= 1
        if repairs:
            check_whole(shard)
        # A running repair's objects are not garbage.
        assert not [one for one in preview_gc(shard.store).garbage if one.snapshot == NAME]
        with monkeypatch.context() as patch:
            patch.setattr(settling, "utc_now", lambda: utc_now() + timedelta(hours=1))
            for intent in read_open_intents(shard.store):
                settle_in_store(shard.store, intent, Silent())
        assert read_open_operations(shard.store) == ()
        run_gc(shard.store)
        kept = [key for key in shard.store.list(f"snapshots/{NAME}") if key not in before]
        if not repairs:
            # Only the void that keeps a late put away is left.
            assert all(key.startswith(f"snapshots/{NAME}/repairs/") for key in kept), kept
            assert repair(shard).unrepaired == []
        check_whole(shard)


@dataclass
class Losing:
    """A store that loses the answer to its n-th put, which it has stored or not."""

    store: ObjectStore
    puts: int
    stored: bool

    def create(self, key: str, body: bytes) -> None:
        self.puts -= 1
        if self.puts or self.stored:
            self.store.create(key, body)
        if not self.puts:
            raise AnswerLostError(url="memory://losing", key=key, reason="time-out")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("stored_offset", "encode", "decode", "stored_size"):
            raise AttributeError(name)
        return getattr(self.store, name)


@pytest.mark.parametrize("stored", [False, True])
def test_after_a_lost_answer_to_any_put_the_chain_is_as_before_or_repaired(
    stored: bool,  # noqa: FBT001  # a parameter
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.0,))
    count, errors = puts_of(damage_both), list[str]()
    for put in range(1, count + 1):
        shard = new_shard()
        damage_both(shard, shard.take())
        losing = Losing(shard.store, put, stored)
        try:
            report = run_repair(with_store(shard.fleet, losing), plan(shard), NoSpark(), Silent())  # type: ignore[arg-type]
        except SnapshotError as error:
            errors.append(error.slug)
            assert read_chain(shard.store, NAME).applied.repairs == ()
            with monkeypatch.context() as patch:
                patch.setattr(settling, "utc_now", lambda: utc_now() + timedelta(hours=1))
                for intent in read_open_intents(shard.store):
                    settle_in_store(shard.store, intent, Silent())
            assert repair(shard).unrepaired == []
        else:
            assert report.unrepaired == []
        check_whole(shard)
    # The intent, the objects, the document; the answer to the outcome's put does not matter.
    if stored:
        assert errors == []
    else:
        assert errors == ["repair-unrecorded", *["store-answers-lost"] * (count - 3), "commit-indeterminate"]


def test_a_void_keeps_a_late_put_away_and_readers_skip_it() -> None:
    shard = new_shard()
    chain = shard.take()
    damage_both(shard, chain)
    late = structs.replace(new_operation("repair", NAME, 2, ("a",)), repair=1)
    assert not decide(shard.store, late)
    assert isinstance(read_repair(shard.store, NAME, 1), RepairVoid)
    assert read_repairs(shard.store, NAME) == ()
    assert repair(shard).number == 2
    check_whole(shard)


def test_of_two_repairs_at_the_same_time_one_is_refused() -> None:
    shard = new_shard()
    chain = shard.take()
    damage_both(shard, chain)
    first, second = plan(shard), plan(shard)
    run(shard, first)
    with pytest.raises(RepairOutdatedError):
        run(shard, second)


def test_a_repair_that_loses_the_race_for_the_document_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    damage_both(shard, shard.take())
    planned, rival, put = plan(shard), plan(shard), running.put_repair

    def put_late(store: Any, document: Repair) -> None:
        monkeypatch.setattr(running, "put_repair", put)
        run(shard, rival)
        put(store, document)

    monkeypatch.setattr(running, "put_repair", put_late)
    with pytest.raises(RepairSupersededError):
        run(shard, planned)
    assert len(check_whole(shard).applied.repairs) == 1
    assert {one.why for one in preview_gc(shard.store).garbage} == {"failed"}


def test_a_snapshot_that_is_being_repaired_is_not_removed() -> None:
    shard = new_shard()
    shard.take()
    intent = structs.replace(new_operation("repair", NAME, 2, ("a",)), repair=1)
    with hold_lease(shard.store, intent, Silent()), pytest.raises(SnapshotInUseError, match="is being repaired"):
        check_not_in_use(shard.store, NAME)
    check_not_in_use(shard.store, NAME)


def test_pruned_increments_take_their_repairs_along_and_the_full_snapshot_keeps_its_own() -> None:
    shard = new_shard()
    chain = shard.take()
    for key in (chain.segments("a")[1].key, chain.segments("a")[2].key, chain.base_entries("a")[0].key):
        damage(shard, key)
    repair(shard)
    full = read_chain(shard.store, NAME, 0)
    removed = {listed.key for listed in increments_of(shard.store, NAME)}
    kept = {key for key in shard.store.list(f"snapshots/{NAME}") if key not in removed}
    assert set(full.full.object_sizes) <= kept
    assert {
        segment.key for commit in read_chain(shard.store, NAME).increments for segment in commit.segments["a"]
    } <= removed
    shard.builder.put_only_full(NAME)
    for key in removed:
        shard.store.delete(key)
    only = read_chain(shard.store, NAME)
    assert restored(shard, only, "a") == shard.state_at(1000)
    assert not [one for one in preview_gc(shard.store).garbage if one.snapshot == NAME]


def changed(repair: Repair, **fields: Any) -> Repair:
    return structs.replace(repair, replacements=(structs.replace(repair.replacements[0], **fields),))


@pytest.mark.parametrize("change", [
    lambda one: structs.replace(one, chain="20261120T000000Z-0000000009"),
    lambda one: structs.replace(one, snapshot="weekly"),
    lambda one: structs.replace(one, number=2),
    lambda one: structs.replace(one, previous="0" * 64),
    lambda one: structs.replace(one, operation="20261120T000000Z-0000000009"),
    lambda one: changed(one, commit="0" * 64),
    lambda one: changed(one, increment=2),
    lambda one: changed(one, node="b"),
    lambda one: changed(one, segments=()),
    lambda one: changed(one, replaced=()),
    lambda one: changed(one, replaced=one.replacements[0].replaced * 2),
    lambda one: changed(one, replaced=(structs.replace(one.replacements[0].replaced[0], digest="0" * 64),)),
    lambda one: changed(one, replaced=(structs.replace(one.replacements[0].replaced[0], key="x"),)),
    lambda one: changed(one, segments=(structs.replace(one.replacements[0].segments[0], through=7),)),
    lambda one: changed(one, segments=(structs.replace(one.replacements[0].segments[0], number=9),)),
    lambda one: structs.replace(one, replacements=one.replacements * 2),
])  # fmt: skip
def test_a_repair_that_does_not_fit_the_chain_is_refused_by_name(change: Callable[[Repair], Repair]) -> None:
    shard = new_shard()
    damage(shard, shard.take().segments("a")[2].key)
    repair(shard)
    key = repair_key(NAME, 1)
    stored = read_repair(shard.store, NAME, 1)
    assert isinstance(stored, Repair)
    damage(shard, key, seal(change(stored)))
    with pytest.raises(ManifestError) as error:
        read_chain(shard.store, NAME)
    assert error.value.details["object"] == key
    damage(shard, key, b"{}")
    with pytest.raises(ManifestError, match="is damaged"):
        read_chain(shard.store, NAME)
    # Without it, the snapshot is as it was.
    damage(shard, key, None)
    assert read_chain(shard.store, NAME).applied.repairs == ()
    assert repair(shard).number == 1


def test_a_repair_that_changes_the_tables_of_an_object_is_refused() -> None:
    shard = new_shard()
    chain = shard.take()
    damage(shard, chain.base_entries("a")[0].key)
    repair(shard)
    stored = read_repair(shard.store, NAME, 1)
    assert isinstance(stored, Repair)
    objects = stored.replacements[0].objects
    damage(shard, repair_key(NAME, 1), seal(changed(stored, objects=(structs.replace(objects[0], rows={7: 1}),))))
    with pytest.raises(ManifestError, match="rows of other groups"):
        read_chain(shard.store, NAME)


def test_pruned_increments_do_not_come_back_from_a_store_that_was_not_pruned() -> None:
    shard = new_shard()
    shard.take()
    other = copy_of(shard)
    removed = {listed.key for listed in increments_of(shard.store, NAME)}
    shard.builder.put_only_full(NAME)
    for key in removed:
        shard.store.delete(key)
    only = read_chain(shard.store, NAME)
    damage(shard, only.base_entries("a")[0].key)
    planned = plan(shard, other=other.url)
    assert (planned.commits, [step.method for step in planned.steps]) == ((), [Method.FETCH])
    report = run(shard, planned)
    assert report.unrepaired == []
    assert not any(shard.store.exists(key) for key in removed)
    assert restored(shard, read_chain(shard.store, NAME), "a") == shard.state_at(1000)


def test_increments_that_were_pruned_after_the_plan_was_made_do_not_come_back() -> None:
    shard = new_shard()
    shard.take()
    other = copy_of(shard)
    damage(shard, commit_key(NAME, 2), None)
    planned = plan(shard, other=other.url)
    shard.builder.put_only_full(NAME)
    with pytest.raises(RepairOutdatedError, match="were pruned since the repair was planned"):
        run(shard, planned)
    assert not shard.store.exists(commit_key(NAME, 2))


def test_the_command_repairs_what_it_finds_once_the_commits_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    for key in (commit_key(NAME, 1), commit_key(NAME, 2)):
        damage(shard, key, None)
    lost, altered = chain.segments("a")[2].key, chain.base_entries("b")[0].key
    damage(shard, lost, None)
    damage(shard, altered)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    code, document = run_here(shard.fleet, "repair", NAME, "--from", other.url, "--yes")
    assert (code, document["unrepaired"]) == (0, [])
    assert document["commits"] == [commit_key(NAME, 1), commit_key(NAME, 2)]
    assert document["put_back"] == [*document["commits"], lost]
    assert [old["object"] for one in document["replaced"] for old in one["objects"]] == [altered]
    check_whole(shard)
    assert plan(shard).damages == ()


def test_the_command_ends_with_1_if_damage_remains_once_the_commits_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    damage(shard, commit_key(NAME, 2), None)
    for node in ("a", "b"):
        for entry in chain.base_entries(node):
            damage(shard, entry.key)
            other.open_raw().delete(entry.key)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    code, document = run_here(shard.fleet, "repair", NAME, "--from", other.url, "--yes")
    assert (code, document["put_back"]) == (1, [commit_key(NAME, 2)])
    assert len(document["unrepaired"]) == len(chain.base_entries("a")) + len(chain.base_entries("b"))


FULL = StoreUnreachableError(url="file:///store", reason="no space left on device", hint="check the free space")
FORBIDDEN = WritingRefusedError(url="s3://bucket", reason="403 AccessDenied")


def refuse_creates(shard: MadeShard, monkeypatch: pytest.MonkeyPatch, error: SnapshotError) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(type(shard.location.open_raw()), "create", refuse)


@pytest.mark.parametrize(("problem", "code", "slug"), [
    (FULL, 6, "repair-unrecorded"),
    (FORBIDDEN, 3, "repair-forbidden"),
], ids=["full", "forbidden"])  # fmt: skip
def test_a_repair_that_can_t_be_recorded_says_why(
    problem: SnapshotError, code: int, slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = new_shard()
    damage_both(shard, shard.take())
    refuse_creates(shard, monkeypatch, problem)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    err = io.StringIO()
    with_code, out = run_with_stderr(err, shard.fleet, "repair", NAME, "--yes", "--json")
    document = json.loads(out)
    assert (with_code, document["code"], document["error"]) == (code, code, slug)
    assert (
        document["message"] == f"the repair of {NAME} could not be recorded, and nothing was changed: {problem.message}"
    )
    assert (document["hint"], document["details"]) == (problem.hint, {**problem.details, "snapshot": NAME})
    assert "protected from deletion" not in err.getvalue()


@dataclass
class Stopping(Silent):
    """A Progress that a signal interrupts at a point, or after so many steps of the repair."""

    point: str = ""

    def reached(self, point: str, *, node: str = "") -> None:
        if point == self.point:
            raise KeyboardInterrupt(15)

    def advance(self, done: int) -> None:
        if self.point == "first step":
            raise KeyboardInterrupt(15)


STOPPED_BY = [
    ("intent stored", "nothing in daily was repaired", "repeat the command; new objects"),
    ("new objects stored", "nothing in daily was repaired", "until gc removes them: snapshot gc"),
    ("repair stored", "the repair of daily is complete, with 2 objects replaced", "snapshot check daily"),
]


@pytest.mark.parametrize(("point", "message", "hint"), STOPPED_BY)
def test_a_stopped_repair_says_what_it_has_done(point: str, message: str, hint: str) -> None:
    shard = new_shard()
    damage_both(shard, shard.take())
    with pytest.raises(StoppedError) as stopped:
        run_repair(shard.fleet, plan(shard), NoSpark(), Stopping(point))  # type: ignore[arg-type]
    assert stopped.value.message == message
    assert hint in stopped.value.hint
    outcome = read_outcome(shard.store, str(stopped.value.details["operation"]))
    assert outcome is not None
    assert outcome.state == ("done" if point == "repair stored" else "failed")
    assert outcome.reason == ("" if point == "repair stored" else "stopped by SIGTERM")


def test_a_stopped_repair_counts_the_missing_objects_that_are_back() -> None:
    shard = new_shard()
    chain = shard.take()
    other = copy_of(shard)
    damage(shard, chain.segments("a")[2].key, None)
    damage(shard, chain.base_entries("b")[0].key)
    planned = plan(shard, other=other.url)
    assert planned.steps[0].method is Method.PUT_BACK
    with pytest.raises(
        StoppedError, match="no damaged object of daily was replaced; 1 missing object is back"
    ) as stopped:
        run_repair(shard.fleet, planned, NoSpark(), Stopping("first step"))  # type: ignore[arg-type]
    assert stopped.value.hint.startswith("to repair the rest, repeat the command")


def test_a_stopped_repair_of_commit_files_names_those_that_are_back_and_no_new_objects() -> None:
    shard = new_shard()
    shard.take()
    other = copy_of(shard)
    for number in (1, 2):
        damage(shard, commit_key(NAME, number), None)
    planned = plan(shard, other=other.url)
    with pytest.raises(StoppedError) as stopped:
        run_repair(shard.fleet, planned, NoSpark(), Stopping("first step"))  # type: ignore[arg-type]
    assert stopped.value.message == "no damaged object of daily was replaced; 1 missing object is back"
    assert stopped.value.hint == "to repair the rest, repeat the command"


def test_a_dry_run_is_refused_as_the_repair_is_if_nothing_can_be_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    chain = shard.take()
    for node in ("a", "b"):
        for segment in chain.segments(node):
            damage(shard, segment.key, None)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    answers = [run_here(shard.fleet, "repair", NAME, option) for option in ("--dry-run", "--yes")]
    assert answers[0] == answers[1]
    assert (answers[0][0], answers[0][1]["error"]) == (3, "nothing-repairable")
    code, text = run_and_capture(shard.fleet, "repair", NAME, "--dry-run")
    assert (code, text.count("can't be repaired: object")) == (3, len(answers[0][1]["details"]["unrepairable"]))


def test_the_plan_of_a_dry_run_is_printed_even_if_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    damage_both(shard, shard.take())
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    out = run_as_text(shard.fleet, "repair", NAME, "--dry-run", "--quiet")
    assert "replace segment" in out
    assert run_with_stderr(io.StringIO(), shard.fleet, "gc", "--yes", "--quiet") == (0, "")
    help_text = " ".join(run_as_text(shard.fleet, "--help").split())
    assert "except a list or the plan of a dry run" in help_text


def test_the_last_progress_of_a_repair_counts_every_object_that_was_to_be_read() -> None:
    shard = new_shard()
    chain = shard.take()
    damage(shard, chain.segments("a")[2].key, None)
    shown = Counting()
    plan_repair(shard.fleet, RepairRequest(NAME), NoSpark(), shown)  # type: ignore[arg-type]
    assert shown.done == shown.total > 0


class Counting(Silent):
    """A Progress that counts in the step that reads objects."""

    done = total = 0
    is_reading = False

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.is_reading = name == "read objects"
        self.total = total or 0 if self.is_reading else self.total

    def advance(self, done: int) -> None:
        self.done += done if self.is_reading else 0


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_check_whose_result_can_t_be_recorded_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
    is_quiet: bool,  # noqa: FBT001  # a parameter
) -> None:
    shard = new_shard()
    chain = shard.take()
    damage(shard, chain.segments("a")[2].key, None)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    for problem in (FULL, FORBIDDEN):
        with monkeypatch.context() as patch:
            refuse_creates(shard, patch, problem)
            text = (
                "the result of this check could not be recorded, so list, metrics, history and prune do not know it:"
                f" {problem.message}"
            )
            err = io.StringIO()
            words = ["check", NAME, "--metadata-only", *["--quiet"] * is_quiet]
            code, out = run_with_stderr(err, shard.fleet, *words, "--json")
            assert (code, json.loads(out)["warnings"]) == (1, [text])
            assert err.getvalue().count("could not be recorded") == 1
            err = io.StringIO()
            code, out = run_with_stderr(err, shard.fleet, *words)
            assert code == 1
            assert (err.getvalue() + out).count(text) == 1
    code, document = run_here(shard.fleet, "check", NAME, "--metadata-only")
    assert (code, document["warnings"]) == (1, [])


def test_a_check_of_running_databases_whose_result_can_t_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = new_shard()
    shard.take()
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    monkeypatch.setattr("cutline.cli.commands.check_live.check_live", lambda *_: LiveReport())
    refuse_creates(shard, monkeypatch, FULL)
    code, document = run_here(shard.fleet, "check", "--live")
    assert (code, document["warnings"]) == (
        4,
        [f"the result of this check-live could not be recorded, so history and metrics do not know it: {FULL.message}"],
    )
