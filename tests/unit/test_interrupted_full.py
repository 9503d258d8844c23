"""What is shown of a full snapshot that was interrupted, and to whom requests to stop it are addressed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

import cutline.snapshots.operations.activity as activity
from cutline.cli.commands.status import StatusReport, lines_of
from cutline.cli.output.tables import FittingTable
from cutline.fleet.progress import Reading, Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.activity import Activity, Command
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.operations.operation import (
    Operation,
    begin,
    commit_operation,
    current_time,
    new_operation,
    record_operation,
)
from cutline.snapshots.operations.signs import store_request
from cutline.snapshots.operations.under_way import ActivityState, read_under_way
from cutline.snapshots.records import unfinished_records
from cutline.snapshots.records.commit import DatabaseFacts
from cutline.snapshots.records.documents import TEXT_MAX, TextTooLongError, seal
from cutline.snapshots.records.operation_records import CancelRequest, Failure, Intent, operation_key
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.snapshots.records.unfinished_records import (
    Resumption,
    resumption_name,
    store_copied,
    store_unfinished_base,
)
from cutline.storage.errors import StoppedError
from cutline.storage.ids import new_operation_id
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import FLEET
from tests.unit.made_commits import commit, memory
from tests.unit.made_operations import NOW, sign
from tests.unit.made_signs import until
from tests.unit.test_unfinished_records import everywhere, plan


def interrupted(store: InMemoryStore, *, hours: int = 5) -> Operation:
    """A full snapshot that began so many hours ago and has copied one of two tables of two shards."""
    at = NOW - timedelta(hours=hours)
    intent = structs.replace(
        new_operation("create", "daily", 0, ("a",)), operation=new_operation_id(at), began_at=Time.of(at), turn=1
    )
    begin(store, intent)
    store_unfinished_base(store, structs.replace(plan(1, 2), operation=intent.id))
    for part in [*everywhere(0, (1, 0, None)), *everywhere(1, (2, 0, 7))]:
        store_copied(
            store,
            structs.replace(part, operation=intent.id, number=len(store.list_children(f"operations/{intent.id}"))),
        )
    return Operation(intent, is_resumable=True)


def resume(store: InMemoryStore, intent: Intent, number: int = 1, *, hours: float = 1.0) -> None:
    resumed_at = Time.of(NOW - timedelta(hours=hours))
    resumption = Resumption(intent.operation, "cutline create daily ops@db7:1", resumed_at)
    store.create(operation_key(intent.operation, resumption_name(number)), seal(resumption))


def fail(store: InMemoryStore, intent: Intent, name: str, *, hours: float) -> None:
    failed_at = Time.of(NOW - timedelta(hours=hours))
    store.create(
        operation_key(intent.operation, name), seal(Failure(intent.operation, "node-unreachable", 6, failed_at))
    )


def test_an_interrupted_snapshot_says_when_and_why_and_what_is_kept() -> None:
    store = memory()
    intent = interrupted(store).intent
    fail(store, intent, "interrupted-1", hours=2)
    (way,) = read_under_way(store)
    assert way.state(NOW) is ActivityState.DEAD
    document = way.to_json(NOW)
    assert (document["seen_at"], document["kept"]) == ("2026-11-20T10:00:00.000Z", {"tables": 2, "wanted": 4})
    table, line = lines_of(StatusReport([way], [], NOW))
    assert isinstance(table, FittingTable)
    assert "2 h 00 min ago" in "".join(table.lines(300))
    begins = f"operation {intent.id} was interrupted at 2026-11-20T10:00:00.000Z (node-unreachable); 2 of 4 tables are"
    assert str(line).startswith(f"{begins} copied and kept; to resume it: snapshot create daily")
    (opened,) = read_open_operations(store, "daily")
    assert "(node-unreachable) and has no outcome, and has not committed snapshot daily; 2 of 4" in opened.text
    assert opened.to_json()["kept"] == {"tables": 2, "wanted": 4}


@pytest.mark.parametrize(
    ("hours_of_sign", "seen_at"),
    [(None, "2026-11-20T11:00:00.000Z"), (0.5, "2026-11-20T11:30:00.000Z")],
    ids=["no sign", "its sign"],
)
def test_the_last_run_counts_not_the_first(hours_of_sign: float | None, seen_at: str) -> None:
    """What the first run left is older than the resumption, which was killed."""
    store = memory()
    intent = interrupted(store).intent
    fail(store, intent, "interrupted-1", hours=4)
    resume(store, intent, hours=1)
    if hours_of_sign is not None:
        sign(store, intent, ago=hours_of_sign * 3600)
    (way,) = read_under_way(store)
    assert way.seen_at == seen_at
    assert way.interruption is None
    fail(store, intent, "interrupted-2", hours=0.1)
    (way,) = read_under_way(store)
    assert way.seen_at == "2026-11-20T11:54:00.000Z"


def test_a_running_snapshot_reads_nothing_that_it_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    intent = interrupted(store).intent
    sign(store, intent, ago=1.0)
    read: list[str] = []
    monkeypatch.setattr("cutline.snapshots.operations.open_operations.utc_now", lambda: NOW)
    original = InMemoryStore.read
    monkeypatch.setattr(InMemoryStore, "read", lambda self, key: read.append(key) or original(self, key))
    (opened,) = read_open_operations(store)
    assert opened.is_running
    assert opened.kept is None
    assert not [key for key in read if "/copied-" in key or "/base-" in key]


def test_a_text_that_is_too_long_for_a_commit_costs_no_table_that_was_copied() -> None:
    store = memory()
    operation = structs.replace(interrupted(store), resumption=1)
    made = structs.replace(commit(0, chain=operation.id), operation=operation.id)
    facts = DatabaseFacts(1, session_settings={"search_path": "x" * (TEXT_MAX + 1)})
    with pytest.raises(TextTooLongError), record_operation(store, operation):
        commit_operation(store, operation, structs.replace(made, databases={"a": facts}))
    assert not store.exists(commit_key("daily", 0))
    (opened,) = read_open_operations(store, "daily")
    assert opened.to_json()["kept"] == {"tables": 2, "wanted": 4}
    with record_operation(store, operation):
        commit_operation(store, operation, made)
    assert not read_open_operations(store, "daily")


def test_much_that_is_kept_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    interrupted(store)
    monkeypatch.setattr(unfinished_records, "SHOWN_TASKS_MAX", 5)
    (opened,) = read_open_operations(store)
    assert (opened.is_resumable, opened.kept) == (True, None)
    assert "; to resume it: snapshot create daily" in opened.text


def test_every_run_that_is_interrupted_says_so() -> None:
    store = memory()
    operation = interrupted(store)
    for resumption in (0, 1):
        operation.resumption = resumption
        if resumption:
            resume(store, operation.intent)
        else:
            store.delete(operation_key(operation.id, "intent"))
        with pytest.raises(StoppedError, match="2 of 4 tables are copied and kept"), record_operation(store, operation):
            raise KeyboardInterrupt
        (way,) = read_under_way(store)
        assert way.interruption is not None
        assert way.interruption.reason == "stopped by Ctrl-C"
    names = store.list_children(f"operations/{operation.id}")
    assert {"interrupted-1.json", "interrupted-2.json"} <= {*names}


def test_a_request_after_the_resumption_stops_the_process_that_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come before the process looks for requests for the first time; earlier ones were for earlier processes."""
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.01)
    store, stopped = memory(), list[Any]()
    ensure_identity(store, FLEET)
    intent = interrupted(store).intent
    first = CancelRequest(intent.id, "cutline cancel daily ops@db7:1", current_time())
    store_request(store, first)
    resume(store, intent)
    with Activity(Silent(), Command("create"), lambda: store, stopped.append) as found:
        found.tell(Reading(0, operation=intent.id))
        until(lambda: any("sign-" in name for name in store.list_children(f"operations/{intent.id}")))
    assert stopped == []
    second = structs.replace(first, by="cutline cancel daily ops@db7:2")
    store_request(store, second)
    with Activity(Silent(), Command("create"), lambda: store, stopped.append) as found:
        found.tell(Reading(0, operation=intent.id))
        until(lambda: stopped)
    assert stopped == [second]
