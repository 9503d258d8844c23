"""Chains that begin with a merge are repaired, merged again and reduced; expected rows come from the made history."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.progress import Silent
from cutline.snapshots.copying.chains import CopyCrashPoint, StoreCopy, copy_snapshots
from cutline.snapshots.create.chain_objects import ChainObjectMissingError, check_objects
from cutline.snapshots.fold import limits
from cutline.snapshots.merge.running import MergeReport, Proof, plan_merge, run_merge
from cutline.snapshots.operations.object_damage import Damage
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, LARGE_OBJECTS, AbsentCopy, listed_objects
from cutline.snapshots.records.merge_records import first_increment, merge_key
from cutline.snapshots.records.merged_chain import MergedAwayError, read_from_merge
from cutline.snapshots.records.operation_records import Intent, OperationRecord, read_outcome
from cutline.snapshots.records.pins import pins_in_force
from cutline.snapshots.records.proven_chains import read_chain, read_continued
from cutline.snapshots.removal import removing
from cutline.snapshots.removal.earlier_objects import DropResult, drop_earlier_objects, plan_drop
from cutline.snapshots.removal.pinning import BeingRemovedError, PinnedError, pin_in_store
from cutline.snapshots.removal.pruning import increments_of
from cutline.snapshots.repair.base_rows import rebuild_base
from cutline.snapshots.repair.planning import RepairPlan, RepairRequest, _Planner, plan_repair
from cutline.snapshots.repair.running import RepairReport, run_repair
from cutline.storage.clock import utc_now
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import DeletionRefusedError, ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError
from tests.unit.made_garbage import preview_gc
from tests.unit.made_repairs import (
    ITEM,
    LOG,
    NAME,
    Change,
    MadeShard,
    NoSpark,
    Transaction,
    damage,
    item,
    log,
    restored,
    upserts,
)
from tests.unit.test_copying import KilledError, copied_up_to, copy, fleet_of, place, replace_store
from tests.unit.test_copying import repair as repair_fleet
from tests.unit.test_pins import MeetingStore
from tests.unit.test_repair import copy_of

ROWS = [*(item(number, f"v{number}") for number in range(20)), *(log(f"line {number % 3}") for number in range(9))]
# One transaction is prepared before both merges, and committed after them.
HISTORY = [
    upserts(100, item(1, "first")),
    Transaction(300, (Change("U", item(3, "prepared")),), prepared=3500),
    upserts(1200, item(4, "second"), log("more")),
    upserts(2200, item(1, "third")),
    upserts(3200, item(2, "fourth")),
]
BORDERS = {"a": [[250, 1000], [2000], [3000], [4000]], "b": [[350, 1000], [1250, 2000], [3000], [4000]]}


@pytest.fixture(autouse=True)
def driver_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who folds small amounts is drawn for every module (tests/run/folding.py), and these tests have no Spark."""
    monkeypatch.setattr(limits, "CHANGES_MAX", 500_000)


class Ready(NoSpark):
    """A SparkSource that may be begun, and has no session."""

    def begin(self, *_: object) -> None:
        """Do nothing."""


def new_shard() -> MadeShard:
    """A shard of so many objects that merges carry some of them."""
    return MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS, {"a": 9, "b": 5})


def merge(shard: MadeShard, increment: int) -> MergeReport:
    """Merge the chain; its rows are compared with the history instead of proven by Spark."""
    found = plan_merge(shard.fleet, NAME, increment, Silent())
    report = run_merge(shard.fleet, found, Ready(), Silent(), lambda *_: Proof(0, ""))  # type: ignore[arg-type]
    check_whole(shard)
    return report


def plan(shard: MadeShard, other: str | None = None) -> RepairPlan:
    return plan_repair(shard.fleet, RepairRequest(NAME, other), NoSpark(), Silent())  # type: ignore[arg-type]


