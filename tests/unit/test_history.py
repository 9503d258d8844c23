"""What `history` shows of operations that have ended."""

from __future__ import annotations

import time

from msgspec import structs

from cutline.cli.output.activity import what_text
from cutline.fleet.record import Time
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.ended_operations import read_history
from cutline.snapshots.operations.operation import begin, record_outcome
from cutline.snapshots.operations.under_way import read_under_way
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.ids import new_operation_id
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import FLEET
from tests.unit.made_commits import memory, unused_url
from tests.unit.made_operations import LABEL, NOW, begun, new_restore


def test_history_has_the_newest_first_with_what_is_known() -> None:
    store = InMemoryStore(unused_url())
    first, second = begun(store, ago=60.0), begun(store, ago=30.0)
    record_outcome(store, first, "failed", "store-unreachable")
    record_outcome(store, second, "done")
    begun(store, ago=10.0)
    ensure_identity(store, FLEET)
    other = new_operation_id(NOW)
    ending = Ending("done", "conflicts", 1, {"rows": 7})
    record_without_intent(store, Command("check", "weekly", other), Time.of(NOW), LABEL, ending)
    assert [one.id for one in read_history(store, 9)] == [other, second.id, first.id]
    assert [one.id for one in read_history(store, 2)] == [other, second.id]
    assert [one.id for one in read_history(store, 9, "daily")] == [second.id, first.id]
    # Others have recorded how they ended, and nobody knows when.
    assert [one.seconds is None for one in read_history(store, 9)] == [False, True, True]
    newest = read_history(store, 1)[0].to_json()
    assert {name: newest[name] for name in ("kind", "snapshot", "state", "reason", "code", "who", "volumes")} == {
        "kind": "check", "snapshot": "weekly", "state": "done", "reason": "conflicts", "code": 1, "who": "ops@db7",
        "volumes": {"rows": 7},
    }  # fmt: skip


def test_of_operations_that_began_in_one_second_the_last_one_to_end_comes_first() -> None:
    store = memory()
    intents = [begun(store, ago=0.0) for _ in range(6)]
    for intent in intents:
        record_outcome(store, intent, "done")
        # Documents have milliseconds.
        time.sleep(0.002)
    for count in (1, 6):
        assert [one.id for one in read_history(store, count)] == [one.id for one in [*reversed(intents)][:count]]


def test_a_restore_of_an_exact_time_is_named_by_it() -> None:
    store, at = memory(), Time.parse("2026-11-20T11:02:03.000004Z")
    operation = structs.replace(new_restore(3), exact_at=at)
    begin(store, operation)
    (running,) = read_under_way(store)
    record_outcome(store, operation, "done")
    (ended,) = read_history(store, 9)
    assert what_text(running) == what_text(ended) == f"restore daily at {at}"
    assert running.to_json(NOW)["exact_at"] == ended.to_json()["exact_at"] == at
    assert ended.to_json()["increment"] == 3


def test_an_unreadable_outcome_is_named_in_history() -> None:
    store = memory()
    intent = begun(store, ago=3.0)
    store.create(operation_key(intent.id, "outcome"), b"{" + b" " * 200 + b"}")
    (found,) = read_history(store, 9)
    assert found.outcome is None
    assert "outcome.json" in found.problem
    assert isinstance(read_under_way(store), list)
