"""Signs of life: what a process stores of itself while it works, and how it is asked to stop."""

from __future__ import annotations

import time

import pytest
from msgspec import structs

import cutline.snapshots.operations.activity as activity
from cutline.fleet.progress import Reading, Silent
from cutline.snapshots.operations.activity import SIGN_NODES_MAX, Activity, Command
from cutline.snapshots.operations.operation import begin, current_time
from cutline.snapshots.operations.signs import sign_numbers, store_request, store_sign
from cutline.snapshots.operations.under_way import read_one, read_under_way
from cutline.snapshots.records.operation_records import CancelRequest, operation_key
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import FLEET, SIGN
from tests.unit.made_commits import memory
from tests.unit.made_signs import SECONDS_MAX, ask, begun, names, never, newest, replaced, until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(activity, "SIGN_SECONDS", 0.02)


def test_signs_say_how_far_the_step_is_and_none_is_left_at_the_end() -> None:
    store = memory()
    intent = begun(store)
    with Activity(Silent(), Command("create"), lambda: store, never) as found:
        found.step("copy", total=10, unit="tasks")
        time.sleep(0.1)
        # Nobody knows yet which operation it is.
        assert sign_numbers(names(store, intent)) == []
        found.tell(Reading(0, operation=intent.id))
        found.advance(4)
        found.tell(Reading(30, 60, "rows", "s1", seconds_left=12.0))
        until(lambda: (sign := newest(store, intent)) and sign.nodes)
        sign = newest(store, intent)
        assert sign is not None
        # The operation's time left is that of the last reading.
        assert (sign.phase, sign.done, sign.total, sign.unit) == ("copy", 4, 10, "tasks")
        assert [(one.node, one.done, one.total, one.unit) for one in sign.nodes] == [("s1", 30, 60, "rows")]
        assert sign.seconds_left is not None
        assert 11.0 < sign.seconds_left <= 12.0
        assert (sign.operation, sign.kind, sign.snapshot, sign.increment) == (intent.id, "create", "daily", 3)
        assert sign.began_at == intent.began_at
        first = max(sign_numbers(names(store, intent)))
        until(lambda: max(sign_numbers(names(store, intent)), default=0) > first + 5)
        assert len(sign_numbers(names(store, intent))) <= 2
    assert names(store, intent) == ["intent.json"]


def test_a_sign_of_a_thousand_nodes_is_small_and_has_those_that_are_least_advanced() -> None:
    store = memory()
    intent = begun(store)
    slow = {f"shard-of-a-large-fleet-{number:04}" for number in range(0, 1000, 50)}
    with Activity(Silent(), Command("create", "daily", intent.id), lambda: store, never) as found:
        found.step("copy", total=4000, unit="tasks")
        for number in range(1000):
            node = f"shard-of-a-large-fleet-{number:04}"
            found.tell(Reading((1 if node in slow else 2) << 35, 1 << 40, "bytes", node))
        until(lambda: (sign := newest(store, intent)) and sign.other_nodes == 1000 - SIGN_NODES_MAX)
        sign = newest(store, intent)
        (key, *_) = [key for key in store.list(f"operations/{intent.id}") if "/sign-" in key]
        size_bytes = len(store.read(key))
    assert sign is not None
    assert {one.node for one in sign.nodes} == slow
    assert size_bytes < 4096


def test_a_command_that_ends_within_the_first_seconds_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 30.0)
    store = memory()
    intent = begun(store)
    opened: list[int] = []

    def open_store() -> InMemoryStore:
        opened.append(1)
        return store

    began = time.monotonic()
    with Activity(Silent(), Command("create"), open_store, never) as found:
        found.tell(Reading(0, operation=intent.id))
    assert time.monotonic() - began < 5.0
    assert opened == []


def test_another_operation_of_the_same_command_has_signs_of_its_own() -> None:
    store = memory()
    first, second = begun(store, "prune"), begun(store, "delete")
    with Activity(Silent(), Command("prune"), lambda: store, never) as found:
        for one in (first, second):
            found.tell(Reading(0, operation=one.id))
            until(lambda one=one: newest(store, one))
        assert names(store, first) == ["intent.json"]
    assert names(store, second) == ["intent.json"]


def test_signs_of_a_process_that_died_are_followed_and_cleared_by_the_one_that_goes_on() -> None:
    store = memory()
    intent = begun(store)
    store_sign(store, SIGN, 1)
    for number in (7, 8):
        assert store_sign(store, replaced(intent), number) == number
    with Activity(Silent(), Command("restore", "daily", intent.id), lambda: store, never):
        until(lambda: (sign := newest(store, intent)) and sign.phase == "begin")
        assert max(sign_numbers(names(store, intent))) > 8
    assert names(store, intent) == ["intent.json"]


def test_who_is_asked_to_stop_stops_once() -> None:
    store, asked = memory(), list[CancelRequest]()
    with Activity(Silent(), Command("create"), lambda: store, asked.append) as found:
        intent = begun(store)
        # Before the process looks for the first time.
        request = ask(store, intent)
        found.tell(Reading(0, operation=intent.id))
        until(lambda: asked)
        number = max(sign_numbers(names(store, intent)), default=0)
        # It is alive until it has cleaned up.
        until(lambda: max(sign_numbers(names(store, intent)), default=0) > number + 2)
    assert asked == [request]