def repair(shard: MadeShard, other: str | None = None) -> RepairReport:
    """Repair everything."""
    report = run_repair(shard.fleet, plan(shard, other), NoSpark(), Silent())  # type: ignore[arg-type]
    assert report.unrepaired == []
    assert plan(shard).damages == ()
    check_whole(shard)
    return report


def merged(shard: MadeShard) -> Chain:
    return read_chain_lists(shard.store, read_from_merge(shard.store, NAME))


def check_whole(shard: MadeShard) -> None:
    """Both copies restore the last state from the merge on."""
    chain = merged(shard)
    for node in ("a", "b"):
        assert restored(shard, chain, node) == shard.state_at(4000), node


@pytest.mark.parametrize("is_rebuilt", [False, True], ids=["from another store", "rebuilt"])
def test_the_next_merge_lists_what_a_repair_has_replaced(*, is_rebuilt: bool) -> None:
    shard = new_shard()
    shard.take()
    merge(shard, 1)
    other = copy_of(shard)
    ddl, segments = merged(shard).ddl_object("a"), merged(shard).segments("a")
    assert ddl is not None
    assert [segment.number for segment in segments] == [2, 3, 4, 5]
    damaged = {segments[0].key} if is_rebuilt else {segments[0].key, ddl.key}
    for key in damaged:
        damage(shard, key)
    replaced = repair(shard, None if is_rebuilt else other.url).replaced
    first = merged(shard).beginning
    assert first is not None
    assert {(one.merge, one.copy) for one in replaced} == {(first.merge.digest, "b" if is_rebuilt else "")}
    for increment in (2, 3):
        merge(shard, increment)
        assert merged(shard).full.increment == increment
        assert plan(shard).damages == ()
        assert not damaged & {entry.key for entry in merged(shard).full.named}


@pytest.mark.parametrize("is_missing", [False, True], ids=["altered", "missing"])
def test_nothing_is_merged_with_damaged_ddl(*, is_missing: bool) -> None:
    shard = new_shard()
    ddl = shard.take().ddl_object("a")
    assert ddl is not None
    damage(shard, ddl.key, None if is_missing else b"DDL")
    with pytest.raises(ObjectDamagedError, match=ddl.key):
        merge(shard, 1)
    assert merged(shard).beginning is None


def test_a_check_of_a_time_before_a_merge_that_can_not_be_read_does_not_check_the_newest_state_instead() -> None:
    shard = new_shard()
    shard.take()
    merge(shard, 1)
    merge(shard, 2)
    made_at = datetime.fromisoformat(merged(shard).full.cut.made_at)
    request = CheckRequest(NAME, metadata_only=True, at=made_at - timedelta(seconds=1))
    damage(shard, merge_key(NAME, 1), b"{}")
    (report,) = check_snapshots(shard.fleet, request, NoSpark(), Silent()).snapshots  # type: ignore[arg-type]
    assert [(one.kind, one.object) for one in report.conflicts if one.object == merge_key(NAME, 1)] == [
        ("commit", merge_key(NAME, 1))
    ]
    assert "the state at" in report.skipped[-1].what


def continued(shard: MadeShard) -> Chain:
    return read_continued(shard.store, NAME)


