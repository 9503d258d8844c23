"""What `status` reads of operations that are under way, and what becomes of those that are to be cancelled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from cutline.cli.commands.status import StatusReport, document_of, lines_of, read_status, watch_status
from cutline.cli.commands.wait import OperationFailedError, await_end, code_of
from cutline.cli.output.tables import FittingTable
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.operation import PUBLISH, decide_restore, record_outcome
from cutline.snapshots.operations.signs import DEAD_SECONDS, store_sign
from cutline.snapshots.operations.under_way import ActivityState, read_one, read_under_way
from cutline.snapshots.records.operation_records import Failure, NodeSign, operation_key, write_operation_record
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.ids import new_operation_id
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import Inventory, StoreUnreachableError
from tests.run.own_sleep import replace_sleep
from tests.unit.document_kinds import FLEET, SIGN
from tests.unit.made_commits import memory
from tests.unit.made_operations import LABEL, NOW, begun, fleet_of, sign


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
        (
            "create",
            "the next create, delete, prune or gc settles it; to settle it now: snapshot --fleet f.toml cancel {}",
        ),
        ("delete", "to resume it: snapshot --fleet f.toml delete daily"),
        ("check", "it left nothing behind; to forget it: snapshot --fleet f.toml cancel {}"),
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


def test_a_create_that_has_failed_and_left_something_is_dead_at_once() -> None:
    store = memory()
    intent = begun(store)
    sign(store, intent, ago=1.0)
    write_operation_record(store, "failure", Failure(intent.id, "node-unreachable", 6, Time.of(NOW)))
    (found,) = read_under_way(store)
    assert found.state(NOW) is ActivityState.DEAD
    assert found.to_json(NOW)["failure"] == "node-unreachable"
    (line,) = [one for one in lines_of(StatusReport([found], [], NOW)) if isinstance(one, str)]
    assert line.startswith(
        f"operation {intent.id} has failed (node-unreachable) and left something behind on a node; the next create"
    )
    ensure_identity(store, FLEET)
    with pytest.raises(OperationFailedError) as error:
        await_end(fleet_of(store), intent.id, None, Silent())
    assert error.value.exit_code == 6
    assert "has failed (node-unreachable)" in error.value.message
    # Also once somebody has removed what it had left.
    record_outcome(store, intent, "failed", "node-unreachable, settled later")
    assert code_of(await_end(fleet_of(store), intent.id, None, Silent()), store) == 6


def test_watching_goes_on_while_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    drawn: list[Any] = []
    slept: list[float] = []
    ensure_identity(store, FLEET)
    begun(store, now=datetime.now(UTC))
    original = InMemoryStore.inventory

    def inventory(of: InMemoryStore, prefix: str, after: str = "") -> Inventory:
        if len(slept) == 1:
            raise StoreUnreachableError(url=store.url, reason="no answer")
        return original(of, prefix, after)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(InMemoryStore, "inventory", inventory)
    replace_sleep(monkeypatch, sleep)
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
