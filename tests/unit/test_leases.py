"""Leases: who reads a snapshot is seen by who would delete it, and the other way round, whoever comes second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

import snapshots.operations.leases as module
from fleet.progress import Noting, Silent
from fleet.record import Time
from snapshots.operations.leases import SnapshotInUseError, check_not_in_use, hold_lease, open_leases
from snapshots.operations.operation import begin, is_open, new_operation, pending_operations
from snapshots.records.commits import SnapshotMissingError
from snapshots.records.documents import ManifestError, seal
from snapshots.records.operation_records import Intent, LeaseRenewal, operation_key, write_operation_record
from snapshots.records.tombstones import SnapshotDeletedError, only_full_key, tombstone_key
from storage.memory import InMemoryStore
from storage.store import ObjectMissingError, StoreUnreachableError
from tests.unit.made_commits import mark, memory, own_url

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def restoring(increment: int = 0) -> Intent:
    return new_operation("restore", "daily", increment, ("a",))


def begun(store: InMemoryStore, expires_at: datetime) -> Intent:
    """A restore whose process says nothing any more."""
    operation = structs.replace(restoring(), expires_at=Time.of(expires_at), by="cutline restore daily ops@db7:4711")
    begin(store, operation)
    return operation


def renew(store: InMemoryStore, operation: Intent, number: int, expires_at: str) -> None:
    write_operation_record(store, f"lease-{number}", LeaseRenewal(operation.id, expires_at))


def test_what_is_being_restored_is_in_use_until_it_is_done() -> None:
    store = memory()
    operation = restoring()
    with hold_lease(store, operation, Silent()):
        with pytest.raises(SnapshotInUseError) as error:
            check_not_in_use(store, "daily")
        check_not_in_use(store, "another")
    assert error.value.exit_code == 7
    assert error.value.details["operation"] == operation.id
    assert error.value.details["since"] == operation.began_at
    check_not_in_use(store, "daily")
    assert open_leases(store) == []


def test_a_refusal_tells_who_reads_since_when_and_until_when() -> None:
    store = memory()
    until = datetime.now(UTC) + timedelta(minutes=5)
    operation = begun(store, until)
    with pytest.raises(SnapshotInUseError) as error:
        check_not_in_use(store, "daily")
    assert error.value.details == {
        "snapshot": "daily", "operation": operation.id, "user": "ops", "host": "db7", "process": 4711,
        "since": operation.began_at, "until": Time.of(until),
    }  # fmt: skip
    assert "ops@db7 (process 4711)" in error.value.message


def test_a_restore_that_died_is_closed_once_its_lease_has_run_out() -> None:
    store = memory()
    operation = begun(store, datetime.now(UTC) - timedelta(seconds=1))
    assert not open_leases(store)[0].is_running(datetime.now(UTC))
    check_not_in_use(store, "daily")
    assert not is_open(store, operation.id)


@pytest.mark.parametrize("renewals", [1, 2, 12])
def test_the_newest_renewal_counts(renewals: int) -> None:
    store = memory()
    operation = begun(store, NOW)
    for number in range(1, renewals + 1):
        renew(store, operation, number, Time.of(NOW + timedelta(minutes=number)))
    (lease,) = open_leases(store, "daily")
    assert lease.until == NOW + timedelta(minutes=renewals)
    assert lease.is_running(NOW + timedelta(minutes=renewals, seconds=-1))
    assert not lease.is_running(NOW + timedelta(minutes=renewals))


def test_a_restore_of_an_earlier_version_counts_from_its_beginning() -> None:
    store = memory()
    operation = restoring()
    store.create(operation_key(operation.id, "intent"), seal({
        "schema": "cutline/operation/1", "operation": operation.id, "kind": "restore", "snapshot": "daily",
        "increment": 0, "began_at": "2026-11-20T12:00:00.000Z", "nodes": [], "slot": None,
    }))  # fmt: skip
    assert open_leases(store)[0].until == NOW + timedelta(seconds=module.LEASE_SECONDS)


def test_a_lease_that_can_not_be_read_is_named_and_holds() -> None:
    store = memory()
    operation = begun(store, NOW)
    renew(store, operation, 1, "soon")
    with pytest.raises(ManifestError, match=operation_key(operation.id, "lease-1")):
        check_not_in_use(store, "daily")


def test_a_lease_is_renewed_by_new_objects_and_that_ends_with_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    store = memory()
    operation = restoring()
    with hold_lease(store, operation, Silent()):
        first = open_leases(store)[0].until
        deadline = time.monotonic() + 10
        while not store.exists(operation_key(operation.id, "lease-3")):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert open_leases(store)[0].until > first
    count = len(store.list("operations"))
    time.sleep(0.05)
    assert len(store.list("operations")) == count


@dataclass(frozen=True, slots=True)
class ReadOnly(InMemoryStore):
    """A store whose credentials may read only."""

    def create(self, key: str, body: bytes) -> None:
        raise StoreUnreachableError(url=self.url, reason="access denied")


def test_a_store_that_takes_no_writes_is_read_without_a_lease_and_that_is_said() -> None:
    store = ReadOnly(own_url())
    shown = Noting(Silent())
    with hold_lease(store, restoring(), shown):
        pass
    (note,) = shown.notes
    assert note.startswith("snapshot daily is not protected from deletion while it is read")
    assert "access denied" in note


def test_an_end_that_can_not_be_stored_does_not_undo_what_was_restored() -> None:
    store = memory()
    shown = Noting(Silent())
    operation = restoring()

    @dataclass(frozen=True, slots=True)
    class GoneAtTheEnd(InMemoryStore):
        def create(self, key: str, body: bytes) -> None:
            if key.endswith("outcome.json"):
                raise StoreUnreachableError(url=self.url, reason="no route")
            InMemoryStore.create(self, key, body)

    store = GoneAtTheEnd(own_url())
    with hold_lease(store, operation, shown):
        pass
    assert shown.notes == [f"the outcome of operation {operation.id} could not be stored: store {store.url}: no route"]
    assert [one.id for one in pending_operations(store)] == [operation.id]


def delete(store: InMemoryStore) -> None:
    """A deletion's two steps in their order: its tombstone, then a look for leases."""
    store.create(tombstone_key("daily"), seal(mark()))
    check_not_in_use(store, "daily")