@pytest.mark.parametrize("kind", ["base", "segment"])
@pytest.mark.parametrize("body", [None, b"x"], ids=["missing", "wrong size"])
def test_a_chain_is_continued_without_what_only_states_before_its_merge_need(kind: str, body: bytes | None) -> None:
    shard = new_shard()
    chain = shard.take()
    merge(shard, 2)
    needed = {entry.key for commit in merged(shard).commits for entry in commit.named_and_listed}
    entries = chain.base_entries("a") if kind == "base" else chain.segments("a")
    lost = next(entry.key for entry in entries if entry.key not in needed)
    assert check_objects(shard.store, continued(shard)) == ""
    damage(shard, lost, body)
    assert plan(shard).damages == ()
    lack = check_objects(shard.store, continued(shard))
    assert lost in lack
    assert lack.endswith(f"snapshot merge {NAME} --to 2 --drop-earlier")
    copied = copy(shard.fleet, place())
    assert [problem.key for problem in copied.problems] == [lost]
    assert f"snapshot merge {NAME} --to 2 --drop-earlier" in copied.problems[0].hint
    drop_earlier_objects(shard.store, plan_drop(shard.store, NAME), Silent())
    assert check_objects(shard.store, continued(shard)) == ""
    assert copy(shard.fleet, place()).problems == []
    # What the merge lists is needed.
    key = merged(shard).segments("a")[0].key
    damage(shard, key, body)
    with pytest.raises(ChainObjectMissingError, match=key):
        check_objects(shard.store, continued(shard))


def test_restore_points_that_a_store_refuses_to_give_up_leave_one_open_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = new_shard()
    shard.take()
    merge(shard, 1)

    def refuse(store: InMemoryStore, key: str) -> None:
        raise DeletionRefusedError(url=store.url, key=key, reason="it is locked")

    with monkeypatch.context() as patched:
        patched.setattr(InMemoryStore, "delete", refuse)
        results = [drop_earlier_objects(shard.store, plan_drop(shard.store, NAME), Silent()) for _ in range(3)]
    assert [bool(one.refused) for one in results] == [True] * 3
    assert [one.id for one in read_open_intents(shard.store)] == [results[-1].operation]
    assert drop_earlier_objects(shard.store, plan_drop(shard.store, NAME), Silent()).refused == {}
    assert read_open_intents(shard.store) == []
    check_whole(shard)


@pytest.mark.parametrize(("at", "is_refused"), [
    ("deletion", True), ("deletion", False), ("record", True), ("search", True),
])  # fmt: skip
def test_two_commands_that_give_up_the_same_restore_points_leave_one_open_operation_or_none(
    monkeypatch: pytest.MonkeyPatch, at: str, *, is_refused: bool
) -> None:
    """The store refuses the second, which runs while the first deletes objects, or before it records that it has not
    finished, or before it looks for the operations that it repeats.
    """
    shard = new_shard()
    shard.take()
    merge(shard, 1)
    store, plan = shard.store, plan_drop(shard.store, NAME)
    delete, write, search = InMemoryStore.delete, removing.write_operation_record, removing.open_removals
    second, begin_second = [DropResult(plan)], iter([None])

    def run_second() -> None:
        if next(begin_second, True) is None:
            second[0] = drop_earlier_objects(store, plan, Silent())

    def delete_or_refuse(store: InMemoryStore, key: str) -> None:
        if at == "deletion":
            run_second()
        if is_refused or not second[0].operation:
            raise DeletionRefusedError(url=store.url, key=key, reason="it is locked")
        delete(store, key)

    def write_after_second(store: ObjectStore, name: str, record: OperationRecord) -> None:
        if at == "record":
            run_second()
        write(store, name, record)

    def search_after_second(store: ObjectStore, snapshot: str | None = None) -> list[Intent]:
        if at == "search":
            run_second()
        return search(store, snapshot)

    with monkeypatch.context() as patched:
        patched.setattr(removing, "DELETING_THREADS_MAX", 1)
        patched.setattr(InMemoryStore, "delete", delete_or_refuse)
        patched.setattr(removing, "write_operation_record", write_after_second)
        patched.setattr(removing, "open_removals", search_after_second)
        first = drop_earlier_objects(store, plan, Silent())
    assert second[0].refused
    assert bool(first.refused) == is_refused
    outcomes = {one: read_outcome(store, one) for one in (first.operation, second[0].operation)}
    opened = [one for one, outcome in outcomes.items() if outcome is None]
    ended = [(outcome.state, outcome.reason) for outcome in outcomes.values() if outcome]
    if is_refused:
        (last,) = opened
        assert ended == [("failed", f"continued by {last}")]
    else:
        assert ended == [("done", "")] * 2
    assert drop_earlier_objects(store, plan_drop(store, NAME), Silent()).refused == {}
    assert read_open_intents(store) == []
    check_whole(shard)


