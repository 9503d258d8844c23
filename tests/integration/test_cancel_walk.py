"""The walk with cancels of checks, removals and gc: stopped at any of their steps, and what `cancel` says of each.

The requests are real ones, in the store. `make test` has one step of each command, `make all` every step.
Those of creates are in test_fault_walk.py, those of restores in restoring/test_cancelled_restores.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.crash_points import CrashPoint
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.wal.drain.slots import slot_name
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Runs, names_of_snapshots, runs_on, slots_of
from tests.faults.cancelled_command import BEGUN, STEP, cancel_at
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Much longer than it takes: the machine may be busy.
CANCEL_SECONDS_MAX = 20.0
CHECK_STEPS = (
    "check daily",
    "read WAL archive",
    "resolve cuts again",
    "fold changes",
    "read base copies",
    "compare transactions",
)
REMOVALS = ("delete old --yes", "prune --keep-last 1 --yes")
GC_STEPS = ("settle earlier operations", "look for garbage", "remove")
names = (f"other-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store and a snapshot `daily` with an increment."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("cancel-walk"), spark) as found:
        found.full("daily")
        found.increment("daily")
        yield found


@pytest.mark.parametrize("step", first(CHECK_STEPS))
def test_a_check_stops_in_any_step_and_the_next_one_is_whole(runs: Runs, step: str) -> None:
    run = cancel_at(runs.fleet, (f"{STEP}{step}", 1), "check", "daily", spark=runs.spark.running)
    assert (run.code, run.document["error"], run.results) == (8, "cancelled", ["cancelled"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    assert operations_of(runs, run.answers[0].operation.id) == ["cancel-1.json", "outcome.json"]
    assert run_here(runs.fleet, "check", "daily", spark=runs.spark.running)[0] == 0


@pytest.mark.parametrize("step", first(GC_STEPS))
def test_a_gc_stops_in_any_step_and_removes_only_garbage(runs: Runs, step: str) -> None:
    store = runs.fleet.store.open()
    # Of a create that was stopped, the objects stay until a gc.
    stopped = next(names)
    at = (str(CrashPoint.BASE_COPIED), 1)
    assert cancel_at(runs.fleet, at, "create", stopped, spark=runs.spark.running).results == ["cancelled"]
    assert store.list(f"snapshots/{stopped}")
    run = cancel_at(runs.fleet, (f"{STEP}{step}", 1), "gc", "--yes", "--grace", "0s")
    assert (run.code, run.results) == (8, ["cancelled"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    assert run_here(runs.fleet, "gc", "--yes", "--grace", "0s")[0] == 0
    assert store.list(f"snapshots/{stopped}") == []
    assert run_here(runs.fleet, "check", "daily", spark=runs.spark.running)[0] == 0


def test_of_two_cancels_at_once_each_says_what_has_happened(runs: Runs) -> None:
    at = (str(CrashPoint.SLOT_MADE), 1)
    run = cancel_at(runs.fleet, at, "create", next(names), spark=runs.spark.running, count=2)
    assert (run.code, run.results) == (8, ["cancelled", "cancelled"]), run.document
    (operation,) = {one.operation.id for one in run.answers}
    # Two requests of one millisecond are the same one.
    assert set(operations_of(runs, operation)) - {"cancel-2.json"} == {"cancel-1.json", "intent.json", "outcome.json"}
    assert all(len(slots_of(node.dsn)) == 1 for node in runs.fleet.nodes)


def test_what_has_just_been_committed_is_done_and_cancel_says_so(runs: Runs) -> None:
    at = (str(CrashPoint.COMMITTED), 1)
    run = cancel_at(runs.fleet, at, "create", "daily", "--incremental", spark=runs.spark.running)
    assert (run.code, run.results) == (0, ["too-late"]), run.document
    assert run.answers[0].text == "it finished before it could be stopped"
    (ended,) = run_here(runs.fleet, "history", "--last", "1")[1]["operations"]
    assert (ended["operation"], ended["state"], ended["code"]) == (run.document["operation"], "done", 0)


@pytest.fixture
def removing(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    """The shared fleet with a new store, a snapshot `old` that goes, and a snapshot `new` that stays.

    At the end all slots are dropped, those of `daily`, too: these tests are the last ones.
    """
    with runs_on(shared_fleet, tmp_path, spark) as found:
        slots = [slot_name(found.full(name).operation) for name in ("old", "new")]
        yield found
        for node in found.fleet.nodes:
            assert {*slots_of(node.dsn)} & {*slots} == {slots[1]}


@pytest.mark.parametrize("command", first(REMOVALS))
def test_a_removal_that_has_not_begun_to_remove_leaves_the_snapshot(removing: Runs, command: str) -> None:
    run = cancel_at(removing.fleet, (BEGUN, 1), *command.split())
    assert (run.code, run.results) == (8, ["cancelled"]), run.document
    assert names_of_snapshots(removing.fleet) == ["new", "old"]
    assert_removed_by(removing, command)


@pytest.mark.parametrize("command", first(REMOVALS))
@pytest.mark.parametrize("step", first(["drop slots", "delete objects"]))
def test_a_removal_that_removes_stops_and_the_next_one_ends_it(removing: Runs, command: str, step: str) -> None:
    run = cancel_at(removing.fleet, (f"{STEP}{step}", 1), *command.split())
    assert (run.code, run.results) == (8, ["unfinished"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    # What a prune does to one snapshot is a deletion.
    assert "to resume it: snapshot delete old" in run.answers[0].text
    assert names_of_snapshots(removing.fleet) == ["new"]
    assert_removed_by(removing, command)


def test_a_prune_that_is_stopped_records_what_it_had_removed(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with runs_on(shared_fleet, tmp_path, spark) as runs:
        for name in ("first", "second", "third"):
            runs.full(name)
        words = ("prune", "--keep-last", "1", "--yes")
        run = cancel_at(runs.fleet, (f"{STEP}delete objects", 2), *words)
        assert (run.code, run.results) == (8, ["unfinished"]), run.document
        operations = run_here(runs.fleet, "history")[1]["operations"]
        (whole,) = [one for one in operations if one["kind"] == "prune"]
        (ended,) = [one for one in operations if one["kind"] == "delete" and one["state"] == "done"]
        assert ended["volumes"]["objects"] > 0
        assert whole["volumes"] == {unit: ended["volumes"][unit] for unit in ("objects", "bytes")}
        assert run_here(runs.fleet, *words)[0] == 0


def assert_removed_by(runs: Runs, command: str) -> None:
    assert run_here(runs.fleet, *command.split())[0] == 0
    store = runs.fleet.store.open()
    assert names_of_snapshots(runs.fleet) == ["new"]
    assert store.list("snapshots/old") == []
    assert read_open_intents(store) == []


def operations_of(runs: Runs, operation: str) -> list[str]:
    return sorted(runs.fleet.store.open().list_children(f"operations/{operation}"))
