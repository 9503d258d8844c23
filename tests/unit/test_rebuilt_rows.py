"""Base objects that are rebuilt from the other copy restore the same rows, wherever both copies began."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace

import cutline.snapshots.repair.base_rows as base_rows
from cutline.fleet.progress import Silent
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.repair_records import Replacement
from cutline.snapshots.repair.base_rows import BaseUnit, rebuild_base
from cutline.snapshots.repair.planning import RepairRequest, plan_repair
from cutline.snapshots.repair.rebuilt_segments import NotRebuildableError
from cutline.snapshots.repair.running import RepairReport, run_repair
from tests.unit.made_repairs import (
    ITEM,
    LOG,
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

ITEMS = [item(number, f"v{number}") for number in range(30)]
LINES = [log(f"line {number % 4}") for number in range(12)]
# Inserts, updates and deletes of both tables, before, between and after the copies.
HISTORY = [
    upserts(100, item(3, "before")),
    upserts(200, item(5, "between"), item(100, "new"), log("line 1"), log("fresh")),
    deletes(220, item(7, "v7"), log("line 2")),
    Transaction(210, (Change("U", item(9, "prepared")), Change("I", log("prepared"))), prepared=240),
    Transaction(245, (Change("U", item(10, "late")), Change("I", log("late"))), prepared=400),
    upserts(300, item(5, "after"), item(101, "newer"), log("line 1")),
    deletes(320, item(100, "new"), log("fresh"), log("line 0")),
]
POSITIONS = [(150, 150), (150, 250), (250, 150), (0, 260), (260, 0)]


def base_keys(chain: Chain, node: str) -> list[str]:
    return [entry.key for entry in chain.base_entries(node)]


def repair(shard: MadeShard, *, other: str | None = None) -> RepairReport:
    plan = plan_repair(shard.fleet, RepairRequest(NAME, other), NoSpark(), Silent())  # type: ignore[arg-type]
    return run_repair(shard.fleet, plan, NoSpark(), Silent())  # type: ignore[arg-type]


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize(("first", "second"), POSITIONS)
@pytest.mark.parametrize("rows", [ITEMS, [*ITEMS, *LINES]], ids=["keyed", "both"])
def test_a_rebuilt_object_restores_the_same_rows(
    node: str, first: int, second: int, rows: list[tuple[int, bytes]]
) -> None:
    history = [
        Transaction(
            one.at, tuple(c for c in one.changes if len(rows) > len(ITEMS) or c.row[0] == ITEM.number), one.prepared
        )
        for one in HISTORY
    ]
    shard = MadeShard(rows, history, {"a": first, "b": second})
    chain = shard.take()
    truth = shard.state_at(1000)
    assert restored(shard, chain, "a") == restored(shard, chain, "b") == truth
    key = base_keys(chain, node)[1]
    damage(shard, key)
    report = repair(shard)
    assert report.unrepaired == []
    assert report.number == 1
    repaired = read_chain(shard.store, NAME)
    assert key not in base_keys(repaired, node)
    assert restored(shard, repaired, node) == truth
    # The other copy is as it was, and what is intact of a table with a key stays.
    other = "b" if node == "a" else "a"
    assert base_keys(repaired, other) == base_keys(chain, other)
    if len(rows) == len(ITEMS):
        assert set(base_keys(chain, node)) - {key} < set(base_keys(repaired, node))
    assert shard.store.read(key) == b"damaged"


def rebuild(shard: MadeShard, chain: Chain, node: str, *keys: str) -> Replacement:
    unit = BaseUnit(node, "b" if node == "a" else "a", 0, dict.fromkeys(keys, "digest"))
    return rebuild_base(chain, unit, "20261120T000000Z-0000000001", shard.work())


def test_only_lost_rows_are_written_unless_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = MadeShard(ITEMS)
    chain = shard.take()
    first, *_ = base_keys(chain, "a")
    one = rebuild(shard, chain, "a", first)
    assert [old.key for old in one.replaced] == [first]
    assert sum(new.rows[ITEM.number] for new in one.objects) == 10
    monkeypatch.setattr(base_rows, "LOST_ROWS_MAX", 9)
    every = rebuild(shard, chain, "a", first)
    assert [(old.key == first, old.damage) for old in every.replaced] == [
        (True, "digest"), (False, "intact"), (False, "intact"),
    ]  # fmt: skip
    assert sum(new.rows[ITEM.number] for new in every.objects) == 30


def test_all_objects_of_a_copy_are_rebuilt() -> None:
    shard = MadeShard([*ITEMS, *LINES], HISTORY, {"a": 150, "b": 250})
    chain = shard.take()
    for key in base_keys(chain, "a"):
        damage(shard, key, None)
    assert repair(shard).unrepaired == []
    assert restored(shard, read_chain(shard.store, NAME), "a") == shard.state_at(1000)


def with_copy_of_b(shard: MadeShard, chain: Chain, rows: list[tuple[int, bytes]]) -> Chain:
    """The chain, whose base copy of b has these rows."""
    operation = next(one for one in shard.builder.operations if one.kind == "create")
    wrong = MadeShard(rows, location=shard.location).store_base(operation, "b")
    copied = (*(one for one in chain.full.copied if one.node != "b"), *wrong)
    return replace(chain, full=structs.replace(chain.full, copied=copied))


def test_copies_that_disagree_about_an_intact_row_are_both_in_doubt() -> None:
    shard = MadeShard(ITEMS)
    rows = sorted(ITEMS)
    chain = with_copy_of_b(shard, shard.take(), [item(0, "other") if row == rows[0] else row for row in rows])
    first, second, _ = base_keys(chain, "a")
    with pytest.raises(NotRebuildableError, match=r"can be trusted: they disagree about 1 rows of public\.item"):
        rebuild(shard, chain, "a", second)
    # The row itself is in the first object. If that is lost, the copies agree about everything that is left.
    assert rebuild(shard, chain, "a", first).objects


def test_a_row_that_neither_copy_has_is_noticed_by_the_number_of_rows() -> None:
    shard = MadeShard(ITEMS)
    chain = with_copy_of_b(shard, shard.take(), sorted(ITEMS)[1:])
    with pytest.raises(NotRebuildableError, match=r"10 rows of public\.item are lost, but b has 9"):
        rebuild(shard, chain, "a", base_keys(chain, "a")[0])


def test_both_copies_damaged_is_refused_by_name() -> None:
    shard = MadeShard(ITEMS)
    chain = shard.take()
    mine, theirs = base_keys(chain, "a")[0], base_keys(chain, "b")[0]
    damage(shard, mine)
    damage(shard, theirs, None)
    plan = plan_repair(shard.fleet, RepairRequest(NAME), NoSpark(), Silent())  # type: ignore[arg-type]
    assert plan.is_empty
    assert {one.key: one.why for one in plan.unrepairable} == {
        mine: f"neither copy can be trusted: object {theirs} of b is damaged, too",
        theirs: f"neither copy can be trusted: object {mine} of a is damaged, too",
    }


def test_a_truncate_between_the_copies_is_refused_where_its_effect_is_not_known() -> None:
    truncate = Transaction(200, (Change("T", item(0, "")),))
    shard = MadeShard(ITEMS, [truncate, upserts(210, item(1, "again"))], {"a": 150, "b": 250})
    chain = shard.take()
    damage(shard, base_keys(chain, "a")[0])
    damage(shard, base_keys(chain, "b")[0])
    with pytest.raises(NotRebuildableError, match=r"public\.item was truncated between the copies"):
        rebuild(shard, chain, "b", base_keys(chain, "b")[0])
    # The other way round, the archive of a contains the TRUNCATE, so its base rows don't matter.
    shard = MadeShard(ITEMS, [truncate, upserts(210, item(1, "again"))], {"a": 150, "b": 250})
    chain = shard.take()
    damage(shard, base_keys(chain, "a")[0])
    assert repair(shard).unrepaired == []
    assert restored(shard, read_chain(shard.store, NAME), "a") == shard.state_at(1000)


@pytest.mark.parametrize(("change", "base", "why"), [
    (Change("D", item(3, ""), b"300"), {"a": 150, "b": 250}, "keys were changed in rows with large values"),
    (Change("u", item(3, "\\u")), {"a": 250, "b": 150}, "rows with large values were updated"),
])  # fmt: skip
def test_updates_between_the_copies_that_left_values_out_are_refused(
    change: Change, base: dict[str, int], why: str
) -> None:
    shard = MadeShard(ITEMS, [Transaction(200, (change,))], base)
    chain = shard.take()
    with pytest.raises(NotRebuildableError, match=why):
        rebuild(shard, chain, "a", base_keys(chain, "a")[0])


def test_an_object_without_rows_is_replaced_by_nothing() -> None:
    shard = MadeShard([])
    chain = shard.take()
    assert chain.base_entries("a") == ()
    assert LOG.is_multiset