def test_a_chain_is_continued_after_a_repair_of_what_its_merge_lists() -> None:
    shard = new_shard()
    chain = shard.take()
    merge(shard, 3)
    segment = chain.newest_segments("a")[-1]
    assert segment in merged(shard).segments("a")
    damage(shard, segment.key)
    (replaced,) = repair(shard).replaced
    (new,) = replaced.segments
    # The next increment reads what is behind the cut.
    assert continued(shard).newest_segments("a")[-1] == new
    assert continued(shard).original(new) == segment
    assert check_objects(shard.store, continued(shard)) == ""
    assert restored(shard, read_chain(shard.store, NAME), "a") == shard.state_at(4000)

    carried = {entry.key for entry in merged(shard).base_entries("a")}
    lost = next(entry.key for entry in chain.base_entries("a") if entry.key in carried)
    damage(shard, lost)
    (replaced,) = repair(shard).replaced
    assert replaced.copy == "b"
    # Earlier restore points need its rows at an earlier position.
    assert lost in check_objects(shard.store, continued(shard))
    assert copy(shard.fleet, place()).problems[0].hint != ""


def test_a_full_snapshot_keeps_the_repairs_of_what_a_merge_has_listed() -> None:
    shard = new_shard()
    chain = shard.take()
    segment, ddl = chain.full.segments["a"][1], chain.ddl_object("a")
    assert ddl is not None
    merge(shard, 1)
    assert segment in merged(shard).segments("a")
    other = copy_of(shard)
    for key in (segment.key, ddl.key):
        damage(shard, key)
    digest = read_chain(shard.store, NAME, 0).digest
    repair(shard, other.url)
    assert read_chain(shard.store, NAME, 0).digest != digest
    removed = {listed.key for listed in increments_of(shard.store, NAME)}
    shard.builder.put_only_full(NAME)
    for key in removed:
        shard.store.delete(key)
    only = read_chain(shard.store, NAME)
    assert restored(shard, only, "a") == shard.state_at(1000)
    assert all(shard.store.exists(entry.key) for entry in only.full.named)
    assert not [one for one in preview_gc(shard.store).garbage if one.snapshot == NAME]


@dataclass
class Dying(Silent):
    """A process that dies at a point."""

    point: str

    def reached(self, point: str, *, node: str = "") -> None:
        if point == self.point:
            raise KilledError


def test_a_copy_that_dies_has_the_objects_of_its_repairs() -> None:
    """The full snapshot, which is there already, lists a segment that a merge lists as well."""
    shard = new_shard()
    chain = shard.take()
    second = place()
    report = StoreCopy(second.url, is_dry=False)
    with pytest.raises(KilledError):
        copy_snapshots(shard.fleet, second, NAME, Dying(CopyCrashPoint.COMMITTED), report)
    merge(shard, 1)
    damage(shard, chain.full.segments["a"][1].key)
    repair(shard)
    with pytest.raises(KilledError):
        copy_snapshots(shard.fleet, second, NAME, Dying(CopyCrashPoint.REPAIRS_STORED), report)
    there = second.location.open()
    full = read_chain(there, NAME)
    assert full.last.increment == 0
    assert full.applied.repairs
    assert all(there.exists(entry.key) for entry in full.full.named)
    assert copy(shard.fleet, second).problems == []


