"""The job that verifies copies: many small objects are one Spark task, and all damage is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.nodes.groups import Group
from cutline.restore.plan.copies import Wanted, verify_copies
from cutline.restore.scope.scope import ChosenTables
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, FullSnapshot, StoredObject
from cutline.snapshots.records.documents import base_prefix
from cutline.spark.spark_jobs import LANES_PER_CORE_MIN, cores_of
from cutline.storage.digest import digest
from cutline.storage.location import StoreLocation
from tests.stores.damage import flip_byte
from tests.unit.made_commits import commit, counted

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

OBJECTS = 200


class Counting(Silent):
    """Adds up what steps are said to have, and to have done."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.done = 0

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.steps.append((name, total))

    def advance(self, done: int) -> None:
        self.done += done


def test_many_objects_are_few_spark_tasks_and_damage_is_named(spark: SparkSession, tmp_path: Path) -> None:
    location, stored = StoreLocation(f"file://{tmp_path}"), list[StoredObject]()
    for node in "ab":
        for number in range(OBJECTS):
            key, body = f"{base_prefix('daily', node, 'op-0')}/part-{number:06d}.parquet", b"%d" % number
            location.open().create(key, body)
            stored.append(StoredObject(key, BASE, node, len(body), digest(body), {1: 1}))
    full = commit(0)
    assert isinstance(full, FullSnapshot)
    groups = (Group(1, "public", "t", "default", 1, ()),)
    full = structs.replace(full, groups={"a": groups}, copied=tuple(stored), segments={"a": (), "b": ()})
    chain = Chain(counted(full))
    flip_byte(tmp_path / stored[7].key)
    (tmp_path / stored[8].key).unlink()
    context, progress = spark.sparkContext, Counting()
    context.setJobGroup(str(tmp_path), "verify")
    try:
        wanted = Wanted(ChosenTables(()), large_objects=False, use_backup_copies=True)
        choice = verify_copies(spark, chain, wanted, location, progress)
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    assert choice.borrowed == {"b": frozenset({1})}
    assert {(one.key, one.kind) for one in choice.damaged} == {(stored[7].key, "digest"), (stored[8].key, "missing")}
    assert progress.steps == [("verify copies of primaries", OBJECTS), ("verify copies of standbys", OBJECTS)]
    assert progress.done == 2 * OBJECTS
    tracker = context.statusTracker()
    jobs = [job for number in tracker.getJobIdsForGroup(str(tmp_path)) if (job := tracker.getJobInfo(number))]
    stages = [stage for job in jobs for number in job.stageIds if (stage := tracker.getStageInfo(number))]
    assert len(stages) == 2
    assert max(stage.numTasks for stage in stages) == LANES_PER_CORE_MIN * cores_of(spark).now
