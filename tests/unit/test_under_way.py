"""What `status` reads of operations that are under way, and what becomes of those that are to be cancelled."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from msgspec import structs

from cli.commands.status import StatusReport, document_of, lines_of, read_status, watch_status
from cli.output.tables import FittingTable
from fleet.progress import Silent
from fleet.record import Time
from snapshots.activity.cancelling import CancelResult, cancel_operations
from snapshots.activity.command import Command
from snapshots.activity.ended_operations import read_ended, read_history
from snapshots.activity.recording import Ending, record_without_intent
from snapshots.activity.under_way import DEAD_SECONDS, ActivityState, UnderWay, read_one, read_under_way
from snapshots.operations.operation import Operation, begin, new_operation, record_operation, record_outcome
from snapshots.operations.restore_decisions import PUBLISH, decide_restore
from snapshots.operations.signs import store_sign
from snapshots.records.operation_records import Intent, NodeSign, operation_key, read_cancel_request
from snapshots.records.store_identity import StoreOfAnotherFleetError, ensure_identity
from storage.errors import StoppedError
from storage.ids import new_operation_id
from storage.memory import InMemoryStore
from storage.store import Inventory, StoreUnreachableError
from tests.unit.document_kinds import FLEET, SIGN
from tests.unit.made_commits import memory, unused_url

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
LABEL = "cutline check daily ops@db7:4711"


def begun(store: InMemoryStore, kind: str = "create", *, ago: float = 0.0, now: datetime = NOW) -> Intent:
    """An operation that began so many seconds ago."""
    at = now - timedelta(seconds=ago)
    intent = structs.replace(
        new_operation(kind, "daily", 3, ("a",)), operation=new_operation_id(at), began_at=Time.of(at)
    )
    begin(store, intent)
    return intent


def sign(store: InMemoryStore, intent: Intent, *, ago: float, number: int = 1, now: datetime = NOW) -> None:
    seen_at = Time.of(now - timedelta(seconds=ago))
    store_sign(store, structs.replace(SIGN, operation=intent.id, seen_at=seen_at, snapshot="daily"), number)


@pytest.mark.parametrize(
    ("began", "seen", "state"),
    [
        (1.0, None, ActivityState.RUNNING),
        (DEAD_SECONDS + 1, None, ActivityState.DEAD),
        (9 * DEAD_SECONDS, SIGN.next_seconds + DEAD_SECONDS - 1, ActivityState.RUNNING),
        (9 * DEAD_SECONDS, SIGN.next_seconds + DEAD_SECONDS + 1, ActivityState.DEAD),
    ],
)
def test_an_operation_is_dead_after_a_minute_without_a_sign(
    began: float, seen: float | None, state: ActivityState
) -> None:
    store = memory()
    intent = begun(store, ago=began)
    if seen is not None:
        sign(store, intent, ago=seen + 30, number=1)
        sign(store, intent, ago=seen, number=2)
    (found,) = read_under_way(store)
    assert found.state(NOW) is state
    assert (found.id, found.kind, found.snapshot, found.increment) == (intent.id, "create", "daily", 3)


def test_a_restore_that_publishes_is_said_to() -> None:
    store = memory()
    intent = begun(store, "restore", ago=3.0)
    decide_restore(store, intent, PUBLISH)
    (found,) = read_under_way(store)
    assert found.state(NOW) is ActivityState.PUBLISHING
    assert found.state(NOW + timedelta(seconds=DEAD_SECONDS)) is ActivityState.DEAD


def test_what_has_ended_is_not_under_way() -> None:
    store = memory()
    ended, other = begun(store, ago=9.0), begun(store, "delete", ago=5.0)
    sign(store, ended, ago=1.0)
    record_outcome(store, ended, "done")
    assert [one.id for one in read_under_way(store)] == [other.id]
    assert read_one(store, ended.id) is None
    assert read_one(store, other.id) is not None
    assert read_one(store, new_operation_id(NOW)) is None


def test_a_check_is_under_way_by_its_signs_alone() -> None:
    store = memory()
    store_sign(store, structs.replace(SIGN, kind="check", snapshot="", increment=None, by=LABEL), 1)
    (found,) = read_under_way(store)
    document = found.to_json(datetime.fromisoformat(SIGN.seen_at))
    assert (document["kind"], document["snapshot"], document["increment"]) == ("check", None, None)
    assert (document["who"], document["process"], document["state"]) == ("ops@db7", 4711, "running")
    assert document["nodes"] == [
        {"node": "a", "phase": "copy", "done": 1, "total": 3, "unit": "tasks", "rate": 0.5, "seconds_left": 4.0}
    ]
    record_without_intent(store, Command("check", "", SIGN.operation), SIGN.began_at, LABEL, Ending("done"))
    assert read_under_way(store) == []


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("create", "the next create, delete, prune or gc settles it; at once: snapshot --fleet f.toml cancel {}"),
        ("delete", "to resume it: snapshot --fleet f.toml delete daily"),
        ("check", "it has left nothing; to forget it: snapshot --fleet f.toml cancel {}"),
    ],
)
def test_json_says_what_settles_a_dead_operation_as_the_table_does(kind: str, remedy: str) -> None:
    store = memory()
    if kind == "check":
        store_sign(store, structs.replace(SIGN, kind=kind, began_at=Time.of(NOW), seen_at=Time.of(NOW)), 1)
    else:
        begun(store, kind)
    found, late = read_under_way(store), NOW + timedelta(hours=1)
    documents = [document_of(StatusReport(found, [], now), "f.toml")["operations"] for now in (NOW, late)]
    assert [one["remedy"] for (one,) in documents] == [None, remedy.format(found[0].id)]
    *_, line = lines_of(StatusReport(found, [], late), "f.toml")
    assert line == f"operation {found[0].id} shows no sign of life; {remedy.format(found[0].id)}"


def test_watching_goes_on_while_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    drawn: list[Any] = []
    slept: list[float] = []
    ensure_identity(store, FLEET)
    begun(store, now=datetime.now(UTC))
    original = InMemoryStore.inventory

    def inventory(of: InMemoryStore, prefix: str) -> Inventory:
        if len(slept) == 1:
            raise StoreUnreachableError(url=store.url, reason="no answer")
        return original(of, prefix)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(InMemoryStore, "inventory", inventory)
    monkeypatch.setattr("cli.commands.status.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch_status(lambda: lines_of(read_status(fleet_of(store), nodes=False)), drawn.append)
    (table,), (kept, why), (again,) = drawn
    assert kept is table
    assert f"store {store.url}: no answer" in why
    assert isinstance(again, FittingTable)


def test_documents_that_cannot_be_read_are_named() -> None:
    store = memory()
    first, second = begun(store, ago=2.0), begun(store, ago=1.0)
    store.create(operation_key(first.id, "sign-1"), b"{}")
    store.create(operation_key(second.id, "cancel-1"), b"{}")
    sign(store, second, ago=1.0)
    found = read_under_way(store)
    assert [one.id for one in found] == [first.id, second.id]
    names = ("sign-1.json", "cancel-1.json")
    assert [name in "".join(one.problems) for one, name in zip(found, names, strict=True)] == [True] * 2
    # The other documents count.
    assert [one.sign is not None for one in found] == [False, True]
    assert [one.is_known for one in found] == [True, True]


def test_folders_that_are_no_operations_are_left_out() -> None:
    store = memory()
    store.create("operations/zz/sign-1.json", b"{}")
    store.create("operations/20261120T000000Z-000000000a/sign-01.json", b"{}")
    store.create("operations/20261120T000000Z-000000000b/sign-1.json", b"{}")
    (found,) = read_under_way(store)
    assert (found.id, found.is_known, found.state(NOW)) == ("20261120T000000Z-000000000b", False, ActivityState.DEAD)


def test_a_sign_from_the_future_is_none() -> None:
    store = memory()
    intent = begun(store, ago=9 * DEAD_SECONDS)
    sign(store, intent, ago=-DEAD_SECONDS - 1)
    (found,) = read_under_way(store)
    assert found.state(NOW) is ActivityState.DEAD


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a store of this process."""

    store: InMemoryStore

    def open(self) -> InMemoryStore:
        return self.store