def test_a_merge_is_copied_although_the_second_store_has_repaired_what_it_lists() -> None:
    """A damaged object stays where it is, and is not to be copied again."""
    shard, second = new_shard(), place()
    chain = shard.take()
    copied_up_to(shard, second, 2)
    there = replace_store(shard, second)
    damage(there, chain.full.segments["a"][1].key)
    assert repair_fleet(fleet_of(shard.fleet, second)).unrepaired == []
    merge(shard, 1)
    copied = copy(shard.fleet, second)
    assert (copied.problems, copied.merges, copied.increments, copied.behind) == ([], [1], [2, 3], 0)
    begins = read_from_merge(there.store, NAME)
    assert begins.full.increment == 1
    assert restored(there, begins, "a") == shard.state_at(4000)
    assert preview_gc(there.store).garbage == []


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "object in it"])
@pytest.mark.parametrize("is_first_repaired", [False, True])
def test_a_merge_is_copied_although_the_second_store_has_repaired_an_object_list(
    *, is_list: bool, is_first_repaired: bool
) -> None:
    """The merge lists large objects as well; the first store may have lost their list, and have repaired it itself."""
    shard, second = MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS, large=3), place()
    chain = read_chain_lists(shard.store, shard.take())
    (large,), other = chain.full.lists, copy_of(shard)
    copied_up_to(shard, second, 2)
    there = replace_store(shard, second)
    damage(there, large.key if is_list else listed_objects(large)[1].key)
    assert repair_fleet(fleet_of(shard.fleet, second), shard.location.url).unrepaired == []
    if is_first_repaired:
        damage(shard, large.key)
        repair(shard, other.url)
    merge(shard, 1)
    copied = copy(shard.fleet, second)
    assert (copied.problems, copied.merges, copied.increments, copied.behind) == ([], [1], [2, 3], 0)
    begins = read_chain_lists(there.store, read_from_merge(there.store, NAME))
    assert begins.full.increment == 1
    assert restored(there, begins, "a") == shard.state_at(4000)
    objects = [stored for entry in begins.full.entries for stored in listed_objects(entry)]
    assert sum(stored.kind == LARGE_OBJECTS for stored in objects) == 3
    assert preview_gc(there.store).garbage == []


def test_a_merge_keeps_the_objects_of_a_repair_that_the_second_store_does_not_have() -> None:
    shard, second = new_shard(), place()
    chain = shard.take()
    copy(shard.fleet, second)
    there = replace_store(shard, second)
    damage(there, chain.increments[0].segments["a"][0].key)
    assert repair_fleet(fleet_of(shard.fleet, second)).unrepaired == []
    for entry in chain.base_entries("a"):
        damage(shard, entry.key)
    repaired = repair(shard, second.location.url)
    assert repaired.unrepaired == []
    merge(shard, 1)
    copied = copy(shard.fleet, second)
    assert (copied.problems, copied.merges) == ([], [1])
    begins = read_from_merge(there.store, NAME)
    # The merge carries some of them.
    assert {entry.key for one in repaired.replaced for entry in one.new} & {entry.key for entry in begins.full.named}
    report = preview_gc(there.store)
    assert (report.garbage, {kept.reason.value for kept in report.kept if kept.snapshot == NAME}) == ([], {"needed"})
    assert restored(there, begins, "a") == shard.state_at(4000)


def test_a_pin_at_any_moment_at_which_earlier_restore_points_are_given_up_is_refused_or_keeps_them() -> None:
    """The pin is stored in full before each call of the removal and of its plan in turn."""
    shard = new_shard()
    shard.take()
    merge(shard, 2)
    found: list[bool] = []
    for number in count(1):
        store, pinned = copy_of(shard).open(), list[bool]()
        before = set(store.list("snapshots"))

        def meet(call: int, store: ObjectStore = store, number: int = number, pinned: list[bool] = pinned) -> None:
            if call == number:
                try:
                    pin_in_store(store, NAME, 1)
                    pinned.append(True)
                except (BeingRemovedError, MergedAwayError):
                    pinned.append(False)

        meeting: Any = MeetingStore(store, meet)
        is_refused = False
        try:
            drop_earlier_objects(meeting, plan_drop(meeting, NAME), Silent())
        except PinnedError:
            is_refused = True
            assert before <= set(store.list("snapshots"))
        if not pinned:
            break
        found += pinned
        assert is_refused == pinned[0], f"call {number}"
        assert (first_increment(store, NAME) == 0) == is_refused, f"call {number}"
        assert len(pins_in_force(store, NAME, utc_now())) == pinned[0]
    # Before the removal is recorded, the pin is stored; after that it is refused.
    assert found == sorted(found, reverse=True)
    assert {*found} == {True, False}


