"""Archives and rules of chains that begin with a merge: what lies before it is not taken for damage or a conflict."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

import cutline.check.verify
import cutline.wal.drain.drain
import cutline.wal.drain.peek
from cutline.check.merge_proof import prove_merge
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.copies import CopyNeeds
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.fold import limits
from cutline.snapshots.merge.running import plan_merge, run_merge
from cutline.snapshots.operations.object_damage import ChainObject
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.proven_chains import commit_key, read_chain, read_full
from cutline.snapshots.removal import earlier_objects
from cutline.snapshots.removal.earlier_objects import drop_earlier_objects, plan_drop
from cutline.snapshots.removal.removing import open_removals
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.fuzz.small_sizes import lowered
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "chain"


@pytest.fixture(autouse=True)
def driver_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who folds small amounts is drawn for other tests (tests/run/folding.py); here it would only take time."""
    monkeypatch.setattr(limits, "CHANGES_MAX", cutline.check.verify.CHANGES_MAX)
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 5_000_000)
    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", limits.STORED_BYTES_MAX)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, "merged_archives") as fleet:
        execute(fleet.nodes[0].dsn, "CREATE TABLE seen (id int PRIMARY KEY, text text)")
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def merge(runs: Runs, increment: int | None = None) -> Chain:
    """Merge at the increment, or at the newest; return the chain that begins there."""
    run_merge(runs.fleet, plan_merge(runs.fleet, NAME, increment, Silent()), runs.spark, Silent(), prove_merge)
    return read_from_merge(runs.fleet.store.open(), NAME)


@contextmanager
def small_segments() -> Iterator[None]:
    """In the block, a segment ends inside a transaction of more than a few kilobytes."""
    with lowered(
        {
            cutline.wal.drain.drain: {"SEGMENT_BYTES_MAX": 200_000},
            cutline.wal.drain.peek: {"BATCH_BYTES": 20_000},
        }
    ):
        yield


def check(runs: Runs, increment: int | None = None) -> None:
    """Check the chain; the fleet has one copy, so what is not found is all that a check can say."""
    report = runs.check_one(NAME, increment)
    assert report.conflicts == []
    assert {part.is_one_copy for part in report.skipped} == {True}


def check_restore(runs: Runs, increment: int, expected: dict[str, bytes]) -> None:
    target = restore_target(runs.fleet)
    runs.restore(NAME, target, increment)
    assert sorted_copies(target.nodes[0].dsn) == expected


def test_a_transaction_that_spans_segments_before_a_merge_is_no_damage(runs: Runs) -> None:
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    with small_segments():
        execute(dsn, "INSERT INTO seen SELECT n, 'before' FROM generate_series(1, 20) n")
        execute(dsn, "INSERT INTO seen SELECT n, repeat('large', 300) FROM generate_series(100, 600) n")
        commit = runs.increment(NAME)
    *_, before, last = commit.segments["s1"]
    assert before.open is not None
    assert last.open is None
    assert last.changes
    expected = sorted_copies(dsn)
    chain = merge(runs)
    # The changes of the last segment don't count, but its transaction is whole.
    assert last.key in {segment.key for segment in chain.segments("s1")}
    check(runs)
    check_restore(runs, 1, expected)
    execute(dsn, "UPDATE seen SET text = 'after' WHERE id = 100")
    runs.increment(NAME)
    check(runs)
    check_restore(runs, 2, sorted_copies(dsn))


def test_tables_that_became_append_only_before_a_merge_are_no_conflict(runs: Runs) -> None:
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    execute(dsn, "CREATE TABLE log (text text)", "INSERT INTO log VALUES ('a')")
    rules = structs.replace(runs.fleet.groups, append_only=("public.log",))
    runs = replace(runs, fleet=replace(runs.fleet, groups=rules))
    runs.init()
    assert [one.name for one in runs.increment(NAME).left_out] == ["public.log"]
    check(runs)
    merge(runs)
    check(runs)
    execute(dsn, "INSERT INTO log VALUES ('b')")
    runs.increment(NAME)
    check(runs)


