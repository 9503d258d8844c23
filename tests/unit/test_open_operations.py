"""What commands that only read report about open operations, and that they change nothing."""

from __future__ import annotations

import pytest
from msgspec import structs

from cutline.fleet.record import Time
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.open_operations import naming_open_operations, read_open_operations
from cutline.snapshots.operations.operation import Operation, record_operation, record_outcome
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.records.operation_records import Intent, SignOfLife, operation_key
from cutline.snapshots.records.proven_chains import SnapshotMissingError, read_chain
from cutline.snapshots.records.tombstones import tombstone_key
from cutline.storage.clock import utc_now
from cutline.storage.errors import IndeterminateError
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from tests.held.retained_wal import Notes
from tests.unit.made_chains import FLEET
from tests.unit.made_commits import commit, memory, unused_url


def leave_open(store: ObjectStore, kind: str = "create", name: str = "daily", increment: int = 0) -> Intent:
    """Begin an operation whose process dies without an outcome."""
    intent = Intent(
        operation=f"op-{name}-{increment}-{kind}", kind=kind, snapshot=name, increment=increment,
        began_at="2026-11-20T11:00:00.000Z", nodes=("a",), slot=None,
    )  # fmt: skip
    with pytest.raises(IndeterminateError), record_operation(store, Operation(intent)):
        raise IndeterminateError("it died")
    return intent


def test_an_open_operation_without_a_commit_is_named_without_alarm() -> None:
    store = memory()
    one = leave_open(store, increment=3)
    before = store.list("")
    (found,) = read_open_operations(store)
    assert found.text == (
        f"operation {one.id} (create daily, begun 2026-11-20T11:00:00.000Z) shows no sign of life and has no outcome,"
        " and has not committed increment 3 of daily; the next create, delete, prune or gc settles it"
    )
    assert found.to_json() == {
        "operation": one.id, "kind": "create", "snapshot": "daily", "increment": 3,
        "began_at": "2026-11-20T11:00:00.000Z", "terminal": False, "committed": False, "problem": None,
        "resumable": False, "databases": [], "servers": [], "running": False, "seen_at": "2026-11-20T11:00:00.000Z",
        "who": None, "process": None, "kept": None,
    }  # fmt: skip
    assert store.list("") == before


@pytest.mark.parametrize(("kind", "again"), [("delete", "delete daily"), ("prune", "prune")])
def test_a_removal_that_the_store_has_refused_is_not_called_dead(kind: str, again: str) -> None:
    store = memory()
    one = leave_open(store, kind)
    (found,) = read_open_operations(store)
    assert found.text == (
        f"operation {one.id} ({kind} daily, begun 2026-11-20T11:00:00.000Z) has not finished; to resume it:"
        f" snapshot {again}"
    )


def test_an_open_restore_is_named_with_the_databases_that_it_makes() -> None:
    store = memory()
    one = structs.replace(leave_open(store, kind="restore"), operation="op-r", targets=("7/bank", "8/bank", "8/till"))
    with pytest.raises(IndeterminateError), record_operation(store, Operation(one)):
        raise IndeterminateError("it died")
    texts = [found.text for found in read_open_operations(store)]
    began = "begun 2026-11-20T11:00:00.000Z) shows no sign of life and has no outcome; to finish it: snapshot"
    assert texts[0].startswith(f"operation op-daily-0-restore (restore daily, {began} restore-resume daily")
    assert texts[1].startswith(f"operation op-r (restore daily into database bank, till, {began} restore-resume daily")


@pytest.mark.parametrize("kind", ["restore", "drill", "create", "delete", "prune"])
def test_a_running_operation_is_named_with_its_process_and_without_advice(kind: str) -> None:
    store, by = memory(), f"cutline {kind} daily ops@db7:4711"
    began = Time.of(utc_now())
    one = structs.replace(
        leave_open(store), operation="op-r", kind=kind.replace("drill", "restore"), by=by, began_at=began
    )
    with pytest.raises(IndeterminateError), record_operation(store, Operation(one)):
        raise IndeterminateError("it died")
    *_, found = read_open_operations(store)
    what = f"operation op-r ({kind} daily, begun {began}) is running on db7, started by ops as process 4711"
    assert found.text == f"{what}; to follow it: snapshot status"
    sign = SignOfLife(
        operation="op-r", kind=kind, snapshot="daily", increment=0, by=by, began_at=began, seen_at=began,
        next_seconds=5.0, phase="load", done=0, total=None, unit="", rate=None, nodes=(), seconds_left=None,
        is_rough=False,
    )  # fmt: skip
    store_sign(store, sign, 1)
    *_, found = read_open_operations(store)
    assert found.text == f"{what}, last sign of life at {began}; to follow it: snapshot status"
    document = found.to_json()
    assert {name: document[name] for name in ("kind", "running", "seen_at", "who", "process")} == {
        "kind": kind, "running": True, "seen_at": began, "who": "ops@db7", "process": 4711,
    }  # fmt: skip


