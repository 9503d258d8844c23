"""What is garbage in a store: every kind of it, and all that looks like it and is none."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from fleet.progress import Silent
from snapshots.operations.committing import put_commit
from snapshots.operations.deciding import decide, has_committed
from snapshots.operations.leases import hold_lease
from snapshots.operations.operation import new_operation, record_outcome
from snapshots.records.commits import commit_key, free_turn, read_chain, snapshot_names
from snapshots.records.keys import base_prefix
from snapshots.records.lost_chains import lost_key
from snapshots.records.operation_records import operation_key
from snapshots.records.tombstones import only_full_key, tombstone_key
from snapshots.removal.garbage import GarbageReason
from storage.ids import new_operation_id
from storage.local import LocalStore
from tests.unit.made_garbage import MadeStore, age, collected, found, garbage_of, kept, needed_by

HOUR = 3600.0


@pytest.fixture(params=["memory", "folder"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> MadeStore:
    return MadeStore(LocalStore(tmp_path / "store")) if request.param == "folder" else MadeStore()


def test_what_whole_chains_need_is_no_garbage(made: MadeStore) -> None:
    made.full("daily")
    made.increment("daily", copies=True)
    chain = made.increment("daily")
    made.full("weekly")
    before = made.store.list("")
    report = collected(made.store)
    assert (report.garbage, report.removed.objects, report.unknown) == ([], 0, [])
    assert kept(report, GarbageReason.NEEDED) == len(before)
    assert made.store.list("") == before
    assert needed_by(chain) < set(before)


def test_what_a_failed_attempt_left_goes_and_its_name_can_be_taken(made: MadeStore) -> None:
    failed = made.begin("daily")
    left = {*made.base(failed), *made.segments("daily", failed.id, (1, 2))}
    decide(made.store, failed)
    record_outcome(made.store, failed, "failed")
    chain = made.full("daily")
    assert chain.full.operation != failed.id
    assert garbage_of(made.store) == dict.fromkeys(left, "failed")
    report = collected(made.store)
    assert (report.removed.objects, report.removed.size_bytes) == (len(left), sum(map(len, left)))
    assert read_chain(made.store, "daily") == chain
    assert all(made.store.exists(key) for key in needed_by(chain))
    # The void stays: it keeps a late put away.
    assert made.store.exists(commit_key("daily", 0))
    assert garbage_of(made.store) == {}


def test_an_attempt_that_failed_before_its_put_leaves_no_void_and_its_objects_go(made: MadeStore) -> None:
    failed = made.begin("daily")
    left = made.base(failed)
    record_outcome(made.store, failed, "failed")
    assert garbage_of(made.store) == dict.fromkeys(left, "failed")
    collected(made.store)
    assert made.store.list("snapshots") == []


def test_what_an_operation_without_an_outcome_has_stored_stays_until_it_is_settled(made: MadeStore) -> None:
    made.full("weekly")
    running = made.begin("daily")
    left = {*made.base(running), *made.segments("daily", running.id, (1,))}
    report = found(made.store)
    assert garbage_of(made.store) == {}
    assert kept(report, GarbageReason.OPEN) == len(left)
    assert [one.id for one in report.open_operations] == [running.id]
    # A void decides, also where its slots can't be dropped yet and no outcome is written.
    assert not decide(made.store, running)
    assert garbage_of(made.store) == dict.fromkeys(left, "failed")


def test_a_commit_counts_although_its_outcome_is_missing_or_says_otherwise(made: MadeStore) -> None:
    operation = made.begin("daily")
    objects = made.base(operation)
    made.segments("daily", operation.id, (1,))
    put_commit(made.store, made.commit(operation, objects), operation.turn)
    assert garbage_of(made.store) == {}
    record_outcome(made.store, operation, "failed")
    assert garbage_of(made.store) == {}


def test_a_commit_file_that_is_gone_may_be_put_back(made: MadeStore) -> None:
    made.full("daily")
    made.increment("daily")
    made.store.delete(commit_key("daily", 0))
    assert garbage_of(made.store) == {}
    text = [text for _, why, text in found(made.store).kept if why is GarbageReason.UNCLEAR]
    assert all("its commit file snapshots/daily/snapshot.json is gone" in one for one in text)
    assert text


def test_what_a_repeated_task_stored_twice_is_not_listed_and_goes(made: MadeStore) -> None:
    chain = made.full("daily")
    twice = next(key for key in needed_by(chain) if "/base/" in key).replace("-ab.", "-cd.")
    made.store.create(twice, b"of the first attempt of the task")
    assert garbage_of(made.store) == {twice: "unlisted"}


def test_the_beginning_of_the_next_increment_stays_and_the_increment_takes_it(made: MadeStore) -> None:
    chain = made.full("daily")
    failed = made.begin("daily", 1)
    begun = made.segments("daily", chain.full.operation, (3, 4))
    decide(made.store, failed)
    record_outcome(made.store, failed, "failed")
    report = collected(made.store)
    assert report.garbage == []
    assert kept(report, GarbageReason.NEXT) == len(begun)
    assert set(begun) < needed_by(made.increment("daily"))
    assert kept(found(made.store), GarbageReason.NEXT) == 0


@pytest.mark.parametrize("increments", [0, 1])
def test_what_follows_the_last_increment_of_a_lost_chain_goes(made: MadeStore, increments: int) -> None:
    chain = made.full("daily")
    for _ in range(increments):
        chain = made.increment("daily")
    begun = made.segments("daily", chain.full.operation, (made.next_number(chain),))
    running = made.begin("daily", increments + 1)
    made.lose(chain)
    # Whoever marks a chain has settled all before; one that is open all the same may list them yet.
    assert garbage_of(made.store) == {}
    decide(made.store, running)
    record_outcome(made.store, running, "failed")
    # Nor within an hour of the mark: who has not seen it yet has no intent yet.
    assert garbage_of(made.store) == {}
    age(made.store, 1.1 / 24)
    assert garbage_of(made.store) == dict.fromkeys(begun, "lost")
    collected(made.store)
    assert read_chain(made.store, "daily") == chain
    assert all(made.store.exists(key) for key in {*needed_by(chain), lost_key("daily", chain.full.operation)})


def test_a_lost_chain_that_misses_a_commit_file_keeps_all(made: MadeStore) -> None:
    made.full("daily")
    made.increment("daily")
    made.lose(made.increment("daily"))
    made.store.delete(commit_key("daily", 2))
    assert garbage_of(made.store) == {}
    assert any("the commit file of increment 2 is gone" in text for _, _, text in found(made.store).kept)


@pytest.mark.parametrize("increment", [0, 1])
def test_a_damaged_commit_file_keeps_what_it_may_list(made: MadeStore, increment: int) -> None:
    made.full("daily")
    made.lose(made.increment("daily"))
    key = commit_key("daily", increment)
    body = made.store.read(key)
    made.store.delete(key)
    made.store.create(key, body.replace(b'"daily"', b'"dally"', 1))
    assert garbage_of(made.store) == {}
    assert any(why is GarbageReason.UNCLEAR and key in text for _, why, text in found(made.store).kept)


def test_what_is_left_of_a_deleted_snapshot_goes_but_its_tombstone(made: MadeStore) -> None:
    made.full("daily")
    made.lose(made.increment("daily"))
    left = made.store.list("snapshots/daily")
    made.tombstone("daily")
    assert garbage_of(made.store) == dict.fromkeys(left, "deleted")
    collected(made.store)
    assert made.store.list("snapshots") == []
    assert made.store.exists(tombstone_key("daily"))


def test_what_is_left_of_pruned_increments_goes(made: MadeStore) -> None:
    full = made.full("daily")
    chain = made.increment("daily")
    left = (needed_by(chain) - needed_by(full)) | {commit_key("daily", 1)}
    left |= set(made.segments("daily", full.full.operation, (4,)))
    made.only_full("daily")
    assert garbage_of(made.store) == dict.fromkeys(left, "pruned")
    collected(made.store)
    assert read_chain(made.store, "daily") == full
    assert all(made.store.exists(key) for key in {*needed_by(full), only_full_key("daily")})


def test_copies_of_an_increment_that_failed_or_ran_twice_go_and_those_that_are_listed_stay(made: MadeStore) -> None:
    made.full("daily")
    failed = made.begin("daily", 1)
    left = dict.fromkeys(made.base(failed), "failed")
    decide(made.store, failed)
    record_outcome(made.store, failed, "failed")
    chain = made.increment("daily", copies=True)
    twice = f"{base_prefix('daily', 'a', chain.last.operation)}/part-000000-000-cd.parquet"
    made.store.create(twice, b"")
    running = made.begin("daily", 2)
    made.base(running)
    assert garbage_of(made.store) == left | {twice: "unlisted"}
    collected(made.store)
    assert all(made.store.exists(key) for key in needed_by(chain))


def test_copies_of_pruned_increments_go(made: MadeStore) -> None:
    full = made.full("daily")
    chain = made.increment("daily", copies=True)
    left = (needed_by(chain) - needed_by(full)) | {commit_key("daily", 1)}
    made.only_full("daily")
    assert garbage_of(made.store) == dict.fromkeys(left, "pruned")


@pytest.mark.parametrize("mark", ["tombstone", "only_full"])
def test_a_restore_keeps_what_it_reads_until_it_is_done(made: MadeStore, mark: str) -> None:
    made.full("daily")
    made.increment("daily")
    with hold_lease(made.store, new_operation("restore", "daily", 1, ("a",)), Silent()):
        getattr(made, mark)("daily")
        report = collected(made.store)
        assert report.garbage == []
        assert kept(report, GarbageReason.IN_USE) > 0
    assert garbage_of(made.store)


def test_what_is_younger_than_the_grace_period_stays() -> None:
    made = MadeStore()
    failed = made.begin("daily")
    old = made.base(failed)
    age(made.store, 2)
    young = made.segments("daily", failed.id, (1,))
    record_outcome(made.store, failed, "failed")
    assert garbage_of(made.store, 24 * HOUR) == dict.fromkeys(old, "failed")
    assert kept(found(made.store, 24 * HOUR), GarbageReason.YOUNG) == len(young)
    assert garbage_of(made.store, 72 * HOUR) == {}


def test_unknown_keys_are_named_and_left_alone(made: MadeStore) -> None:
    chain = made.full("daily")
    made.tombstone("daily")
    foreign = [
        "notes.txt", "other/deep/file", "operations/mine/notes", "deleted/daily.txt", "baselines/newest.json",
        "snapshots/daily/notes.txt", "snapshots/daily/base/a/part-1.parquet", "snapshots/not a name/snapshot.json",
        f"snapshots/daily/wal/a/{chain.full.operation}/1.parquet",
    ]  # fmt: skip
    for key in foreign:
        made.store.create(key, b"x")
    named = {*foreign, "other/", "snapshots/not a name/"} - {"other/deep/file", "snapshots/not a name/snapshot.json"}
    report = collected(made.store)
    assert set(report.unknown) == named
    assert report.removed.objects > 0
    assert all(made.store.exists(key) for key in foreign)


def test_objects_of_an_operation_without_a_record_stay(made: MadeStore) -> None:
    chain = made.full("daily")
    operation = chain.full.operation
    stranger = new_operation_id(datetime.now(UTC))
    made.segments("daily", stranger, (1,))
    made.store.delete(operation_key(operation, "intent"))
    made.store.delete(operation_key(operation, "outcome"))
    assert garbage_of(made.store) == {}
    assert any(stranger in text for _, why, text in found(made.store).kept if why is GarbageReason.UNCLEAR)
    assert not any(operation in text for _, _, text in found(made.store).kept)


def test_objects_copied_below_another_name_stay(made: MadeStore) -> None:
    made.full("daily")
    for key in made.store.list("snapshots/daily"):
        made.store.create(key.replace("daily", "copy"), made.store.read(key))
    assert garbage_of(made.store) == {}


def test_turns_and_voids_stay_whatever_else_goes(made: MadeStore) -> None:
    for _ in range(3):
        failed = made.begin("daily")
        made.base(failed)
        assert not decide(made.store, failed)
        record_outcome(made.store, failed, "failed")
    turn = free_turn(made.store, "daily", 0)
    collected(made.store)
    assert free_turn(made.store, "daily", 0) == turn == 4
    assert snapshot_names(made.store) == []
    assert not any(has_committed(made.store, one) for one in made.operations)
