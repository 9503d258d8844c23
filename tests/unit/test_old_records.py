"""What gc makes of old records, of what probes left, and of puts that were never ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

from fleet.progress import Silent
from snapshots.operations.leases import hold_lease
from snapshots.operations.operation import (
    begin,
    new_operation,
    pending_operations,
    read_recorded_commits,
    record_outcome,
)
from snapshots.records.commits import commit_key
from snapshots.records.operation_records import LeaseRenewal, operation_key, write_operation_record
from snapshots.removal.garbage import GarbageReason, GarbageVerdict
from snapshots.removal.old_records import judge_probe
from storage.ids import new_operation_id
from storage.local import LocalStore
from storage.memory import InMemoryStore
from storage.probe import PROBES, probe_store
from storage.store import DeletionRefusedError, StoreUnreachableError, Unfinished
from tests.unit.made_commits import own_url
from tests.unit.made_garbage import MadeStore, age, collected, found, garbage_of, kept

HOUR = 3600.0


def test_records_go_a_month_after_their_outcome_but_for_those_that_are_needed() -> None:
    made = MadeStore()
    made.full("daily")
    committed = made.increment("daily").last.operation
    pruned = made.full("weekly").full.operation
    pruned_increment = made.increment("weekly").last.operation
    made.only_full("weekly")
    deleted = made.full("monthly").full.operation
    made.tombstone("monthly")
    failed, left, running = made.begin("daily", 2), made.begin("other"), made.begin("daily", 2)
    record_outcome(made.store, failed, "failed")
    made.base(left)
    record_outcome(made.store, left, "failed")
    restored = new_operation("restore", "daily", 0, ())
    with hold_lease(made.store, restored, Silent()):
        write_operation_record(made.store, "lease-1", LeaseRenewal(restored.id, "2026-11-20T12:00:00Z"))
    age(made.store, 29)
    collected(made.store)
    assert made.store.exists(operation_key(failed.id, "outcome"))
    age(made.store, 2, "operations")
    gone = {*(one.operation for one in found(made.store).garbage)}
    assert gone == {pruned_increment, deleted, failed.id, left.id, restored.id}
    assert {committed, pruned, running.id}.isdisjoint(gone)
    commits = read_recorded_commits(made.store)["daily"]
    collected(made.store)
    assert read_recorded_commits(made.store)["daily"] == commits
    assert [one.id for one in pending_operations(made.store)] == [running.id]
    assert made.store.list(f"operations/{restored.id}") == []


def test_the_record_of_a_commit_that_is_gone_stays_and_that_of_objects_that_are_left() -> None:
    made = MadeStore()
    made.full("daily")
    failed = made.begin("other")
    left = made.base(failed)
    record_outcome(made.store, failed, "failed")
    made.store.delete(commit_key("daily", 0))
    age(made.store, 31, "operations")
    # First the objects, and their record when they are gone.
    assert garbage_of(made.store) == dict.fromkeys(left, "failed")
    collected(made.store)
    assert garbage_of(made.store) == {operation_key(failed.id, name): "old-record" for name in ("intent", "outcome")}


@pytest.mark.parametrize("deletions", [1, 2, 3])
def test_a_record_that_went_in_part_is_over_and_goes_on_going(deletions: int) -> None:
    made = MadeStore()
    failed = made.begin("daily")
    made.store.create(operation_key(failed.id, "progress"), b"{}")
    record_outcome(made.store, failed, "failed")
    age(made.store, 31)
    dying = Dying(made.store, deletions)
    with pytest.raises(StoreUnreachableError):
        collected(dying)  # type: ignore[arg-type]
    assert pending_operations(made.store) == []
    collected(made.store)
    assert made.store.list("") == []


@dataclass
class Dying:
    """A store that answers no more after some deletions."""

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


def test_what_a_probe_left_goes_after_an_hour() -> None:
    made = MadeStore()
    key = f"{PROBES}/{new_operation_id(datetime.now(UTC))}/put-once"
    made.store.create(key, b"x")
    assert garbage_of(made.store) == {}
    assert pending_operations(made.store) == []
    age(made.store, 1.1 / 24)
    assert garbage_of(made.store) == {key: "left-over"}
    collected(made.store)
    assert made.store.list("") == []


@dataclass(frozen=True, slots=True)
class Undeleting(InMemoryStore):
    """A store in which nobody may delete."""

    def delete(self, key: str) -> None:
        raise DeletionRefusedError(url=self.url, key=key, reason="a policy")


def test_every_object_of_a_real_probe_is_known_for_one() -> None:
    store = Undeleting(own_url())
    assert probe_store(store) is not None
    left = store.inventory("")
    assert len(left) > 2
    later = datetime.now(UTC) + timedelta(hours=2)
    assert [one.key for one in left if judge_probe(one, later) != GarbageVerdict(GarbageReason.LEFT_OVER)] == []


@dataclass(frozen=True, slots=True)
class Keeping(InMemoryStore):
    """A store with a lock on some objects."""

    locked: set[str] = field(default_factory=set)

    def delete(self, key: str) -> None:
        if key in self.locked:
            raise DeletionRefusedError(url=self.url, key=key, reason="its lock")
        InMemoryStore.delete(self, key)


def test_what_the_store_does_not_let_go_is_named_and_the_rest_goes() -> None:
    made = MadeStore(Keeping(own_url()))
    failed = made.begin("daily")
    left = made.base(failed)
    record_outcome(made.store, failed, "failed")
    made.store.locked.update(left[:2])
    report = collected(made.store)
    assert [one.key for one in report.refused] == sorted(left[:2])
    assert report.removed.objects == len(left) - 2
    assert made.store.list("snapshots") == sorted(left[:2])
    # The record of what is left stays with it, and a repeat finishes.
    age(made.store, 31)
    collected(made.store)
    assert made.store.list("snapshots") == sorted(left[:2])
    assert made.store.exists(operation_key(failed.id, "intent"))
    made.store.locked.clear()
    collected(made.store)
    collected(made.store)
    assert made.store.list("") == []


@dataclass(frozen=True, slots=True)
class Leaving(InMemoryStore):
    """A store with unfinished creates in it."""

    left: list[Unfinished] = field(default_factory=list)

    def unfinished(self) -> list[Unfinished]:
        return list(self.left)

    def abandon(self, leftover: Unfinished) -> None:
        self.left.remove(leftover)


def test_unfinished_uploads_go_unless_their_snapshot_is_being_taken() -> None:
    made = MadeStore(Leaving(own_url()))
    operation = made.begin("daily")
    now = datetime.now(UTC)
    key = f"snapshots/daily/base/a/{operation.id}/part-000000-000-ab.parquet"
    ours, foreign = Unfinished(key, "1", 10, now), Unfinished("other/file", "2", 10, now)
    made.store.left.extend([ours, foreign])
    report = found(made.store)
    assert report.garbage == []
    assert kept(report, GarbageReason.OPEN) == 1
    assert report.unknown == ["other/file (unfinished)"]
    record_outcome(made.store, operation, "failed")
    assert garbage_of(made.store, HOUR) == {}
    assert collected(made.store).removed.size_bytes == 10
    assert made.store.left == [foreign]


def test_hidden_files_go_if_they_are_older_than_all_that_runs(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = MadeStore(store)
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
    # It may have been written by that operation, whose clock may be off.
    assert garbage_of(store) == {}
    made.operations.append(operation)
    record_outcome(store, operation, "failed")
    collected(store)
    assert not old.exists()
    assert new.exists()