@pytest.mark.parametrize("point", [RestoreCrashPoint.CREATED, RestoreCrashPoint.DECIDED])
def test_a_restore_of_an_exact_time_is_resumed_after_a_merge(runs: Runs, point: RestoreCrashPoint) -> None:
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    execute(dsn, "INSERT INTO seen VALUES (1, 'first')")
    runs.increment(NAME)
    execute(dsn, "INSERT INTO seen VALUES (2, 'second')")
    expected, moment = sorted_copies(dsn), datetime.now(UTC)
    time.sleep(0.1)
    execute(dsn, "INSERT INTO seen VALUES (3, 'third')")
    runs.increment(NAME)

    def then(reached: Reached) -> None:
        if reached.point == str(point):
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    target = restore_target(runs.fleet)
    request = RestoreRequest(NAME, replace=True, at=moment, exact=True)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(runs.fleet, target, request), runs.spark, Watching(then))
    merge(runs, 1)
    merge(runs, 2)
    resume_restore(runs.fleet, target, RestoreRequest(NAME), runs.spark, Silent())
    assert sorted_copies(target.nodes[0].dsn) == expected


def test_a_check_of_a_time_before_a_merge_never_passes_on_damage_there(runs: Runs, tmp_path: Path) -> None:
    """Without the time, nothing before the merge is read."""
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    moments = []
    for number in range(1, 4):
        execute(dsn, f"INSERT INTO seen VALUES ({number}, 'text')")
        moments.append(datetime.now(UTC))
        time.sleep(0.1)
        increment = runs.increment(NAME)
        if number == 2:
            damaged = increment.segments["s1"][-1].key
    merge(runs, 3)
    at = CheckRequest(NAME, at=moments[1], exact=True)
    (report,) = check_snapshots(runs.fleet, at, runs.spark, Silent()).snapshots
    assert (report.conflicts, report.increment, report.exact_at) == ([], 2, Time.exactly(moments[1]))
    flip_byte(tmp_path / "store" / damaged)
    check(runs)
    (report,) = check_snapshots(runs.fleet, at, runs.spark, Silent()).snapshots
    assert [(one.kind, one.object) for one in report.conflicts] == [("digest", damaged)]
    assert (report.increment, report.exact_at) == (2, None)
    assert f"the state at {Time.exactly(moments[1])}" in [part.what for part in report.skipped]


def test_a_damaged_segment_of_which_no_change_counts_prevents_no_restore(runs: Runs) -> None:
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    execute(dsn, "INSERT INTO seen VALUES (1, 'before')", "TRUNCATE seen", "INSERT INTO seen VALUES (2, 'before')")
    runs.increment(NAME)
    expected = sorted_copies(dsn)
    (last,) = merge(runs).segments("s1")
    assert last.changes
    # While the node is idle, its archive is not extended.
    assert runs.increment(NAME).idle
    assert merge(runs).segments("s1") == (last,)
    execute(dsn, "UPDATE seen SET text = 'after'")
    runs.increment(NAME)
    newest = sorted_copies(dsn)
    path = Path(runs.fleet.store.url.removeprefix("file://")) / last.key
    flip_byte(path)
    assert [conflict.object for conflict in runs.check_one(NAME).conflicts] == [last.key]
    check_restore(runs, 1, expected)
    check_restore(runs, 3, newest)
    path.unlink()
    check_restore(runs, 2, expected)
    check_restore(runs, 3, newest)
    # Its changes count in the states before the merge.
    chain = read_chain(runs.fleet.store.open(), NAME)
    assert CopyNeeds.of(chain, "s1").groups_of(ChainObject(last.key, "s1", 1, last))


class KilledError(BaseException):
    """Stands for the end of the process: nothing after it runs."""


def test_what_a_dead_prune_gave_up_goes_although_an_object_was_lost_since(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = runs.fleet.store.open()
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    for number in (1, 2):
        execute(dsn, f"INSERT INTO seen VALUES ({number}, 'new')")
        commit = runs.increment(NAME)
        if number == 1:
            merge(runs)

    def die(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(earlier_objects, "remove_objects", die)
        with pytest.raises(KilledError):
            drop_earlier_objects(store, plan_drop(store, NAME), Silent())
    assert first_increment(store, NAME) == 1
    full = read_full(store, NAME)
    store.delete(commit.segments["s1"][-1].key)
    (removal,) = open_removals(store)

    # While a commit can't be read, it is not known what is needed.
    commit_path = Path(runs.fleet.store.url.removeprefix("file://")) / commit_key(NAME, 2)
    body = commit_path.read_bytes()
    flip_byte(commit_path)
    code, document = run_here(runs.fleet, "prune", "--yes")
    assert (code, document["given_up"]) == (0, []), document
    assert open_removals(store) == [removal]
    commit_path.write_bytes(body)

    code, document = run_here(runs.fleet, "prune", "--yes")
    assert code == 0, document
    assert open_removals(store) == []
    outcome = read_outcome(store, removal.operation)
    assert outcome is not None
    assert outcome.state == "done"
    assert not [entry for entry in full.copied if entry.kind == BASE and store.exists(entry.key)]
