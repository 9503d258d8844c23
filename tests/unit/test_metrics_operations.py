"""What the metrics say of operations: how those that have ended ended, and how many are open."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import UNSET, structs
from msgspec.structs import replace

from cutline.fleet.record import Time
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics_gathering import read_facts, samples_of_store
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.ended_operations import EndedReader
from cutline.snapshots.operations.operation import OutcomeDetails, begin, new_operation, record_outcome
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.records.operation_records import Intent, RestoreFigures, StepFigures
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from tests.unit.document_kinds import SIGN
from tests.unit.made_fleets import new_fleet
from tests.unit.metric_values import of, read

NOW = datetime.now(UTC)


def ended(
    store: ObjectStore, kind: str, code: int, *, ago: float, took: float = 60.0, details: OutcomeDetails | None = None
) -> Intent:
    """An operation with an intent that ended so many seconds ago."""
    began = NOW - timedelta(seconds=ago + took)
    intent = structs.replace(
        new_operation(kind, "daily", 3, ("a",)), operation=f"{began:%Y%m%dT%H%M%SZ}-{code:010d}",
        began_at=Time.of(began),
    )  # fmt: skip
    begin(store, intent)
    with pytest.MonkeyPatch.context() as patch:
        at = Time.of(NOW - timedelta(seconds=ago))
        patch.setattr("cutline.snapshots.operations.operation.current_time", lambda: at)
        found = replace(details or OutcomeDetails(), code=code)
        record_outcome(store, intent, "failed" if code else "done", "why", found)
    return intent


def checked(store: ObjectStore, code: int, *, ago: float, number: int = 0) -> None:
    """A check that ended so many seconds ago, and took a minute."""
    began, at = NOW - timedelta(seconds=ago + 60), Time.of(NOW - timedelta(seconds=ago))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutline.snapshots.operations.activity.current_time", lambda: at)
        command = Command("check", "", f"{began:%Y%m%dT%H%M%SZ}-{number:010d}")
        ending = Ending("done", "valid", code, {"objects": 7, "rows": 40})
        record_without_intent(store, command, Time.of(began), "cutline check ops@db7:1", ending)


def test_operations_are_counted_by_kind_and_exit_code() -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    ended(store, "create", 9, ago=100)
    ended(store, "create", 6, ago=50)
    ended(store, "create", 6, ago=25 * 3600)
    ended(store, "restore", 0, ago=40, took=20.0, details=OutcomeDetails(volumes={"rows": 5, "bytes": 9}))
    checked(store, 0, ago=3000, number=1)
    checked(store, 1, ago=300, number=2)
    found = read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW))
    # By code and kind.
    assert of(metrics.ENDED, found) == {"9/increment": 1, "6/increment": 1, "0/restore": 1, "0/check": 1, "1/check": 1}
    assert of(metrics.LAST_CODE, found) == {"increment": 6, "restore": 0, "check": 1}
    assert of(metrics.SUCCESS, found) == pytest.approx(
        {"restore": NOW.timestamp() - 40, "check": NOW.timestamp() - 3000}, abs=0.01
    )
    assert of(metrics.SUCCESS_SECONDS, found) == pytest.approx({"restore": 20, "check": 60}, abs=0.01)
    assert of(metrics.SUCCESS_ROWS, found) == {"restore": 5, "check": 40}
    assert of(metrics.SUCCESS_BYTES, found) == {"restore": 9}
    assert of(metrics.SUCCESS_OBJECTS, found) == {"check": 7}
    assert of(metrics.HISTORY_WINDOW, found) == {"": 24 * 3600}
    assert metrics.NEWEST_CUT.name not in found


def test_a_store_says_what_kind_a_record_is_of_only_as_far_as_it_is_known() -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    for number, kind in enumerate(("made up", 'x"y', "gc")):
        ended(store, kind, number + 1, ago=10)
    found = read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW))
    assert of(metrics.ENDED, found) == {"1/other": 1, "2/other": 1, "3/gc": 1}


def test_many_checks_hide_no_restore_and_the_window_says_how_far_back_it_reaches() -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    ended(store, "restore", 0, ago=20 * 3600)
    for number in range(6):
        checked(store, 0, ago=(number + 1) * 600, number=number)
    facts = read_facts(fleet, EndedReader(3))
    found = read(samples_of_store(facts, NOW))
    assert set(of(metrics.SUCCESS, found)) == {"restore", "check"}
    # Three checks were read: the window begins where the oldest of them ended.
    assert [one.kind for one in facts.ended.found] == ["check"] * 3 + ["restore"]
    assert of(metrics.HISTORY_WINDOW, found) == pytest.approx({"": 1800}, abs=1)
    assert of(metrics.ENDED, found)["0/check"] in (2, 3)


def test_an_outcome_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    for ago in (500, 400):
        ended(store, "restore", 0, ago=ago)
    checked(store, 0, ago=300)
    reader = EndedReader(100)
    assert len(reader.read(store, ()).found) == 3
    read_keys: list[str] = []
    original = InMemoryStore.read

    def counted(self: InMemoryStore, key: str, *more: object) -> bytes:
        read_keys.append(key)
        return original(self, key, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(InMemoryStore, "read", counted)
    newest = ended(store, "restore", 0, ago=200)
    read_keys.clear()
    assert len(reader.read(store, ()).found) == 4
    assert {key.split("/")[1] for key in read_keys} == {newest.id}


def test_a_restore_says_how_long_its_wal_phase_took() -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    steps = {"fold changes": StepFigures(1.5, 700), "load rows": StepFigures(3.0, 9), "invented": StepFigures(1, 1)}
    figures = RestoreFigures(rows=9, bytes=8, seconds=4.5, steps=steps, nodes={}, transactions=0)
    ended(store, "restore", 0, ago=10, details=OutcomeDetails(figures=figures))
    found = read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW))
    assert of(metrics.RESTORE_STEP, found) == {"fold changes": 1.5, "load rows": 3.0}
    assert of(metrics.RESTORE_CHANGES, found) == {"": 700}


def test_open_operations_are_counted_by_kind_and_state() -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    for number, (ago, only_cut) in enumerate(((1.0, False), (3600.0, False), (1.0, True))):
        began = NOW - timedelta(seconds=3600 + number)
        intent = structs.replace(
            new_operation("create", "daily", 0, ("a",)), operation=f"{began:%Y%m%dT%H%M%SZ}-{number:010d}",
            began_at=Time.of(began), only_cut=only_cut or UNSET,
        )  # fmt: skip
        begin(store, intent)
        sign = structs.replace(SIGN, operation=intent.id, seen_at=Time.of(NOW - timedelta(seconds=ago)))
        store_sign(store, sign, 1)
    found = read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW))
    counts = of(metrics.OPEN_OPERATIONS, found)
    assert {name: count for name, count in counts.items() if count} == {
        "full/running": 1, "full/dead": 1, "only-cut/running": 1,
    }  # fmt: skip
    assert counts["gc/dead"] == 0