def test_nobody_stops_what_is_ending() -> None:
    """It undoes what it has begun, or only goes forward; then the command may go on with another operation."""
    store, asked = memory(), list[CancelRequest]()
    with Activity(Silent(), Command("prune"), lambda: store, asked.append) as found:
        first, second = begun(store, "prune"), begun(store, "prune")
        found.tell(Reading(0, operation=first.id))
        until(lambda: newest(store, first))
        found.ending()
        request = ask(store, first)
        number = max(sign_numbers(names(store, first)))
        until(lambda: max(sign_numbers(names(store, first)), default=0) > number + 5)
        assert asked == []
        found.tell(Reading(0, operation=second.id))
        until(lambda: asked)
    assert asked == [request]


def test_what_is_asked_of_one_step_stops_the_command_in_the_next() -> None:
    store, asked = memory(), list[CancelRequest]()
    with Activity(Silent(), Command("prune"), lambda: store, asked.append) as found:
        first, second = begun(store, "prune"), begun(store, "prune")
        request = ask(store, first)
        found.tell(Reading(0, operation=first.id))
        found.tell(Reading(0, operation=second.id))
        until(lambda: asked)
    assert asked == [request]


def test_what_was_asked_of_an_earlier_process_does_not_stop_the_one_that_resumes() -> None:
    store, asked = memory(), list[CancelRequest]()
    intent = structs.replace(
        begun(store, "restore"), operation="20261120T000000Z-000000000a", began_at="2026-11-20T00:00:00Z"
    )
    begin(store, intent)
    ask(store, intent)
    with Activity(Silent(), Command("restore", "daily", intent.id), lambda: store, asked.append):
        until(lambda: newest(store, intent))
        number = max(sign_numbers(names(store, intent)))
        until(lambda: max(sign_numbers(names(store, intent)), default=0) > number + 5)
        assert asked == []
        request = ask(store, intent)
        until(lambda: asked)
    assert asked == [request]


def test_a_request_that_cannot_be_read_hides_no_sign() -> None:
    store = memory()
    intent = begun(store)
    store.create(operation_key(intent.id, "cancel-1"), b"{}")
    asked: list[CancelRequest] = []
    with Activity(Silent(), Command("create", "daily", intent.id), lambda: store, asked.append):
        until(lambda: newest(store, intent))
        # Nor the next one.
        request = ask(store, intent)
        until(lambda: asked)
    assert asked == [request]


def test_a_check_is_seen_as_soon_as_it_shows_itself_and_leaves_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its thread stores nothing before the end.
    monkeypatch.setattr(activity, "LOOK_SECONDS", SECONDS_MAX)
    store, operation = memory(), "20261120T000000Z-000000000a"
    ensure_identity(store, FLEET)
    with Activity(Silent(), Command("check", "daily", operation), lambda: store, never) as found:
        assert read_one(store, operation) is None
        found.show(operation)
        seen = read_one(store, operation)
        assert seen is not None
        assert (seen.kind, seen.snapshot, seen.intent) == ("check", "daily", None)
    assert store.list_children(f"operations/{operation}") == []


def test_a_command_that_is_an_operation_has_signs_beside_those_of_what_it_works_on() -> None:
    """As a prune: whoever waits for it sees it until its last removal has ended."""
    store, whole = memory(), "20261120T000000Z-000000000a"
    first, second = begun(store, "prune"), begun(store, "delete")

    def number_of_whole() -> int:
        return max(sign_numbers(store.list_children(f"operations/{whole}")), default=0)

    with Activity(Silent(), Command("prune"), lambda: store, never) as found:
        found.show(whole)
        found.become(whole)
        assert number_of_whole() == 1
        for one in (first, second):
            found.tell(Reading(0, operation=one.id))
            until(lambda one=one: newest(store, one))
            before = number_of_whole()
            until(lambda before=before: number_of_whole() > before + 2)
        assert names(store, first) == ["intent.json"]
        (seen,) = [one for one in read_under_way(store) if one.id == whole]
        assert (seen.kind, seen.snapshot, seen.intent) == ("prune", "", None)
    assert names(store, second) == ["intent.json"]
    assert store.list_children(f"operations/{whole}") == []


@pytest.mark.parametrize("asks_whole", [True, False])
def test_who_asks_the_whole_stops_the_part_and_the_other_way_round(*, asks_whole: bool) -> None:
    store, asked, whole = memory(), list[CancelRequest](), "20261120T000000Z-000000000a"
    with Activity(Silent(), Command("prune"), lambda: store, asked.append) as found:
        found.become(whole)
        part = begun(store, "prune")
        found.tell(Reading(0, operation=part.id))
        until(lambda: newest(store, part))
        assert asked == []
        request = CancelRequest(whole if asks_whole else part.id, "cutline cancel ops@db7:1", current_time())
        store_request(store, request)
        until(lambda: asked)
    assert asked == [request]


def test_each_operation_is_announced_once_it_is_begun() -> None:
    store, announced = memory(), list[str]()
    intents = [begun(store, "prune"), begun(store, "prune")]
    with Activity(Silent(), Command("prune"), lambda: store, never, announced.append) as found:
        assert announced == []
        for intent in intents:
            found.tell(Reading(0, operation=intent.id))
        found.tell(Reading(1, 2, "objects"))
    assert announced == [intent.id for intent in intents]
