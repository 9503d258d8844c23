"""What `cancel` makes of operations that run, end meanwhile, or are dead."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.cancelling import CancelResult, cancel_operations
from cutline.snapshots.operations.ended_operations import read_ended, read_history
from cutline.snapshots.operations.operation import PUBLISH, Operation, begin, decide_restore, record_operation
from cutline.snapshots.operations.signs import DEAD_SECONDS, store_sign
from cutline.snapshots.operations.under_way import UnderWay, read_under_way
from cutline.snapshots.records.operation_records import operation_key, read_cancel_request
from cutline.snapshots.records.store_identity import StoreOfAnotherFleetError, ensure_identity
from cutline.storage.errors import StoppedError
from cutline.storage.ids import new_operation_id
from cutline.storage.memory import InMemoryStore
from tests.run.own_sleep import replace_sleep
from tests.unit.document_kinds import FLEET, SIGN
from tests.unit.made_commits import memory
from tests.unit.made_operations import LABEL, NOW, begun, fleet_of, sign


def cancel(store: InMemoryStore, *, wait: float = 0.0) -> dict[str, CancelResult]:
    ensure_identity(store, FLEET)
    found = cancel_operations(fleet_of(store), read_under_way(store), wait, Silent())
    return {one.operation.id: one.result for one in found}


def test_a_running_operation_is_asked_and_waited_for() -> None:
    store = memory()
    one = begun(store, now=datetime.now(UTC))
    assert cancel(store) == {one.id: CancelResult.STILL_RUNNING}
    assert read_cancel_request(store, one.id, 1) is not None
    # A second request, a moment later, has its own number.
    time.sleep(0.002)
    assert cancel(store) == {one.id: CancelResult.STILL_RUNNING}
    (found,) = read_under_way(store)
    assert found.request == read_cancel_request(store, one.id, 2) is not None


@pytest.mark.parametrize("kind", ["delete", "check"])
def test_a_process_that_ends_without_an_outcome_is_gone_with_its_signs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = memory(), datetime.now(UTC)
    if kind == "delete":
        one = begun(store, kind, now=now).id
        sign(store, structs.replace(begun(store, now=now), operation=one), ago=0.0, now=now)
    else:
        one = SIGN.operation
        store_sign(store, structs.replace(SIGN, kind=kind, seen_at=Time.of(now)), 1)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            store.delete(operation_key(one, "sign-1"))

    replace_sleep(monkeypatch, sleep)
    ensure_identity(store, FLEET)
    asked = [found for found in read_under_way(store) if found.id == one]
    (found,) = cancel_operations(fleet_of(store), asked, 30.0, Silent())
    result = CancelResult.UNFINISHED if kind == "delete" else CancelResult.CANCELLED
    assert (found.operation.id, found.result) == (one, result)
    # A listing may be out of date: one without signs proves nothing.
    assert len(slept) == 4
    assert ("to resume it: snapshot delete daily" in found.text) is (kind == "delete")


@pytest.mark.parametrize(
    ("ends", "result"),
    [("cancelled", CancelResult.CANCELLED), ("done", CancelResult.TOO_LATE), ("failed", CancelResult.ENDED)],
)
def test_what_became_of_a_request_is_said(ends: str, result: CancelResult, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    intent = begun(store, now=datetime.now(UTC))

    def end(_: float) -> None:
        def fail() -> None:
            if ends == "cancelled":
                # As a command ends that says what it leaves: the interrupt is behind it.
                try:
                    raise KeyboardInterrupt(15)
                except KeyboardInterrupt as interrupt:
                    raise StoppedError("nothing is left") from interrupt
            if ends == "failed":
                raise ValueError

        store.delete(operation_key(intent.id, "intent"))
        try:
            with record_operation(store, Operation(intent), lambda: True):
                fail()
        except (StoppedError, ValueError):
            pass

    replace_sleep(monkeypatch, end)
    assert cancel(store, wait=30.0) == {intent.id: result}
    ended = read_ended(store, intent.id)
    assert ended is not None
    assert ended.code == {"cancelled": 8, "done": 0, "failed": 70}[ends]


def test_a_restore_that_publishes_is_not_asked() -> None:
    store = memory()
    intent = begun(store, "restore", now=datetime.now(UTC))
    decide_restore(store, intent, PUBLISH)
    assert cancel(store) == {intent.id: CancelResult.REFUSED}
    assert read_cancel_request(store, intent.id, 1) is None


def test_a_dead_restore_is_refused_with_what_ends_it() -> None:
    store = memory()
    intent = begun(store, "restore", ago=9 * DEAD_SECONDS, now=datetime.now(UTC))
    ensure_identity(store, FLEET)
    (found,) = cancel_operations(fleet_of(store), read_under_way(store), 0.0, Silent())
    assert (found.operation.id, found.result) == (intent.id, CancelResult.REFUSED)
    assert "snapshot restore-resume daily" in found.text


def test_a_dead_check_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.snapshots.operations.cancelling.ANSWER_SECONDS_MAX", 0.0)
    store = memory()
    store_sign(store, structs.replace(SIGN, kind="check", by=LABEL), 1)
    assert cancel(store) == {SIGN.operation: CancelResult.SETTLED}
    assert read_under_way(store) == []
    assert store.list_children(f"operations/{SIGN.operation}") == ["cancel-1.json", "outcome.json"]
    (ended,) = read_history(store, 9)
    assert (ended.kind, ended.label, ended.code) == ("check", LABEL, None)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_prune_that_was_stopped_says_what_it_has_left(monkeypatch: pytest.MonkeyPatch, *, is_left: bool) -> None:
    store, now = memory(), datetime.now(UTC)
    began = now - timedelta(seconds=9)
    # Somebody else's removal, and one of another process of the same machine and user.
    for by in ("cutline delete other ops@db8:4711", "cutline delete other ops@db7:4712"):
        begin(store, structs.replace(begun(store, "delete", now=now), operation=new_operation_id(now), by=by))
    if is_left:
        for name in ("daily", "weekly"):
            removal = structs.replace(begun(store, "delete", now=now), operation=new_operation_id(now), snapshot=name)
            begin(store, structs.replace(removal, by=f"cutline delete {name} ops@db7:4711"))
    whole = Command("prune", "", SIGN.operation)
    about = structs.replace(SIGN, kind="prune", snapshot="", by="cutline prune ops@db7:4711")
    store_sign(store, structs.replace(about, began_at=Time.of(began), seen_at=Time.of(now)), 1)
    (asked,) = [one for one in read_under_way(store) if one.id == whole.operation]
    ensure_identity(store, FLEET)

    def stop(_: float) -> None:
        ending = Ending("failed", "cancelled", code=8)
        record_without_intent(store, whole, Time.of(began), about.by, ending)

    replace_sleep(monkeypatch, stop)
    (found,) = cancel_operations(fleet_of(store), [asked], 30.0, Silent())
    expected = (
        ["to resume it: snapshot delete daily", "to resume it: snapshot delete weekly"] if is_left else ["cleaned"]
    )
    assert all(one in found.text for one in expected)
    assert found.result is (CancelResult.UNFINISHED if is_left else CancelResult.CANCELLED)


def test_an_operation_begun_before_signs_were_stored_has_none() -> None:
    store = memory()
    begun(store, ago=1.0)
    (found,) = read_under_way(store)
    assert isinstance(found, UnderWay)
    assert found.to_json(NOW)["nodes"] == []


def test_an_operation_that_cannot_be_settled_now_hides_no_other() -> None:
    """No node of the fleet can be reached."""
    store = memory()
    dead = begun(store, ago=9 * DEAD_SECONDS, now=datetime.now(UTC))
    running = begun(store, now=datetime.now(UTC))
    assert cancel(store) == {running.id: CancelResult.STILL_RUNNING, dead.id: CancelResult.UNREACHABLE}
    # Its process may be suspended: it stops once it goes on.
    assert read_cancel_request(store, dead.id, 1) is not None


def test_operations_in_the_store_of_another_fleet_are_left_alone() -> None:
    store = memory()
    one = begun(store, now=datetime.now(UTC))
    found = read_under_way(store)
    ensure_identity(store, replace(FLEET, name="another"))
    mine = replace(fleet_of(store), path=Path("/etc/cutline/mine.toml"))
    with pytest.raises(StoreOfAnotherFleetError, match=r"but /etc/cutline/mine\.toml describes fleet"):
        cancel_operations(mine, found, 0.0, Silent())
    assert read_cancel_request(store, one.id, 1) is None
