"""A chain whose base copies are all in object lists: every command reads them where it needs them, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.check.live.report import CutCompared
from cutline.check.live.run import LiveRequest, check_live
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.snapshots.base_copy.copy_ranges import CopyDestination
from cutline.snapshots.create import full, prepare_tables
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.operations import object_lists
from cutline.snapshots.operations.committing import ObjectsNotStoredError
from cutline.snapshots.operations.object_lists import check_commit_stored
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import read_chain
from cutline.spark import spark_jobs
from cutline.storage.store import ObjectStore
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, names_of_snapshots, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute
from tests.integration.test_gc import DiedError, die_at
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "listed"
SCHEMA = (
    "CREATE TABLE kept (id int PRIMARY KEY, what text)",
    "CREATE TABLE altered (id int PRIMARY KEY, n int)",
    "INSERT INTO kept SELECT i, 'row ' || i FROM generate_series(1, 300) AS i",
    "INSERT INTO altered SELECT i, i FROM generate_series(1, 200) AS i",
    # Rows of these are read again while changes are folded: by their line, and where it is long and no change has it.
    "CREATE TABLE bag (what text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 'line ' || i % 5 FROM generate_series(1, 20) AS i",
    "CREATE TABLE wide (id int PRIMARY KEY, n int, long text)",
    "ALTER TABLE wide ALTER long SET STORAGE EXTERNAL",
    "INSERT INTO wide SELECT i, 0, repeat(md5(i::text), 4000) FROM generate_series(1, 3) AS i",
    "SELECT lo_from_bytea(7001, 'large')",
)
# Its table is written anew, so that it is copied again.
CHANGES = (
    "UPDATE kept SET what = 'changed' WHERE id <= 10",
    "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE what = 'line 2' LIMIT 3)",
    "UPDATE wide SET n = 1 WHERE id > 1",
    "DELETE FROM altered WHERE id > 150",
    "ALTER TABLE altered ALTER n TYPE text",
)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, "listed") as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def list_in_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lists, "OWN_OBJECTS_MAX", 0)
    monkeypatch.setattr(object_lists, "LIST_OBJECTS_MAX", 1)


def list_in_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (full, prepare_tables):
        monkeypatch.setattr(module, "CopyDestination", partial(CopyDestination, reported_max=0))


@pytest.mark.parametrize("list_all", first([list_in_driver, list_in_executors]))
def test_every_command_works_with_lists(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, list_all: Callable[[pytest.MonkeyPatch], None]
) -> None:
    list_all(monkeypatch)
    monkeypatch.setattr(spark_jobs, "TASKS_PER_JOB_MAX", 2)
    (source,) = (node.dsn for node in runs.fleet.nodes)
    states = [sorted_copies(source)]
    full = runs.full(NAME, large_objects=True)
    execute(source, *CHANGES)
    states.append(sorted_copies(source))
    increment = runs.increment(NAME)
    assert {one.kind for one in full.object_lists} == {"base", "large_objects"}
    assert [sum(one.rows.values()) for one in increment.object_lists] == [150]
    for number, expected in enumerate(states):
        report = runs.restore(NAME, restore_target(runs.fleet), number)
        assert report.rows == 323 + (147 if number else 200)
        (restored,) = (node.dsn for node in restore_target(runs.fleet).nodes)
        assert sorted_copies(restored) == expected
        with psycopg.connect(restored) as connection:
            assert connection.execute("SELECT lo_get(7001)").fetchall() == [(b"large",)]
        checked = runs.check_one(NAME, number)
        # The fleet has no standby to compare with.
        assert (checked.result, checked.conflicts, checked.large_objects) == ("inconclusive", [], 1)
        listed = sum(commit.counts["objects"] for commit in (full, increment)[: number + 1])
        assert checked.compared.objects == listed
    live = check_live(runs.fleet, LiveRequest(NAME), runs.spark, Silent())
    assert (live.result, live.skipped, live.of("s1").cut) == ("valid", [], CutCompared(4, 470))
    shown = run_as_text(runs.fleet, "show", NAME)
    rows = {
        line.split()[1]: line.split()[-1] for line in shown.splitlines() if line.startswith("s1") and "public." in line
    }
    assert rows == {"public.altered": "150", "public.bag": "20", "public.kept": "300", "public.wide": "3"}
    code, checked_by_listing = run_here(runs.fleet, "check", NAME, "--metadata-only")
    assert (code, checked_by_listing["snapshots"][0]["conflicts"]) == (4, [])
    code, removed = run_here(runs.fleet, "delete", NAME, "--force", "--yes")
    assert code == 0, removed
    assert runs.fleet.store.open().inventory(f"snapshots/{NAME}") == []


def test_a_lost_list_is_named_by_check_restore_and_create(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    list_in_driver(monkeypatch)
    runs.full(NAME)
    store = runs.fleet.store.open()
    lost = read_chain(store, NAME).full.lists[0].key
    store.delete(lost)
    (report,) = runs.check(NAME).snapshots
    assert report.result == "conflicts"
    assert [(one.kind, one.node, one.object) for one in report.conflicts] == [("missing", "s1", lost)]
    # The rows of the list are not called too many in the database.
    live = check_live(runs.fleet, LiveRequest(NAME), runs.spark, Silent())
    assert (live.result, live.conflicts) == ("inconclusive", [])
    (left,) = live.skipped
    assert (left.what, lost in left.why) == (f"snapshot {NAME} at increment 0", True)
    damage = plan_restore(runs.fleet, restore_target(runs.fleet), RestoreRequest(NAME)).damage
    assert damage is not None
    assert damage.details["object"] == lost
    code, document = run_here(runs.fleet, "create", NAME, "--incremental")
    assert (code, document["details"]["object"]) == (3, lost), document
    # Whatever needs no list still answers.
    assert run_here(runs.fleet, "list")[0] == 0
    assert run_here(runs.fleet, "show", NAME)[0] == 0


def test_what_an_executor_lists_and_the_store_lacks_is_not_committed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_in_executors(monkeypatch)
    store = runs.fleet.store.open()

    def lose_one(_store: ObjectStore, commit: Commit) -> None:
        store.delete(store.list(f"snapshots/{NAME}/base")[0])
        check_commit_stored(store, commit)

    monkeypatch.setattr(full, "check_commit_stored", lose_one)
    with pytest.raises(ObjectsNotStoredError, match="lacks snapshots/listed/base/"):
        runs.full(NAME)
    assert names_of_snapshots(runs.fleet) == []


@pytest.mark.parametrize("list_all", first([list_in_driver, None]))
def test_pruned_increments_leave_nothing_of_theirs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, list_all: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    if list_all:
        list_all(monkeypatch)
    (source,) = (node.dsn for node in runs.fleet.nodes)
    state = sorted_copies(source)
    runs.full(NAME)
    execute(source, *CHANGES)
    increment = runs.increment(NAME)
    runs.full("newer")
    code, pruned = run_here(runs.fleet, "prune", "--keep-only-full", "9", "--yes")
    assert code == 0, pruned
    left = runs.fleet.store.open().list(f"snapshots/{NAME}")
    assert [key for key in left if increment.operation in key or "/increments/" in key] == []
    runs.restore(NAME, restore_target(runs.fleet))
    (restored,) = (node.dsn for node in restore_target(runs.fleet).nodes)
    assert sorted_copies(restored) == state


def test_what_a_create_leaves_that_dies_after_its_lists_is_garbage(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    list_in_driver(monkeypatch)
    with pytest.raises(DiedError):
        create_full(runs.fleet, CreateRequest(NAME), runs.spark, die_at(CrashPoint.LISTS_STORED))
    store = runs.fleet.store.open()
    assert store.list(f"snapshots/{NAME}/lists")
    runs.full("other")
    assert names_of_snapshots(runs.fleet) == ["other"]
    code, collected = run_here(runs.fleet, "gc", "--yes", "--grace", "0")
    assert code == 0, collected
    # The void in the place of its commit stays.
    assert [key for key in store.list(f"snapshots/{NAME}") if not key.endswith("snapshot.json")] == []
    runs.restore("other", restore_target(runs.fleet))
    (source,), (restored,) = ([one.dsn for one in fleet.nodes] for fleet in (runs.fleet, restore_target(runs.fleet)))
    assert sorted_copies(restored) == sorted_copies(source)
