"""An increment in which nothing has changed stores two objects, and is as good as any other restore point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pytest
from msgspec import structs

import cutline.snapshots.create.make_cut as make_cut_module
import cutline.snapshots.operations.operation as operation_module
import cutline.wal.drain.drain as module
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.snapshots.listing import name_templates
from cutline.snapshots.operations.ended_operations import read_history
from cutline.snapshots.operations.open_operations import open_operation_ids
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import commit_key, read_chain, read_newest_part
from cutline.snapshots.removal.gc import Kind, find_garbage
from cutline.storage.store import DeletionRefusedError, ObjectStore
from tests.commands.snapshot_runs import Runs, runs_on, sorted_copies
from tests.integration.refusing import execute
from tests.integration.test_global_ids import NAME as PAIR
from tests.integration.test_global_ids import pair
from tests.integration.test_rolled_back import read_catalog, rollback_statements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "idle"


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    for node in shared_fleet.primaries:
        execute(node.dsn(), "CREATE TABLE idle (id int PRIMARY KEY, n int)")
        execute(node.dsn(), "INSERT INTO idle SELECT i, 0 FROM generate_series(1, 100) i")
    try:
        with runs_on(shared_fleet, tmp_path_factory.mktemp("idle"), spark) as found:
            found.full(NAME)
            yield found
    finally:
        for node in shared_fleet.primaries:
            execute(node.dsn(), "DROP TABLE idle")


def keys(fleet: Fleet) -> set[str]:
    return set(fleet.store.open().list("")) - set(fleet.store.open().list("baselines"))


def copies(fleet: Fleet) -> list[dict[str, bytes]]:
    return [sorted_copies(node.dsn) for node in fleet.primaries]


def change(fleet: Fleet, *, shards: int) -> None:
    for node in fleet.primaries[:shards]:
        execute(node.dsn, "UPDATE idle SET n = n + 1 WHERE id <= 10")


def taken(runs: Runs) -> tuple[Commit, set[str]]:
    before = keys(runs.fleet)
    return runs.increment(NAME), keys(runs.fleet) - before


def lie(chunk: module._Chunk, task: module.DrainTask) -> bool:
    markers = [
        (changes.slice(0, 0), events.filter(pc.equal(events["op"], module.MARKER))) for changes, events in chunk.tables
    ]
    chunk.tables = markers
    return task.may_be_idle


def test_it_stores_its_commit_and_its_outcome(runs: Runs) -> None:
    change(runs.fleet, shards=2)
    busy, _ = taken(runs)
    commit, stored = taken(runs)
    store, nodes = runs.fleet.store.open(), {node.id for node in runs.fleet.nodes}
    assert stored == {commit_key(NAME, commit.increment), f"operations/{commit.operation}/increment.json"}
    assert commit.idle == {node: segments[-1] for node, segments in busy.segments.items()}
    assert commit.idle.keys() == nodes
    assert commit.counts["changes"] == commit.counts["transactions"] == commit.counts["objects"] == 0
    assert open_operation_ids(store) == []
    (newest,) = read_history(store, 1)
    assert (newest.id, newest.kind, newest.increment, newest.code) == (commit.operation, "create", commit.increment, 0)
    assert newest.seconds is not None
    assert newest.label


def test_what_was_idle_is_read_again_with_the_next_change_and_every_cut_is_whole(
    runs: Runs,
) -> None:
    change(runs.fleet, shards=2)
    runs.increment(NAME)
    before = copies(runs.fleet)
    idle = [taken(runs)[0] for _ in range(3)]
    assert read_newest_part(runs.fleet.store.open(), NAME).is_partial
    report = runs.check_one(NAME)
    assert report.conflicts == []
    assert report.result == "valid"
    # One shard goes on, the other stays idle.
    change(runs.fleet, shards=1)
    after = copies(runs.fleet)
    commit = runs.increment(NAME)
    first, second = (node.id for node in runs.fleet.primaries)
    assert first not in commit.idle
    assert commit.segments[first][0].after == idle[0].idle[first].through
    assert second in commit.idle
    assert runs.check_one(NAME).result == "valid"
    chain = read_chain(runs.fleet.store.open(), NAME)
    chain.check_archive()
    assert chain.archived_to(second) == commit.cut.of(second).finish
    restored = replace(runs.fleet, nodes=tuple(with_database(node, "idle_restored") for node in runs.fleet.primaries))
    try:
        for increment, expected in ((idle[1].increment, before), (commit.increment, after)):
            runs.restore(NAME, restored, increment)
            assert copies(restored) == expected
    finally:
        for node in restored.nodes:
            execute(with_database(node, "postgres").dsn, "DROP DATABASE IF EXISTS idle_restored WITH (FORCE)")


def test_a_node_that_was_not_idle_is_found_with_the_next_segment(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "not-idle"
    runs.full(name)
    change(runs.fleet, shards=1)

    with monkeypatch.context() as patch:
        patch.setattr(module._Chunk, "_is_idle", lie)
        runs.increment(name)
    # Nothing in the store shows it yet.
    change(runs.fleet, shards=1)
    runs.increment(name)
    found = [conflict.detail for conflict in runs.check_one(name).conflicts if conflict.kind == "cut"]
    assert any("list the node as idle, but the archive contains 1 events" in detail for detail in found), found


def test_wal_without_changes_is_archived_before_it_is_much_of_the_limit(runs: Runs) -> None:
    name, fleet = "much-wal", runs.fleet
    runs.full(name)
    execute(fleet.primaries[0].dsn, "SELECT pg_logical_emit_message(false, 'other', repeat('x', 3500000))")
    assert runs.increment(name).idle.keys() == {node.id for node in fleet.nodes}
    nodes = tuple(replace(node, retained_wal_bytes_max=24 << 20) for node in fleet.nodes)
    commit = replace(runs, fleet=replace(fleet, nodes=nodes)).increment(name)
    assert commit.idle.keys() == {node.id for node in fleet.nodes if node.shard != fleet.primaries[0].id}
    assert {len(segments) for node, segments in commit.segments.items() if node not in commit.idle} == {1}
    assert runs.check_one(name).result == "valid"


def test_where_nothing_can_be_deleted_the_intent_stays_and_opens_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = runs.fleet.store.open()
    runs.full("kept")

    def refuse(_: object, key: str) -> None:
        raise DeletionRefusedError(url=store.url, key=key, reason="it is locked")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", refuse)
        commit = runs.increment("kept")
    assert {key.rpartition("/")[2] for key in store.list(f"operations/{commit.operation}")} == {
        "intent.json",
        "increment.json",
    }
    assert open_operation_ids(store) == []
    assert runs.increment("kept").increment == commit.increment + 1
    old = [entry for entry in find_garbage(store, 0.0, Silent()).garbage if entry.kind == Kind.RECORD]
    assert old == []
    monkeypatch.setattr("cutline.snapshots.removal.old_records.SIGN_SECONDS", 0.0)
    (garbage,) = [entry for entry in find_garbage(store, 0.0, Silent()).garbage if entry.kind == Kind.RECORD]
    assert [entry.key for entry in garbage.objects] == [f"operations/{commit.operation}/intent.json"]


def test_an_outcome_that_another_command_has_stored_stays_with_the_intent(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended after its commit, and settled meanwhile."""
    store, record = runs.fleet.store.open(), operation_module.record_outcome
    runs.full("settled")

    def late(store: ObjectStore, intent: Intent, *rest: Any, **options: Any) -> None:
        record(store, intent, "done", "found committed")
        record(store, intent, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(operation_module, "record_outcome", late)
        commit = runs.increment("settled")
    assert {key.rpartition("/")[2] for key in store.list(f"operations/{commit.operation}")} == {
        "intent.json",
        "outcome.json",
    }
    (newest,) = read_history(store, 1)
    assert newest.label
    assert newest.began_at
    # A name with a template is drawn from operations that may end while they are read.
    ended = runs.increment("settled").operation
    monkeypatch.setattr(name_templates, "open_operation_ids", lambda _: [ended])
    assert "settled" in name_templates.used_names(store)


def test_a_rolled_back_transaction_that_cannot_be_decoded_loses_no_marker_before_it(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with pair(shared_fleet, spark, tmp_path, "exact", backups=True) as two:
        two.runs.full(PAIR)
        two.run_part(1, 1, None)
        two.run_part(1, 2, None)
        two.runs.increment(PAIR)
        assert len(two.runs.increment(PAIR).idle) == len(two.runs.fleet.nodes)
        execute(two.shards[2], *rollback_statements("gone", "TRUNCATE part", "INSERT INTO part VALUES (7, 'never')"))
        read_catalog(two.shards[2])
        two.run_part(2, 1, None)
        assert two.runs.increment(PAIR).cut.attempts == 1
        assert two.runs.check_one(PAIR).conflicts == []


def test_a_standby_may_be_idle_while_wal_of_its_primary_is_stored(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with pair(shared_fleet, spark, tmp_path, "exact", backups=True) as two:
        runs, fleet = two.runs, two.runs.fleet
        runs.full(PAIR)
        nodes = tuple(
            node if node.backup_of else replace(node, retained_wal_bytes_max=24 << 20) for node in fleet.nodes
        )
        limited = replace(runs, fleet=replace(fleet, nodes=nodes))
        two.run_part(1, 1, None)
        two.run_part(1, 2, None)
        limited.increment(PAIR)
        execute(two.shards[1], "SELECT pg_logical_emit_message(false, 'other', repeat('x', 3500000))")
        idle = limited.increment(PAIR).idle
        first = next(node for node in fleet.primaries if node.dsn == two.shards[1])
        assert first.id not in idle
        assert {node.id for node in fleet.nodes if node.backup_of == first.id} <= idle.keys()
        for _ in range(2):
            report = limited.check_one(PAIR)
            assert (report.result, report.conflicts) == ("valid", [])
            limited.increment(PAIR)


def test_a_late_segment_within_idle_wal_is_compared_with_the_commits_that_called_it_idle(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment ends before the last idle cut."""
    drained: list[list[module.DrainTask]] = []
    run = make_cut_module.run_own_tasks

    def note(work: Any, tasks: Any, *rest: Any) -> Any:
        drained.append(list(tasks))
        return run(work, tasks, *rest)

    with pair(shared_fleet, spark, tmp_path, "exact", backups=True) as two:
        two.runs.full(PAIR)
        monkeypatch.setattr(make_cut_module, "run_own_tasks", note)
        two.run_part(1, 1, None)
        with monkeypatch.context() as patch:
            patch.setattr(module._Chunk, "_is_idle", lie)
            two.runs.increment(PAIR)
            two.runs.increment(PAIR)
        for task in drained[0]:
            assert module.drain(structs.replace(task, may_be_idle=False)).problem is None
        two.run_part(2, 1, None)
        two.runs.increment(PAIR)
        assert any("list the node as idle" in conflict.detail for conflict in two.runs.check_one(PAIR).conflicts)
