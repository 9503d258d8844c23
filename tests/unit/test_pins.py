"""Pins keep restore points from being removed, also if a removal begins at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.cli.commands.delete import plan_lines
from cutline.cli.output.arguments import CommandContext, parse_end, parse_point
from cutline.fleet.config import Retention
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.operations.leases import lease_expiry
from cutline.snapshots.operations.operation import begin, new_operation
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.pins import PinState, pin_key, pins_in_force, put_pin, read_pins, release_key
from cutline.snapshots.records.proven_chains import SnapshotMissingError, snapshot_names
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_only_full, only_full_key, put_mark
from cutline.snapshots.removal.deletion import DeletionPlan, plan_deletion
from cutline.snapshots.removal.pinning import (
    BeingRemovedError,
    NotReleasedError,
    PinnedError,
    pin_in_store,
    release_in_store,
)
from cutline.snapshots.removal.pruning import plan_prune
from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from tests.commands.in_process import run_here
from tests.unit.document_kinds import PIN
from tests.unit.made_chains import FLEET, InMemoryNodes
from tests.unit.made_commits import mark, memory
from tests.unit.made_deletions import delete, prune, store_two_chains
from tests.unit.made_operations import fleet_of

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def new_store() -> tuple[InMemoryStore, InMemoryNodes]:
    """The chain `old` of two increments, and the newer `new` of one."""
    store = memory()
    return store, store_two_chains(store)


def increments_in_force(store: ObjectStore, name: str) -> list[int | None]:
    return [pin.increment for pin in pins_in_force(store, name, NOW)]


def test_a_pin_keeps_the_chain_until_it_is_released() -> None:
    store, nodes = new_store()
    change = pin_in_store(store, "old", 1, None, "audit")
    assert increments_in_force(store, "old") == [1]
    assert prune(store, nodes, last=1, force=True).removed == ()
    verdict = plan_prune(store, FLEET, Retention(last=1), force=False).verdicts[1]
    assert (verdict.name, verdict.fate.value, verdict.wanted) == ("old", "keep", (1,))
    assert verdict.why[0].startswith("pinned: by ")
    assert verdict.why[0].endswith(": audit")
    with pytest.raises(PinnedError, match=r"increment 1 of old is pinned by .*: audit") as error:
        delete(store, nodes)
    assert "snapshot keep old@1 --release" in str(error.value.hint)
    assert any("warning: increment 1 of old is pinned" in line for line in plan_lines(deletion_plan(store)))

    release_in_store(store, "old", 1)
    assert [pin.state(NOW) for pin in read_pins(store, "old")] == [PinState.RELEASED]
    # What was stored stays as it was.
    assert {pin_key("old", change.changed[0].id), release_key("old", change.changed[0].id)} <= set(store.list(""))
    assert [one.mark.snapshot for one in prune(store, nodes, last=1).removed] == ["old"]
    # Pins go with their snapshot.
    assert list(store.list("snapshots/old")) == []


def deletion_plan(store: ObjectStore) -> DeletionPlan:
    return plan_deletion(store, FLEET, "old", force=True)


def test_a_pinned_full_snapshot_may_lose_its_increments_and_force_deletes_it() -> None:
    store, nodes = new_store()
    pin_in_store(store, "old", 0)
    (removed,) = prune(store, nodes, last=1).removed
    assert removed.mark.key == only_full_key("old")
    assert delete(store, nodes, force=True).removed is not None
    assert snapshot_names(store) == ["new"]


def test_without_a_number_the_newest_restore_point_is_pinned() -> None:
    store, _ = new_store()
    pin_in_store(store, "old", None)
    assert increments_in_force(store, "old") == [2]
    with pytest.raises(SnapshotMissingError):
        pin_in_store(store, "old", 3)
    with pytest.raises(SnapshotMissingError):
        pin_in_store(store, "none", None)


def test_a_pin_expires_at_its_time() -> None:
    store, _ = new_store()
    pin_in_store(store, "old", 0, NOW + timedelta(days=1))
    (pin,) = read_pins(store, "old")
    assert [pin.state(NOW + timedelta(hours=hours)) for hours in (0, 23, 24)] == [
        PinState.IN_FORCE,
        PinState.IN_FORCE,
        PinState.EXPIRED,
    ]
    assert "until 2026-11-21 12:00 UTC" in pin.text


def test_a_pin_that_can_not_be_read_keeps_everything_and_such_a_release_releases_nothing() -> None:
    store, nodes = new_store()
    store.create(pin_key("old", PIN.pin), b"{")
    (pin,) = pins_in_force(store, "old", NOW)
    assert (pin.increment, pin.until) == (None, None)
    assert prune(store, nodes, last=1).removed == ()
    with pytest.raises(PinnedError, match="can't be read"):
        delete(store, nodes)
    put_pin(store, structs.replace(PIN, snapshot="new"))
    store.create(release_key("new", PIN.pin), b"{")
    assert increments_in_force(store, "new") == [1]
    # A copy of another snapshot's pin is not a pin of this one.
    store.create(pin_key("new", f"{PIN.pin[:-1]}a"), store.read(pin_key("new", PIN.pin)))
    assert increments_in_force(store, "new") in ([1, None], [None, 1])
    # All are released, whatever they are, unless something is in the place of the release.
    release_in_store(store, "old", None)
    assert increments_in_force(store, "old") == []
    with pytest.raises(NotReleasedError, match="is in its place"):
        release_in_store(store, "new", None)


@pytest.mark.parametrize("increment", [0, 1])
def test_what_is_being_removed_is_not_pinned(increment: int) -> None:
    store, _ = new_store()
    begin(store, new_operation("prune" if increment else "delete", "old", 0, ()))
    with pytest.raises(BeingRemovedError) as error:
        pin_in_store(store, "old", increment)
    assert error.value.exit_code == 7
    assert increments_in_force(store, "old") == []
    # A prune leaves the full snapshot.
    if increment:
        pin_in_store(store, "old", 0)


def test_what_is_being_given_up_is_not_pinned_until_its_operation_is_settled() -> None:
    """A prune with an increment gives up what lies before; its lease protects it, because it holds no lock."""
    store, _ = new_store()
    intent = structs.replace(new_operation("prune", "old", 2, ()), expires_at=lease_expiry())
    begin(store, intent)
    for increment in (0, 1):
        with pytest.raises(BeingRemovedError):
            pin_in_store(store, "old", increment)
    pin_in_store(store, "old", 2)
    settle_operations(store, FLEET, Silent())
    assert read_outcome(store, intent.id) is None

    late = structs.replace(new_operation("prune", "old", 2, ()), expires_at=Time.of(NOW - timedelta(days=400)))
    begin(store, late)
    settle_operations(store, FLEET, Silent())
    outcome = read_outcome(store, late.id)
    assert outcome is not None
    assert outcome.state == "failed"
    assert read_outcome(store, intent.id) is None


def test_what_has_been_removed_is_not_pinned() -> None:
    store, nodes = new_store()
    put_mark(store, structs.replace(mark("old", only_full=True), snapshot="old"))
    assert is_only_full(store, "old")
    with pytest.raises(SnapshotMissingError):
        pin_in_store(store, "old", 1)
    delete(store, nodes, force=True)
    with pytest.raises(SnapshotDeletedError):
        pin_in_store(store, "old", 0)


@dataclass(slots=True)
class MeetingStore:
    """A store in which `meet` is called before each call, with the number of the call."""

    store: InMemoryStore
    meet: Callable[[int], None]
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if not callable(method):
            return method

        def call(*arguments: Any) -> Any:
            self.calls += 1
            self.meet(self.calls)
            return method(*arguments)

        return call


def pin_at_call(removal: str, number: int) -> tuple[InMemoryStore, bool | None]:
    """Pin increment 1 of `old` before a call of its removal; also return whether it was pinned, None without the call.

    A removal that was refused because of the pin has not removed anything.
    """
    store, nodes = new_store()
    before = set(store.list("snapshots/old"))
    pinned: list[bool] = []

    def meet(call: int) -> None:
        if call == number:
            try:
                pin_in_store(store, "old", 1)
                pinned.append(True)
            except SnapshotError:
                pinned.append(False)

    meeting: Any = MeetingStore(store, meet)
    try:
        if removal == "delete":
            delete(meeting, nodes)
        else:
            prune(meeting, nodes, last=1, only_full="all")
    except PinnedError:
        assert before <= set(store.list("snapshots/old"))
    return store, pinned[0] if pinned else None


@pytest.mark.parametrize("removal", ["delete", "prune"])
def test_a_pin_at_any_moment_of_a_removal_is_refused_or_keeps_what_it_pins(removal: str) -> None:
    """The pin is stored in full before each call of the removal in turn."""
    found: list[bool] = []
    for number in count(1):
        store, is_pinned = pin_at_call(removal, number)
        if is_pinned is None:
            break
        found.append(is_pinned)
        is_left = "old" in snapshot_names(store) and not is_only_full(store, "old")
        assert is_left or not is_pinned, f"call {number}"
        assert increments_in_force(store, "old") == [1] * is_pinned
    # Before the removal is recorded, the pin is stored; after that it is refused.
    assert found == sorted(found, reverse=True)
    assert {*found} == {True, False}


def test_the_increment_is_given_after_the_name_or_as_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory()
    fleet = fleet_of(store)
    ensure_identity(store, fleet)
    store_two_chains(store)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: fleet)
    for words in (["old@1"], ["old", "--increment", "1"]):
        code, document = run_here(fleet, "keep", *words)
        assert (code, [pin["increment"] for pin in document["changed"]]) == (0, [1])
    assert increments_in_force(store, "old") == [1, 1]
    assert run_here(fleet, "keep", "old", "--increment", "1", "--release")[1]["pins"] == []
    code, document = run_here(fleet, "keep", "old@1", "--increment", "1")
    assert (code, document["error"]) == (2, "usage")


def test_names_with_numbers_and_ends_of_periods_are_read() -> None:
    assert parse_point("daily") == ("daily", None)
    assert parse_point("daily@12") == ("daily", 12)
    for text in ("daily@", "daily@x", "daily@-1", "daily@1@2", "daily@²"):
        with pytest.raises(UsageError, match="not the number of an increment"):
            parse_point(text)
    assert parse_end("--until", "2026-12-31") == datetime(2027, 1, 1, tzinfo=UTC)
    assert parse_end("--until", "2026-12-31T10:00+01:00") == datetime(2026, 12, 31, 9, tzinfo=UTC)
    for text in ("9999-12-31", "2026-13-01", "tomorrow", "2026-12-31T10:00"):
        with pytest.raises(UsageError):
            parse_end("--until", text)


def test_the_quota_deletes_nothing() -> None:
    store, _ = new_store()
    size = sum(len(store.read(key)) for key in store.list("snapshots"))
    new_size = sum(len(store.read(key)) for key in store.list("snapshots/new"))
    for quota, excess in ((size, 0), (size - 1, 1), (1, size - 1)):
        plan = plan_prune(store, FLEET, Retention(last=2, quota_bytes=quota), force=False)
        assert (plan.steps, plan.left_bytes, plan.excess_bytes) == ((), size, excess)
    # What the rules remove no longer counts.
    plan = plan_prune(store, FLEET, Retention(last=1, quota_bytes=1), force=False)
    assert (len(plan.steps), plan.left_bytes, plan.excess_bytes) == (1, new_size, new_size - 1)
    assert replace(plan, rules=Retention()).quota_problem == ""
