"""Chains that begin with a merge are repaired, merged again and reduced; expected rows come from the made history."""

from __future__ import annotations

import pytest

from cutline.fleet.progress import Silent
from cutline.snapshots.merge.running import MergeReport, Proof, plan_merge, run_merge
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.repair.planning import RepairPlan, RepairRequest, plan_repair
from cutline.snapshots.repair.running import RepairReport, run_repair
from cutline.wal.segments.damage import ObjectDamagedError
from tests.unit.made_repairs import NAME, Change, MadeShard, NoSpark, Transaction, damage, item, log, restored, upserts
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


class Ready(NoSpark):
    """A SparkSource that may be begun, and has no session."""

    def begin(self, *_: object) -> None:
        """Do nothing."""


def new_shard() -> MadeShard:
    return MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS)


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