def restore(store: InMemoryStore, meanwhile: Callable[[], None] = lambda: None) -> None:
    with hold_lease(store, restoring(), Silent()):
        meanwhile()


def test_the_one_that_comes_second_gives_way() -> None:
    store = memory()
    delete(store)
    with pytest.raises(SnapshotDeletedError):
        restore(store)
    assert pending_operations(store) == []
    store = memory()
    with pytest.raises(SnapshotInUseError):
        restore(store, lambda: delete(store))


@dataclass(frozen=True, slots=True)
class Meeting(InMemoryStore):
    """A store in which a whole deletion comes between the lease of a restore and its look for a tombstone."""

    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body)
        if key.endswith("intent.json"):
            with pytest.raises(SnapshotInUseError):
                delete(self)


def test_where_each_comes_before_the_look_of_the_other_both_give_way() -> None:
    store = Meeting(own_url())
    with pytest.raises(SnapshotDeletedError):
        restore(store)
    # The restore has ended, so that a repeat of the deletion goes on.
    check_not_in_use(store, "daily")


def test_an_increment_that_was_pruned_meanwhile_is_not_restored() -> None:
    store = memory()
    store.create(only_full_key("daily"), seal(mark(only_full=True)))
    with hold_lease(store, restoring(), Silent()):
        pass
    with pytest.raises(SnapshotMissingError, match="pruned"), hold_lease(store, restoring(1), Silent()):
        pass


def meet_a_missing_object(store: InMemoryStore, *, is_deleted: bool) -> None:
    with hold_lease(store, restoring(), Silent()):
        if is_deleted:
            store.create(tombstone_key("daily"), seal(mark()))
        store.read("snapshots/daily/base/a")


def test_objects_that_go_with_their_snapshot_are_not_called_damaged() -> None:
    store = memory()
    with pytest.raises(ObjectMissingError):
        meet_a_missing_object(store, is_deleted=False)
    with pytest.raises(SnapshotDeletedError):
        meet_a_missing_object(store, is_deleted=True)
    assert pending_operations(store) == []
