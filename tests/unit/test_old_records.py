"""What gc does with old records, with leftovers of probes, and with unfinished puts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.snapshots.operations.leases import hold_lease
from cutline.snapshots.operations.open_operations import read_open_intents, read_recorded_commits
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.operations.signs import store_request, store_sign
from cutline.snapshots.records.operation_records import (
    CancelRequest,
    LeaseRenewal,
    operation_key,
    write_operation_record,
)
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.removal import old_records
from cutline.snapshots.removal.garbage_rules import GarbageReason, GarbageVerdict
from cutline.snapshots.removal.old_records import RECORDED_MIN, judge_probe
from cutline.storage.ids import new_operation_id
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.probe import PROBES, probe_store
from cutline.storage.store import DeletionRefusedError, StoreUnreachableError, Unfinished
from tests.unit.document_kinds import SIGN
from tests.unit.made_checks import ended, point, read_times
from tests.unit.made_commits import unused_url
from tests.unit.made_garbage import StoreBuilder, backdate, count_kept, garbage_of, preview_gc, run_gc

HOUR = 3600.0

# A time since which everything has been read.
AT = "2026-11-24T10:00:00.000Z"


def test_records_are_removed_a_month_after_their_outcome_unless_they_are_needed() -> None:
    made = StoreBuilder()
    made.take_full("daily")
    committed = made.take_increment("daily").last.operation
    made.take_full("hourly")
    # A later commit names the digest of the one before it.
    followed = [made.take_increment("hourly").last.operation for _ in range(RECORDED_MIN + 2)][:2]
    pruned = made.take_full("weekly").full.operation
    pruned_increment = made.take_increment("weekly").last.operation
    made.put_only_full("weekly")
    deleted = made.take_full("monthly").full.operation
    made.put_tombstone("monthly")
    failed, left, running = made.begin_create("daily", 2), made.begin_create("other"), made.begin_create("daily", 2)
    record_outcome(made.store, failed, "failed")
    made.store_base(left)
    record_outcome(made.store, left, "failed")
    restored = new_operation("restore", "daily", 0, ())
    with hold_lease(made.store, restored, Silent()):
        write_operation_record(made.store, "lease-1", LeaseRenewal(restored.id, "2026-11-20T12:00:00Z"))
    backdate(made.store, 29)
    run_gc(made.store)
    assert made.store.exists(operation_key(failed.id, "outcome"))
    backdate(made.store, 2, "operations")
    gone = {*(one.operation for one in preview_gc(made.store).garbage)}
    assert gone == {pruned_increment, deleted, failed.id, left.id, restored.id, *followed}
    assert {committed, pruned, running.id}.isdisjoint(gone)
    commits = read_recorded_commits(made.store)["daily"]
    run_gc(made.store)
    assert read_recorded_commits(made.store)["daily"] == commits
    left = sorted(read_recorded_commits(made.store)["hourly"].values())
    assert left == [0, *range(3, RECORDED_MIN + 3)]
    assert [one.id for one in read_open_intents(made.store)] == [running.id]
    assert made.store.list(f"operations/{restored.id}") == []


def test_the_check_that_stands_for_a_snapshot_is_kept() -> None:
    made = StoreBuilder()
    for name in ("daily", "weekly", "monthly"):
        made.take_full(name)
    earlier = ended(made.store, 1, point("daily", 0, "conflicts"), point("weekly", 0))
    standing = ended(made.store, 2, point("daily", 0, "conflicts"), point("weekly", 0, "conflicts"))
    mended = ended(made.store, 3, point("daily", 0, full=False), point("weekly", 0))
    valid = ended(made.store, 4, point("monthly", 0))
    backdate(made.store, 31, "operations")

    def removed() -> list[str]:
        return [one for one in (earlier, standing, mended, valid) if any(one in key for key in gone)]

    gone = garbage_of(made.store)
    assert removed() == [earlier]
    run_gc(made.store)
    assert garbage_of(made.store) == {}
    made.put_tombstone("daily")
    gone = garbage_of(made.store)
    # Were the other one removed first, the conflicts that it has found to be mended would be there again.
    assert removed() == [standing]
    run_gc(made.store)
    gone = garbage_of(made.store)
    assert removed() == []
    made.put_tombstone("weekly")
    gone = garbage_of(made.store)
    assert removed() == [mended]


def test_the_newest_record_on_which_a_check_may_rest_is_kept() -> None:
    made = StoreBuilder()
    made.take_full("daily")
    full = ended(made.store, 1, structs.replace(point("daily", 0), read=read_times(AT)))
    resting = structs.replace(point("daily", 0, full=False), rests_on=full, read=read_times(AT))
    earlier, newest = ended(made.store, 2, resting), ended(made.store, 3, resting)
    backdate(made.store, 31, "operations")
    gone = garbage_of(made.store)
    # The full check stands for the snapshot, and the newest check for later checks.
    assert [one for one in (full, earlier, newest) if any(one in key for key in gone)] == [earlier]


def test_the_record_that_has_read_most_increments_is_kept() -> None:
    made = StoreBuilder()
    made.take_full("daily")
    # The check that ended last was of an earlier increment.
    records = [structs.replace(point("daily", number, full=False), read=read_times(AT)) for number in (1, 2, 0)]
    first, furthest, last = (ended(made.store, minute, record) for minute, record in enumerate(records, 1))
    backdate(made.store, 31, "operations")
    gone = garbage_of(made.store)
    assert [one for one in (first, furthest, last) if any(one in key for key in gone)] == [first]


def test_the_check_that_stands_for_what_is_left_of_a_pruned_snapshot_is_kept() -> None:
    made = StoreBuilder()
    made.take_full("daily")
    # The increment of the first one is gone since; without the second one it would count again.
    ended(made.store, 1, point("daily", 5, "conflicts"))
    ended(made.store, 2, point("daily", 0))
    backdate(made.store, 31, "operations")
    assert garbage_of(made.store) == {}


def test_the_records_of_a_missing_commit_and_of_remaining_objects_stay() -> None:
    made = StoreBuilder()
    made.take_full("daily")
    failed = made.begin_create("other")
    left = made.store_base(failed)
    record_outcome(made.store, failed, "failed")
    made.store.delete(commit_key("daily", 0))
    backdate(made.store, 31, "operations")
    # The objects are removed first, and their record once they are gone.
    assert garbage_of(made.store) == dict.fromkeys(left, "failed")
    run_gc(made.store)
    assert garbage_of(made.store) == {operation_key(failed.id, name): "old-record" for name in ("intent", "outcome")}


@pytest.mark.parametrize("deletions", [1, 2, 3])
def test_a_partly_removed_record_counts_as_closed_and_the_next_gc_removes_the_rest(deletions: int) -> None:
    made = StoreBuilder()
    failed = made.begin_create("daily")
    made.store.create(operation_key(failed.id, "progress"), b"{}")
    record_outcome(made.store, failed, "failed")
    backdate(made.store, 31)
    dying = Dying(made.store, deletions)
    with pytest.raises(StoreUnreachableError):
        run_gc(dying)  # type: ignore[arg-type]
    assert read_open_intents(made.store) == []
    run_gc(made.store)
    assert made.store.list("") == []


@dataclass
class Dying:
    """A store that stops answering after some deletions."""

    store: InMemoryStore
    left: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def delete(self, key: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreUnreachableError(url=self.store.url, reason="gone")
        self.store.delete(key)
        if not self.left:
            raise StoreUnreachableError(url=self.store.url, reason="gone")


def test_leftovers_of_a_probe_are_removed_after_an_hour() -> None:
    made = StoreBuilder()
    key = f"{PROBES}/{new_operation_id(datetime.now(UTC))}/put-once"
    made.store.create(key, b"x")
    assert garbage_of(made.store) == {}
    assert read_open_intents(made.store) == []
    backdate(made.store, 1.1 / 24)
    assert garbage_of(made.store) == {key: "left-over"}
    run_gc(made.store)
    assert made.store.list("") == []


@dataclass(frozen=True, slots=True)
class Undeleting(InMemoryStore):
    """A store that refuses every deletion."""

    def delete(self, key: str) -> None:
        raise DeletionRefusedError(url=self.url, key=key, reason="a policy")


def test_every_object_of_a_real_probe_is_recognised() -> None:
    store = Undeleting(unused_url())
    assert probe_store(store) is not None
    left = store.inventory("")
    assert len(left) > 2
    later = datetime.now(UTC) + timedelta(hours=2)
    assert [one.key for one in left if judge_probe(one, later) != GarbageVerdict(GarbageReason.LEFT_OVER)] == []


@dataclass(frozen=True, slots=True)
class Keeping(InMemoryStore):
    """A store that refuses to delete the objects in `locked`."""

    locked: set[str] = field(default_factory=set)

    def delete(self, key: str) -> None:
        if key in self.locked:
            raise DeletionRefusedError(url=self.url, key=key, reason="its lock")
        InMemoryStore.delete(self, key)


def test_objects_that_the_store_refuses_to_delete_are_named_and_the_rest_is_removed() -> None:
    made = StoreBuilder(Keeping(unused_url()))
    failed = made.begin_create("daily")
    left = made.store_base(failed)
    record_outcome(made.store, failed, "failed")
    made.store.locked.update(left[:2])
    report = run_gc(made.store)
    assert [one.key for one in report.refused] == sorted(left[:2])
    assert report.removed.objects == len(left) - 2
    assert made.store.list("snapshots") == sorted(left[:2])
    # The record stays as long as its objects; later runs of gc remove both.
    backdate(made.store, 31)
    run_gc(made.store)
    assert made.store.list("snapshots") == sorted(left[:2])
    assert made.store.exists(operation_key(failed.id, "intent"))
    made.store.locked.clear()
    run_gc(made.store)
    run_gc(made.store)
    assert made.store.list("") == []


@dataclass(frozen=True, slots=True)
class Leaving(InMemoryStore):
    """A store with unfinished creates in it."""

    left: list[Unfinished] = field(default_factory=list)

    def unfinished(self) -> list[Unfinished]:
        return list(self.left)

    def abandon(self, leftover: Unfinished) -> None:
        self.left.remove(leftover)


def test_unfinished_uploads_are_removed_unless_their_snapshot_is_being_created() -> None:
    made = StoreBuilder(Leaving(unused_url()))
    operation = made.begin_create("daily")
    now = datetime.now(UTC)
    key = f"snapshots/daily/base/a/{operation.id}/part-000000-000-ab.parquet"
    ours, foreign = Unfinished(key, "1", 10, now), Unfinished("other/file", "2", 10, now)
    made.store.left.extend([ours, foreign])
    report = preview_gc(made.store)
    assert report.garbage == []
    assert count_kept(report, GarbageReason.OPEN) == 1
    assert report.unknown == ["other/file (unfinished)"]
    record_outcome(made.store, operation, "failed")
    assert garbage_of(made.store, HOUR) == {}
    assert run_gc(made.store).removed.size_bytes == 10
    assert made.store.left == [foreign]


def test_hidden_files_are_removed_if_they_are_older_than_every_open_operation(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = StoreBuilder(store)
    (tmp_path / ".incoming").mkdir(exist_ok=True)
    old, new = tmp_path / ".incoming" / "old", tmp_path / ".incoming" / "new"
    for path, hours in ((old, 2.5), (new, 0.5)):
        path.write_bytes(b"left")
        then = (datetime.now(UTC) - timedelta(hours=hours)).timestamp()
        os.utime(path, (then, then))
    assert garbage_of(store) == {"old": "left-over"}
    operation = new_operation("create", "daily", 0, ("a",))
    began = datetime.now(UTC) - timedelta(hours=2)
    begin(store, structs.replace(operation, began_at=began.isoformat()))
    # That operation may have written the file: its clock may be off.
    assert garbage_of(store) == {}
    made.operations.append(operation)
    record_outcome(store, operation, "failed")
    run_gc(store)
    assert not old.exists()
    assert new.exists()


def test_signs_of_life_are_removed_once_nothing_can_follow_them() -> None:
    made = StoreBuilder()
    ended, running = made.begin_create("other"), made.begin_create("daily")
    record_outcome(made.store, ended, "failed")
    check = new_operation_id(datetime.now(UTC))
    for operation in (ended.id, running.id, check):
        store_sign(made.store, structs.replace(SIGN, operation=operation), 7)
    store_request(made.store, CancelRequest(check, "cutline cancel daily ops@db7:2", SIGN.seen_at))
    keys = [operation_key(ended.id, "sign-7"), *(operation_key(check, name) for name in ("sign-7", "cancel-1"))]
    assert garbage_of(made.store) == {}
    backdate(made.store, 1.1)
    assert garbage_of(made.store) == dict.fromkeys(keys, "left-over")
    run_gc(made.store)
    assert made.store.list_children(f"operations/{check}") == []
    assert "sign-7.json" in made.store.list_children(f"operations/{running.id}")
    assert "outcome.json" in made.store.list_children(f"operations/{ended.id}")


def test_conflicts_are_kept_however_many_checks_have_begun_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_records, "REMOVAL_READ_MAX", 3)
    made = StoreBuilder()
    made.take_full("daily")
    standing = ended(made.store, 1, point("daily", 0, "conflicts"))
    later = [ended(made.store, minute, point("daily", 0, full=False)) for minute in range(2, 9)]
    backdate(made.store, 31, "operations")
    gone = garbage_of(made.store)
    assert {one for one in (standing, *later) if any(one in key for key in gone)} == set(later)
