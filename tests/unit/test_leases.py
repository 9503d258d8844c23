"""Leases: who reads a snapshot, and until when, also if its lease can't be stored or read."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

import cutline.snapshots.operations.leases as module
from cutline.fleet.progress import Noting, Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.leases import SnapshotInUseError, check_not_in_use, hold_lease, open_leases
from cutline.snapshots.operations.open_operations import is_open, read_open_intents
from cutline.snapshots.operations.operation import begin
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import (
    Intent,
    LeaseRenewal,
    operation_key,
    read_outcome,
    write_operation_record,
)
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import AnswerLostError, ObjectStore, StoreUnreachableError
from tests.unit.made_commits import memory, unused_url
from tests.unit.made_operations import new_restore

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def begin_restore(store: ObjectStore, expires_at: datetime) -> Intent:
    """Begin a restore whose process dies without an outcome."""
    operation = structs.replace(new_restore(), expires_at=Time.of(expires_at), by="cutline restore daily ops@db7:4711")
    begin(store, operation)
    return operation


def renew(store: ObjectStore, operation: Intent, number: int, expires_at: str) -> None:
    write_operation_record(store, f"lease-{number}", LeaseRenewal(operation.id, expires_at))


def test_a_snapshot_is_in_use_until_its_restore_ends() -> None:
    store = memory()
    operation = new_restore()
    with hold_lease(store, operation, Silent()):
        with pytest.raises(SnapshotInUseError) as error:
            check_not_in_use(store, "daily")
        check_not_in_use(store, "another")
    assert error.value.exit_code == 7
    assert error.value.details["operation"] == operation.id
    assert error.value.details["since"] == operation.began_at
    check_not_in_use(store, "daily")
    assert open_leases(store) == []


def test_a_refusal_names_the_reader_and_its_lease() -> None:
    store = memory()
    until = datetime.now(UTC) + timedelta(minutes=5)
    operation = begin_restore(store, until)
    with pytest.raises(SnapshotInUseError) as error:
        check_not_in_use(store, "daily")
    assert error.value.details == {
        "snapshot": "daily", "operation": operation.id, "user": "ops", "host": "db7", "process": 4711,
        "since": operation.began_at, "until": Time.of(until),
    }  # fmt: skip
    assert "ops@db7 (process 4711)" in error.value.message


def test_a_restore_that_died_blocks_nobody_once_its_lease_has_expired_and_stays_open() -> None:
    store = memory()
    operation = begin_restore(store, datetime.now(UTC) - timedelta(seconds=1))
    assert not open_leases(store)[0].is_running(datetime.now(UTC))
    check_not_in_use(store, "daily")
    # Its databases may still be there, to be undone.
    assert is_open(store, operation.id)


@pytest.mark.parametrize("renewals", [1, 2, 12])
def test_the_newest_renewal_counts(renewals: int) -> None:
    store = memory()
    operation = begin_restore(store, NOW)
    for number in range(1, renewals + 1):
        renew(store, operation, number, Time.of(NOW + timedelta(minutes=number)))
    (lease,) = open_leases(store, "daily")
    assert lease.until == NOW + timedelta(minutes=renewals)
    assert lease.is_running(NOW + timedelta(minutes=renewals, seconds=-1))
    assert not lease.is_running(NOW + timedelta(minutes=renewals))


def test_a_restore_by_an_earlier_version_has_a_lease_from_its_beginning() -> None:
    store = memory()
    operation = new_restore()
    store.create(operation_key(operation.id, "intent"), seal({
        "schema": "cutline/operation/1", "operation": operation.id, "kind": "restore", "snapshot": "daily",
        "increment": 0, "began_at": "2026-11-20T12:00:00.000Z", "nodes": [], "slot": None,
    }))  # fmt: skip
    assert open_leases(store)[0].until == NOW + timedelta(seconds=module.LEASE_SECONDS)


def test_an_unreadable_lease_is_named_and_still_holds() -> None:
    store = memory()
    operation = begin_restore(store, NOW)
    renew(store, operation, 1, "soon")
    with pytest.raises(ManifestError, match=operation_key(operation.id, "lease-1")):
        check_not_in_use(store, "daily")


def test_a_name_that_has_no_object_hides_no_renewal(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    operation = begin_restore(store, NOW)
    renew(store, operation, 1, Time.of(datetime.now(UTC) + timedelta(minutes=5)))
    store.create(f"operations/{operation.id}/lease-9.json/x", b"")
    with pytest.raises(SnapshotInUseError):
        check_not_in_use(store, "daily")
    assert is_open(store, operation.id)


@pytest.mark.parametrize("planted", [2, 3, 9, 10**30])
def test_an_expired_renewal_of_a_higher_number_hides_no_other(planted: int) -> None:
    store = memory()
    operation = begin_restore(store, NOW)
    until = datetime.now(UTC) + timedelta(minutes=5)
    renew(store, operation, 1, Time.of(until))
    renew(store, operation, planted, Time.of(NOW))
    with pytest.raises(SnapshotInUseError):
        check_not_in_use(store, "daily")
    assert Time.of(open_leases(store)[0].until) == Time.of(until)


@dataclass(frozen=True, slots=True)
class Lagging(InMemoryStore):
    """A store whose listings show the first renewal and a planted one only."""

    def list_children(self, prefix: str) -> list[str]:
        shown = InMemoryStore.list_children(self, prefix)
        return [one for one in shown if "lease" not in one or one in {"lease-1.json", "lease-9.json"}]


def test_renewals_that_a_listing_does_not_show_yet_are_found() -> None:
    store = Lagging(unused_url())
    operation = begin_restore(store, NOW)
    for number, minutes in ((1, 1), (2, 2), (3, 3), (9, 0)):
        renew(store, operation, number, Time.of(NOW + timedelta(minutes=minutes)))
    assert open_leases(store)[0].until == NOW + timedelta(minutes=3)


def test_a_lease_is_renewed_by_new_objects_until_the_restore_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    store = memory()
    operation = new_restore()
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
    """A store whose credentials allow only reads."""

    def create(self, key: str, body: bytes) -> None:
        raise StoreUnreachableError(url=self.url, reason="access denied")


def test_a_store_that_accepts_no_writes_is_read_without_a_lease_and_a_note_says_so() -> None:
    store = ReadOnly(unused_url())
    shown = Noting(Silent())
    with hold_lease(store, new_restore(), shown):
        pass
    (note,) = shown.notes
    assert note.startswith("snapshot daily is not protected from deletion while it is read")
    assert "history and metrics may not show this restore" in note
    assert "access denied" in note


def test_an_outcome_that_can_not_be_stored_does_not_fail_the_restore() -> None:
    store = memory()
    shown = Noting(Silent())
    operation = new_restore()

    @dataclass(frozen=True, slots=True)
    class UnreachableAtTheEnd(InMemoryStore):
        def create(self, key: str, body: bytes) -> None:
            if key.endswith("outcome.json"):
                raise StoreUnreachableError(url=self.url, reason="no route")
            InMemoryStore.create(self, key, body)

    store = UnreachableAtTheEnd(unused_url())
    with hold_lease(store, operation, shown):
        pass
    assert shown.notes == [f"the outcome of operation {operation.id} could not be stored: store {store.url}: no route"]
    assert [one.id for one in read_open_intents(store)] == [operation.id]


@pytest.mark.parametrize("fails", [False, True])
def test_an_intent_whose_answer_was_lost_gets_its_outcome(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """It is stored, which the restore does not know: without an outcome it would be settled as dead."""
    store = memory()
    operation = new_restore()

    def lose_answer(store: ObjectStore, intent: Intent) -> None:
        begin(store, intent)
        raise AnswerLostError(url=store.url, key="intent", reason="timeout")

    monkeypatch.setattr(module, "begin", lose_answer)
    progress = Noting(Silent())
    with suppress(ZeroDivisionError), hold_lease(store, operation, progress) as lease:
        assert not lease.is_stored
        assert is_open(store, operation.id)
        _ = 1 // (0 if fails else 1)
    (note,) = progress.notes
    assert "is not protected from deletion" in note
    outcome = read_outcome(store, operation.id)
    assert outcome is not None
    assert outcome.state == ("failed" if fails else "done")


def test_what_is_done_is_recorded_so_whatever_interrupts_its_end() -> None:
    store, restore = memory(), new_restore()

    def work() -> None:
        with hold_lease(store, restore, Silent()) as held:
            held.is_done = True
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    outcome = read_outcome(store, restore.operation)
    assert outcome
    assert outcome.state == "done"
