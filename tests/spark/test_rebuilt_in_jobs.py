"""Rows of a damaged base object are rebuilt in Spark jobs, as in the driver if there are few."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.fleet.progress import Silent
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.repair import work
from cutline.snapshots.repair.base_rows import BaseUnit, rebuild_base
from cutline.snapshots.repair.planning import RepairRequest, plan_repair
from cutline.snapshots.repair.rebuilt_segments import NotRebuildableError
from cutline.snapshots.repair.running import run_repair
from cutline.snapshots.repair.work import Work
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready
from tests.unit.made_repairs import NAME, MadeShard, damage, restored
from tests.unit.test_rebuilt_rows import HISTORY, ITEMS, LINES, with_copy_of_b

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LOCAL_BYTES_MAX", -1)


def test_rebuilt_objects_restore_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    location = StoreLocation(f"file://{tmp_path}/store")
    shard = MadeShard([*ITEMS, *LINES], HISTORY, {"a": 250, "b": 150}, location=location)
    chain = shard.take()
    damage(shard, chain.base_entries("a")[1].key)
    plan = plan_repair(shard.fleet, RepairRequest(NAME), Ready(spark), Silent())
    report = run_repair(shard.fleet, plan, Ready(spark), Silent())
    assert report.unrepaired == []
    assert restored(shard, read_chain(shard.store, NAME), "a") == shard.state_at(1000)


def test_disagreement_and_damage_are_noticed_in_jobs(spark: SparkSession, tmp_path: Path) -> None:
    shard = MadeShard(ITEMS, location=StoreLocation(f"file://{tmp_path}/store"))
    chain = shard.take()
    mine, theirs = (chain.base_entries(node)[0].key for node in ("a", "b"))
    unit = BaseUnit("a", "b", 0, {mine: "digest"})
    jobs = Work(shard.location, Ready(spark), Silent())
    fewer = with_copy_of_b(shard, chain, sorted(ITEMS)[1:])
    with pytest.raises(NotRebuildableError, match=r"10 rows of public\.item are lost, but b has 9"):
        rebuild_base(fewer, unit, "20261120T000000Z-0000000001", jobs)
    damage(shard, theirs)
    with pytest.raises(NotRebuildableError, match=r"neither copy can be trusted: object .* of node b"):
        rebuild_base(chain, unit, "20261120T000000Z-0000000001", jobs)