def fleet_of(store: InMemoryStore) -> Any:
    """A fleet whose nodes nobody can reach."""
    return replace(FLEET, store=cast("Any", Place(store)))


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

    monkeypatch.setattr("snapshots.activity.cancelling.time.sleep", sleep)
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

    monkeypatch.setattr("snapshots.activity.cancelling.time.sleep", end)
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
    assert "snapshot restore daily --resume" in found.text


def test_a_dead_check_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshots.activity.cancelling.ANSWER_SECONDS_MAX", 0.0)
    store = memory()
    store_sign(store, structs.replace(SIGN, kind="check", by=LABEL), 1)
    assert cancel(store) == {SIGN.operation: CancelResult.SETTLED}
    assert read_under_way(store) == []
    assert store.list_children(f"operations/{SIGN.operation}") == ["cancel-1.json", "outcome.json"]
    (ended,) = read_history(store, 9)
    assert (ended.kind, ended.label, ended.code) == ("check", LABEL, None)


def test_in_80_columns_each_node_stays_one_line_and_nothing_is_lost() -> None:
    store = memory()
    intent = begun(store, ago=200.0)
    nodes = tuple(
        NodeSign(node=f"s{number}-b1", done=182 << 20, total=183 << 20, unit="bytes", rate=0.1, seconds_left=15.6)
        for number in (1, 2)
    )
    about = structs.replace(
        SIGN, operation=intent.id, kind="create", snapshot="daily", seen_at=Time.of(NOW), phase="copy"
    )
    store_sign(
        store,
        structs.replace(about, done=1 << 29, total=1 << 30, unit="bytes", nodes=nodes, seconds_left=6.3, is_rough=True),
        1,
    )
    (table,) = lines_of(StatusReport(read_under_way(store), [], NOW))
    assert isinstance(table, FittingTable)
    header, first, *lines = table.lines(80)
    # 27 + 29 + 13 and the gaps leave room for the phase, as 5 and a gap do, but not for the state.
    assert header.split() == ["operation", "phase", "done", "left"]
    assert first.split()[:1] == [intent.id]
    assert "512.0 MiB of 1.0 GiB (50 %)" in first
    below, (one, other) = lines[:-2], lines[-2:]
    assert " ".join(" ".join(below).split()).startswith("what create daily, increment 3, state running, ")
    # 182 of 183 are 99 %.
    assert " ".join(one.split()) == "node s1-b1 182.0 MiB of 183.0 MiB (99 %) 15.6 s"
    assert other.replace("s2", "s1") == one
    assert all(len(line) <= 80 for line in (header, first, *lines))


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

    monkeypatch.setattr("snapshots.activity.cancelling.time.sleep", stop)
    (found,) = cancel_operations(fleet_of(store), [asked], 30.0, Silent())
    expected = (
        ["to resume it: snapshot delete daily", "to resume it: snapshot delete weekly"] if is_left else ["cleaned"]
    )
    assert all(one in found.text for one in expected)
    assert found.result is (CancelResult.UNFINISHED if is_left else CancelResult.CANCELLED)


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
    newest = read_history(store, 1)[0].to_json()
    assert {name: newest[name] for name in ("kind", "snapshot", "state", "reason", "code", "who", "volumes")} == {
        "kind": "check", "snapshot": "weekly", "state": "done", "reason": "conflicts", "code": 1, "who": "ops@db7",
        "volumes": {"rows": 7},
    }  # fmt: skip


def test_an_unreadable_outcome_is_named_in_history() -> None:
    store = memory()
    intent = begun(store, ago=3.0)
    store.create(operation_key(intent.id, "outcome"), b"{" + b" " * 200 + b"}")
    (found,) = read_history(store, 9)
    assert found.outcome is None
    assert "outcome.json" in found.problem
    assert isinstance(read_under_way(store), list)


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
    with pytest.raises(StoreOfAnotherFleetError):
        cancel_operations(fleet_of(store), found, 0.0, Silent())
    assert read_cancel_request(store, one.id, 1) is None