def test_an_open_restore_is_named_with_its_servers() -> None:
    store = memory()
    one = structs.replace(leave_open(store, kind="restore"), operation="op-r", targets=("7/bank", "8/bank"))
    with (
        pytest.raises(IndeterminateError),
        record_operation(store, Operation(structs.replace(one, servers=("db1:5432", "db2:5432")))),
    ):
        raise IndeterminateError("it died")
    *_, found = read_open_operations(store)
    assert (found.to_json()["databases"], found.to_json()["servers"]) == (["bank"], ["db1:5432", "db2:5432"])
    text = found.text
    assert text.startswith("operation op-r (restore daily into database bank on db1:5432, db2:5432, begun ")


def test_the_snapshot_of_an_open_operation_with_a_commit_exists() -> None:
    store = memory()
    one = leave_open(store)
    put_commit(store, structs.replace(commit(0), operation=one.id))
    (found,) = read_open_operations(store, "daily")
    assert found.committed
    assert found.text.endswith("has no outcome yet: its commit is in the store, so snapshot daily exists")


def test_an_unfinished_restore_is_named_with_what_ends_it() -> None:
    store = memory()
    leave_open(store, "restore")
    (found,) = read_open_operations(store, "daily")
    assert found.text.endswith(
        "to finish it: snapshot restore-resume daily   to undo it: snapshot restore-abandon daily"
        "   (with the same --to FILE, if it had one);"
        " until then these databases may refuse connections"
    )
    assert found.to_json()["committed"] is None


def test_closed_operations_and_those_of_other_snapshots_are_not_named() -> None:
    store = memory()
    record_outcome(store, leave_open(store), "failed")
    other = leave_open(store, name="weekly")
    assert read_open_operations(store, "daily") == ()
    assert [one.id for one in read_open_operations(store)] == [other.id]


def test_an_unreadable_intent_may_be_of_any_snapshot() -> None:
    store = memory()
    store.create(operation_key("op-7", "intent"), b"{}")
    (found,) = read_open_operations(store, "daily")
    assert operation_key("op-7", "intent") in found.text
    assert found.to_json()["committed"] is None


def test_what_is_no_outcome_ends_no_operation() -> None:
    store = memory()
    one = leave_open(store)
    store.create(operation_key(one.id, "outcome"), b"")
    (found,) = read_open_operations(store, "daily")
    assert found.operation == one
    assert operation_key(one.id, "outcome") in found.text
    assert found.to_json()["committed"] is None
    notes = Notes()
    settle_operations(store, FLEET, notes)
    assert notes.find_one(f"operation {one.id} can't be settled", operation_key(one.id, "outcome"))
    assert store.list("snapshots") == []


class ForgettingStore(InMemoryStore):
    """A store from which somebody removes the records of operations while one is settled."""

    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body)
        for record in self.list("operations") if key.startswith("snapshots/") else ():
            self.delete(record)


def test_an_operation_whose_intent_goes_while_it_is_settled_is_not_settled() -> None:
    store, notes = ForgettingStore(unused_url()), Notes()
    one = leave_open(store)
    settle_operations(store, FLEET, notes)
    assert notes.find_one(f"operation {one.id} can't be settled: its intent was changed or removed after it was read")


def test_an_operation_is_named_with_the_object_that_hides_its_result() -> None:
    store = memory()
    one = leave_open(store)
    store.create(tombstone_key("daily"), b"")
    (found,) = read_open_operations(store, "daily")
    assert tombstone_key("daily") in found.text
    assert "intent" not in found.text
    assert (found.operation, found.to_json()["committed"]) == (one, None)


def test_the_error_for_a_missing_snapshot_names_the_operation_that_was_to_create_it() -> None:
    store = memory()
    one = leave_open(store)
    with pytest.raises(SnapshotMissingError) as raised, naming_open_operations(read_open_operations(store, "daily")):
        read_chain(store, "daily")
    assert one.id in raised.value.hint
    assert "see: snapshot list" in raised.value.hint
    assert [entry["operation"] for entry in raised.value.details["open_operations"]] == [one.id]


def test_closed_operations_cost_only_their_place_in_the_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    for number in range(20):
        record_outcome(store, leave_open(store, increment=number), "failed")
    calls: list[str] = []
    for name in ("list", "read", "exists", "size"):
        method = getattr(InMemoryStore, name)
        monkeypatch.setattr(InMemoryStore, name, lambda self, key, m=method: calls.append(key) or m(self, key))
    assert read_open_operations(store) == ()
    assert calls == ["operations"]
