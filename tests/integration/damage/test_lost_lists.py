"""A lost object list is the loss of what it lists: of its node's copy of its tables, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.operations import object_lists
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.damage.copied_chain import NAME, CopiedChain, copied_chain
from tests.integration.damage.test_backup_copies import ALL, borrowed, refused, restore
from tests.stores.damage import flip_byte, remove

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

# An empty table has no base copy.
WITH_ROWS = ALL - {"public.transfer"}


@pytest.fixture(scope="module")
def quiet(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CopiedChain]:
    """The chain of the folder, with all base copies in lists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_lists, "OWN_OBJECTS_MAX", 0)
        with copied_chain(shared_fleet, tmp_path_factory.mktemp("lists"), Ready(spark)) as found:
            yield found


def list_of(copied: CopiedChain, node: str, increment: int = 0) -> str:
    """The key of the node's list in the increment's commit."""
    (one,) = [one for one in copied.chain.commits[increment].object_lists if one.node == node]
    return one.key


@pytest.mark.parametrize(("increment", "damage"), [(0, remove), (2, flip_byte)])
def test_the_rows_that_a_primary_lists_come_from_the_standby(
    copied: CopiedChain, increment: int, damage: Callable[[Path], None]
) -> None:
    lost = list_of(copied, "s1")
    copied.damage({lost: damage})
    report = restore(copied, increment)
    # Those that were copied again since are in later lists.
    again = {"public.first", "public.second"} if increment else set()
    assert borrowed(report) == {("s1", "s1-b1"): WITH_ROWS - again}
    assert [(one.key, one.kind) for one in report.damaged] == [(lost, "missing" if damage is remove else "digest")]
    assert copied.restored() == copied.truth[increment]


def test_a_list_of_a_later_copy_is_lost_for_its_table_alone(copied: CopiedChain) -> None:
    copied.damage({list_of(copied, "s1", 1): remove})
    error = refused(copied, use_backup_copies=False)
    assert error.details["lost"] == [{"shard": "s1", "what": "public.first", "partitions": 1}]
    assert error.details["restorable"] == [0]
    assert "--use-backup-copies" in error.hint
    assert borrowed(restore(copied)) == {("s1", "s1-b1"): {"public.first"}}
    assert copied.restored() == copied.truth[2]


def test_the_list_of_a_standby_is_not_needed(copied: CopiedChain) -> None:
    copied.damage({list_of(copied, "s1-b1"): remove, list_of(copied, "s2-b1", 2): flip_byte})
    report = restore(copied, use_backup_copies=False)
    assert (report.borrowed, report.damaged) == ((), ())
    assert copied.restored() == copied.truth[2]


def test_lists_that_are_lost_on_both_copies_are_named_before_a_node_is_asked(copied: CopiedChain) -> None:
    keys = [list_of(copied, node) for node in ("s1", "s1-b1")]
    copied.damage(dict.fromkeys(keys, remove))
    error = plan_restore(copied.fleet, copied.target, RestoreRequest(NAME, 1, use_backup_copies=True)).damage
    assert error is not None
    assert {one["object"] for one in error.details["damaged"]} == set(keys)  # type: ignore[attr-defined]
    lost = {(one["shard"], one["what"]) for one in error.details["lost"]}  # type: ignore[attr-defined]
    assert lost == {("s1", name) for name in WITH_ROWS - {"public.first"}}
    assert error.details["restorable_with_backup_copies"] == []


@pytest.mark.parametrize("is_borrowed", [True, False])
def test_a_restore_that_goes_on_needs_the_lists_of_the_copies_that_it_has_chosen(
    copied: CopiedChain, *, is_borrowed: bool
) -> None:
    lost = list_of(copied, "s1")
    if is_borrowed:
        copied.damage({lost: remove})

    def then(reached: Reached) -> None:
        if reached.point == RestoreCrashPoint.CREATED:
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    request = RestoreRequest(NAME, use_backup_copies=True)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(copied.fleet, copied.target, request), copied.spark, Watching(then))
    if is_borrowed:
        report = resume_restore(copied.fleet, copied.target, RestoreRequest(NAME), copied.spark, Silent())
        assert borrowed(report) == {("s1", "s1-b1"): WITH_ROWS - {"public.first", "public.second"}}
        assert copied.restored() == copied.truth[2]
        return
    copied.damage({lost: remove})
    with pytest.raises(ObjectDamagedError) as caught:
        resume_restore(copied.fleet, copied.target, RestoreRequest(NAME), copied.spark, Silent())
    assert caught.value.details["object"] == lost


@pytest.mark.parametrize(("damage", "kind"), [(remove, "missing"), (flip_byte, "digest")])
def test_check_names_a_lost_list_and_compares_the_rest(
    copied: CopiedChain, damage: Callable[[Path], None], kind: str
) -> None:
    lost = list_of(copied, "s1-b1")
    copied.damage({lost: damage})
    (report,) = check_snapshots(copied.fleet, CheckRequest(NAME), copied.spark, Silent()).snapshots
    assert [(one.kind, one.node, one.object) for one in report.conflicts] == [(kind, "s1-b1", lost)]
    # The copies of the other shard have the rows of its tables, twice.
    assert report.compared.rows >= 2 * sum(rows.count(b"\n") for rows in copied.truth[0][1].values())
    (listed,) = check_snapshots(copied.fleet, CheckRequest(NAME, metadata_only=True), copied.spark, Silent()).snapshots
    assert [(one.kind, one.node, one.object) for one in listed.conflicts] == [(kind, "s1-b1", lost)]
