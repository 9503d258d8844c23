"""What is garbage in a store: every kind of it, and everything that only looks like it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cutline.fleet.progress import Silent
from cutline.snapshots.operations.committing import decide, has_committed, put_commit
from cutline.snapshots.operations.leases import hold_lease
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.records.commit import WITHOUT_ROWS
from cutline.snapshots.records.documents import Kind, base_prefix, ddl_prefix, parse_key
from cutline.snapshots.records.end_marks import end_key
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.proven_chains import commit_key, free_turn, read_chain, snapshot_names
from cutline.snapshots.records.tombstones import only_full_key, tombstone_key
from cutline.snapshots.removal.garbage_rules import GarbageReason
from cutline.storage.clock import follow_machine, set_time, steady_seconds
from cutline.storage.ids import new_operation_id
from cutline.storage.local import LocalStore
from tests.unit.made_garbage import StoreBuilder, backdate, count_kept, garbage_of, needed_by, preview_gc, run_gc

HOUR = 3600.0


@pytest.fixture(params=["memory", "folder"])
def builder(request: pytest.FixtureRequest, tmp_path: Path) -> StoreBuilder:
    return StoreBuilder(LocalStore(tmp_path / "store")) if request.param == "folder" else StoreBuilder()


def test_objects_that_chains_need_are_not_garbage(builder: StoreBuilder) -> None:
    builder.take_full("daily")
    builder.take_increment("daily", copies=True)
    chain = builder.take_increment("daily")
    builder.take_full("weekly")
    before = builder.store.list("")
    report = run_gc(builder.store)
    assert (report.garbage, report.removed.objects, report.unknown) == ([], 0, [])
    assert count_kept(report, GarbageReason.NEEDED) == len(before)
    assert builder.store.list("") == before
    assert needed_by(chain) < set(before)


def test_objects_of_a_failed_create_are_removed_and_its_name_can_be_used(builder: StoreBuilder) -> None:
    failed = builder.begin_create("daily")
    left = {*builder.store_base(failed), *builder.store_segments("daily", failed.id, (1, 2))}
    decide(builder.store, failed)
    record_outcome(builder.store, failed, "failed")
    chain = builder.take_full("daily")
    assert chain.full.operation != failed.id
    assert garbage_of(builder.store) == dict.fromkeys(left, "failed")
    report = run_gc(builder.store)
    assert (report.removed.objects, report.removed.size_bytes) == (len(left), sum(map(len, left)))
    assert read_chain(builder.store, "daily") == chain
    assert all(builder.store.exists(key) for key in needed_by(chain))
    # The void stays: it makes a late put fail.
    assert builder.store.exists(commit_key("daily", 0))
    assert garbage_of(builder.store) == {}


def test_a_create_that_failed_before_its_put_leaves_no_void_and_its_objects_are_removed(builder: StoreBuilder) -> None:
    failed = builder.begin_create("daily")
    left = builder.store_base(failed)
    record_outcome(builder.store, failed, "failed")
    assert garbage_of(builder.store) == dict.fromkeys(left, "failed")
    run_gc(builder.store)
    assert builder.store.list("snapshots") == []


def test_objects_of_an_open_operation_stay_until_it_is_settled(builder: StoreBuilder) -> None:
    builder.take_full("weekly")
    running = builder.begin_create("daily")
    left = {*builder.store_base(running), *builder.store_segments("daily", running.id, (1,))}
    report = preview_gc(builder.store)
    assert garbage_of(builder.store) == {}
    assert count_kept(report, GarbageReason.OPEN) == len(left)
    assert [one.id for one in report.open_operations] == [running.id]
    # A void decides, even if slots can't be dropped yet and so no outcome is written.
    assert not decide(builder.store, running)
    assert garbage_of(builder.store) == dict.fromkeys(left, "failed")


def test_a_commit_counts_even_if_its_outcome_is_missing_or_says_otherwise(builder: StoreBuilder) -> None:
    operation = builder.begin_create("daily")
    objects = builder.store_base(operation)
    builder.store_segments("daily", operation.id, (1,))
    put_commit(builder.store, builder.new_commit(operation, objects), operation.turn)
    assert garbage_of(builder.store) == {}
    record_outcome(builder.store, operation, "failed")
    assert garbage_of(builder.store) == {}


def test_objects_stay_if_their_commit_file_is_missing(builder: StoreBuilder) -> None:
    builder.take_full("daily")
    builder.take_increment("daily")
    builder.store.delete(commit_key("daily", 0))
    assert garbage_of(builder.store) == {}
    texts = [text for _, why, text in preview_gc(builder.store).kept if why is GarbageReason.UNCLEAR]
    assert all("its commit file snapshots/daily/snapshot.json is missing" in text for text in texts)
    assert texts


def test_the_unlisted_copy_of_a_repeated_task_is_removed(builder: StoreBuilder) -> None:
    chain = builder.take_full("daily")
    twice = next(key for key in needed_by(chain) if "/base/" in key).replace("-ab.", "-cd.")
    builder.store.create(twice, b"of the first attempt of the task")
    assert garbage_of(builder.store) == {twice: "unlisted"}


def test_segments_of_a_failed_increment_stay_and_the_next_increment_lists_them(builder: StoreBuilder) -> None:
    chain = builder.take_full("daily")
    failed = builder.begin_create("daily", 1)
    segments = builder.store_segments("daily", chain.full.operation, (3, 4))
    decide(builder.store, failed)
    record_outcome(builder.store, failed, "failed")
    report = run_gc(builder.store)
    assert report.garbage == []
    assert count_kept(report, GarbageReason.NEXT) == len(segments)
    assert set(segments) < needed_by(builder.take_increment("daily"))
    assert count_kept(preview_gc(builder.store), GarbageReason.NEXT) == 0


@pytest.mark.parametrize("increments", [0, 1])
def test_segments_after_the_last_increment_of_an_ended_chain_go(builder: StoreBuilder, increments: int) -> None:
    chain = builder.take_full("daily")
    for _ in range(increments):
        chain = builder.take_increment("daily")
    segments = builder.store_segments("daily", chain.full.operation, (builder.next_number(chain),))
    running = builder.begin_create("daily", increments + 1)
    builder.end_chain(chain)
    # Earlier operations are settled before a chain is marked; one that is open nevertheless may still list them.
    assert garbage_of(builder.store) == {}
    decide(builder.store, running)
    record_outcome(builder.store, running, "failed")
    # A restore that ended unfinished may stay open for days, and needs only what is listed.
    begin(builder.store, new_operation("restore", "daily", increments, ("a",)))
    # Nor within an hour of the mark: a create that has not seen it may have no intent yet.
    assert garbage_of(builder.store) == {}
    backdate(builder.store, 1.1 / 24)
    assert garbage_of(builder.store) == dict.fromkeys(segments, "ended")
    run_gc(builder.store)
    assert read_chain(builder.store, "daily") == chain
    assert all(builder.store.exists(key) for key in {*needed_by(chain), end_key("daily", chain.full.operation)})


def test_an_ended_chain_without_one_of_its_commit_files_keeps_everything(builder: StoreBuilder) -> None:
    builder.take_full("daily")
    builder.take_increment("daily")
    builder.end_chain(builder.take_increment("daily"))
    builder.store.delete(commit_key("daily", 2))
    assert garbage_of(builder.store) == {}
    assert any("the commit file of increment 2 is missing" in text for _, _, text in preview_gc(builder.store).kept)


@pytest.mark.parametrize("increment", [0, 1])
def test_a_damaged_commit_file_keeps_the_objects_that_it_may_list(builder: StoreBuilder, increment: int) -> None:
    builder.take_full("daily")
    builder.end_chain(builder.take_increment("daily"))
    key = commit_key("daily", increment)
    body = builder.store.read(key)
    builder.store.delete(key)
    builder.store.create(key, body.replace(b'"daily"', b'"dally"', 1))
    assert garbage_of(builder.store) == {}
    assert any(why is GarbageReason.UNCLEAR and key in text for _, why, text in preview_gc(builder.store).kept)


def test_everything_of_a_deleted_snapshot_but_the_tombstone_is_removed(builder: StoreBuilder) -> None:
    builder.take_full("daily")
    builder.end_chain(builder.take_increment("daily"))
    left = builder.store.list("snapshots/daily")
    builder.put_tombstone("daily")
    assert garbage_of(builder.store) == dict.fromkeys(left, "deleted")
    run_gc(builder.store)
    assert builder.store.list("snapshots") == []
    assert builder.store.exists(tombstone_key("daily"))


def test_objects_of_pruned_increments_are_removed(builder: StoreBuilder) -> None:
    full = builder.take_full("daily")
    chain = builder.take_increment("daily")
    left = (needed_by(chain) - needed_by(full)) | {commit_key("daily", 1)}
    left |= set(builder.store_segments("daily", full.full.operation, (4,)))
    builder.put_only_full("daily")
    assert garbage_of(builder.store) == dict.fromkeys(left, "pruned")
    run_gc(builder.store)
    assert read_chain(builder.store, "daily") == full
    assert all(builder.store.exists(key) for key in {*needed_by(full), only_full_key("daily")})


def test_unlisted_copies_of_increments_are_removed_and_listed_ones_stay(builder: StoreBuilder) -> None:
    builder.take_full("daily")
    failed = builder.begin_create("daily", 1)
    left = dict.fromkeys(builder.store_base(failed), "failed")
    decide(builder.store, failed)
    record_outcome(builder.store, failed, "failed")
    chain = builder.take_increment("daily", copies=True)
    twice = f"{base_prefix('daily', 'a', chain.last.operation)}/part-000000-000-cd.parquet"
    builder.store.create(twice, b"")
    running = builder.begin_create("daily", 2)
    builder.store_base(running)
    assert garbage_of(builder.store) == left | {twice: "unlisted"}
    run_gc(builder.store)
    assert all(builder.store.exists(key) for key in needed_by(chain))


def test_copies_of_pruned_increments_are_removed(builder: StoreBuilder) -> None:
    full = builder.take_full("daily")
    chain = builder.take_increment("daily", copies=True)
    left = (needed_by(chain) - needed_by(full)) | {commit_key("daily", 1)}
    builder.put_only_full("daily")
    assert garbage_of(builder.store) == dict.fromkeys(left, "pruned")


@pytest.mark.parametrize("mark", ["tombstone", "only_full"])
def test_a_restore_keeps_the_objects_that_it_reads_until_it_is_done(builder: StoreBuilder, mark: str) -> None:
    builder.take_full("daily")
    builder.take_increment("daily")
    with hold_lease(builder.store, new_operation("restore", "daily", 1, ("a",)), Silent()):
        getattr(builder, f"put_{mark}")("daily")
        report = run_gc(builder.store)
        assert report.garbage == []
        assert count_kept(report, GarbageReason.IN_USE) > 0
    assert garbage_of(builder.store)


def test_objects_younger_than_the_grace_period_stay() -> None:
    builder = StoreBuilder()
    failed = builder.begin_create("daily")
    old = builder.store_base(failed)
    backdate(builder.store, 2)
    young = builder.store_segments("daily", failed.id, (1,))
    record_outcome(builder.store, failed, "failed")
    assert garbage_of(builder.store, 24 * HOUR) == dict.fromkeys(old, "failed")
    assert count_kept(preview_gc(builder.store, 24 * HOUR), GarbageReason.YOUNG) == len(young)
    assert garbage_of(builder.store, 72 * HOUR) == {}


def test_objects_in_a_folder_are_as_old_as_the_clock_that_made_them_says(tmp_path: Path) -> None:
    """The nodes' clocks show that this machine's is 400 days behind, or ahead: the files are new all the same."""
    builder = StoreBuilder(LocalStore(tmp_path))
    failed = builder.begin_create("daily")
    builder.store_base(failed)
    record_outcome(builder.store, failed, "failed")
    try:
        for days in (400, -400):
            set_time(datetime.now(UTC) + timedelta(days=days), steady_seconds())
            assert garbage_of(builder.store, 24 * HOUR) == {}
    finally:
        follow_machine()
    assert garbage_of(builder.store) != {}


def test_objects_with_unknown_keys_are_named_and_stay(builder: StoreBuilder) -> None:
    chain = builder.take_full("daily")
    builder.put_tombstone("daily")
    foreign = [
        "notes.txt", "other/deep/file", "operations/mine/notes", "deleted/daily.txt", "baselines/newest.json",
        "snapshots/daily/notes.txt", "snapshots/daily/base/a/part-1.parquet", "snapshots/not a name/snapshot.json",
        f"snapshots/daily/wal/a/{chain.full.operation}/1.parquet",
    ]  # fmt: skip
    for key in foreign:
        builder.store.create(key, b"x")
    named = {*foreign, "other/", "snapshots/not a name/"} - {"other/deep/file", "snapshots/not a name/snapshot.json"}
    report = run_gc(builder.store)
    assert set(report.unknown) == named
    assert report.removed.objects > 0
    assert all(builder.store.exists(key) for key in foreign)


def test_objects_of_an_operation_without_a_record_stay(builder: StoreBuilder) -> None:
    chain = builder.take_full("daily")
    operation = chain.full.operation
    stranger = new_operation_id(datetime.now(UTC))
    builder.store_segments("daily", stranger, (1,))
    builder.store.delete(operation_key(operation, "intent"))
    builder.store.delete(operation_key(operation, "outcome"))
    assert garbage_of(builder.store) == {}
    assert any(stranger in text for _, why, text in preview_gc(builder.store).kept if why is GarbageReason.UNCLEAR)
    assert not any(operation in text for _, _, text in preview_gc(builder.store).kept)


def test_objects_copied_under_another_name_stay(builder: StoreBuilder) -> None:
    builder.take_full("daily")
    for key in builder.store.list("snapshots/daily"):
        builder.store.create(key.replace("daily", "copy"), builder.store.read(key))
    assert garbage_of(builder.store) == {}


def test_voids_stay_so_that_no_turn_is_used_again(builder: StoreBuilder) -> None:
    for _ in range(3):
        failed = builder.begin_create("daily")
        builder.store_base(failed)
        assert not decide(builder.store, failed)
        record_outcome(builder.store, failed, "failed")
    turn = free_turn(builder.store, "daily", 0)
    run_gc(builder.store)
    assert free_turn(builder.store, "daily", 0) == turn == 4
    assert snapshot_names(builder.store) == []
    assert not any(has_committed(builder.store, one) for one in builder.operations)


@pytest.mark.parametrize("kind", WITHOUT_ROWS)
def test_objects_of_every_kind_have_keys_that_every_command_knows(kind: str) -> None:
    """What parse_key does not know, neither prune nor gc ever deletes."""
    key = f"{ddl_prefix('daily', 's1', '20261126T210000Z-0123456789')}/{kind}-89abcdef.sql.zst"
    parsed = parse_key("daily", key)
    assert parsed is not None
    assert (parsed.kind, parsed.node) == (Kind.SCHEMA, "s1")