def with_older_definition(shard: MadeShard, node: str) -> Chain:
    """The merged chain with another definition of `item`, under which only the other node's rows are stored."""
    chain = merged(shard)
    assert chain.beginning is not None
    newer = structs.replace(ITEM, number=3)
    copied = (
        structs.replace(entry, rows={newer.number: entry.rows[ITEM.number]})
        if entry.kind == BASE and entry.node != node
        else entry
        for entry in chain.full.copied
    )
    full = structs.replace(chain.full, groups={"a": (newer, LOG)}, copied=tuple(copied))
    beginning = replace(chain.beginning, ended={"a": (ITEM,)}, successions={"a": {newer.number: ITEM.number}})
    return replace(chain, full=full, beginning=beginning)


def planned(shard: MadeShard, chain: Chain, *keys: str) -> _Planner:
    nodes = {entry.key: entry.node for entry in chain.full.copied}
    damages = {key: Damage(key, nodes[key], "missing", "is missing") for key in keys}
    planner = _Planner(chain, shard.store, damages, None)
    planner.plan()
    return planner


@pytest.mark.parametrize("node", ["a", "b"])
def test_rows_are_found_in_the_other_copy_under_whichever_definition(node: str) -> None:
    shard = MadeShard(ROWS[:20], HISTORY[:1], {"a": 150, "b": 50}, BORDERS, {"a": 2, "b": 1})
    shard.take()
    merge(shard, 3)
    chain = with_older_definition(shard, node)
    keys = {one: [entry.key for entry in chain.base_entries(one)] for one in ("a", "b")}
    for one, other in (("a", "b"), ("b", "a")):
        key = keys[one][0]
        both = planned(shard, chain, key, *keys[other])
        assert both.steps == []
        (why,) = (entry.why for entry in both.unrepairable if entry.key == key)
        assert f"object {keys[other][0]} of {other} is damaged, too" in why
    assert [step.copy for step in planned(shard, chain, keys["a"][0]).steps] == ["b"]
    ended = AbsentCopy(1, "its slot is lost", chain.segments("b")[-1], has_ended=True)
    chain = replace(chain, full=structs.replace(chain.full, absent={"b": ended}))
    assert chain.absent
    assert [step.copy for step in planned(shard, chain, keys["a"][0]).steps] == ["b"]


def test_rows_of_a_table_that_is_gone_are_rebuilt_as_nothing() -> None:
    """The copy from which that is done has none of them either."""
    shard = MadeShard(ROWS[:20], HISTORY[:1], {"a": 150, "b": 50}, BORDERS, {"a": 2, "b": 1})
    shard.take()
    merge(shard, 3)
    chain = merged(shard)
    assert chain.beginning is not None
    ended = AbsentCopy(1, "its slot is lost", chain.segments("b")[-1], has_ended=True)
    copied = tuple(entry for entry in chain.full.copied if entry.node == "a")
    full = structs.replace(chain.full, groups={"a": (LOG,)}, absent={"b": ended}, copied=copied)
    chain = replace(chain, full=full, beginning=replace(chain.beginning, ended={"a": (ITEM,)}))
    assert chain.absent
    key = chain.base_entries("a")[0].key
    (step,) = planned(shard, chain, key).steps
    replacement = rebuild_base(chain, step.unit, "20261120T000000Z-0000000001", shard.work())
    assert [old.key for old in replacement.replaced] == [key]
    assert replacement.objects == ()
