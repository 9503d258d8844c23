"""Figures of ended operations: the time of phases by kind, and what checks found."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import pytest
from msgspec import UNSET, structs

import cutline.snapshots.listing.figures as operation_figures
from cutline.check.report import EXAMPLES_MAX, Compared, Conflict, Skipped, SnapshotReport
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Silent, StepTimes
from cutline.fleet.record import Time
from cutline.snapshots.listing.figures import PhaseFigures, read_figures, read_figures_of, read_operation_figures
from cutline.snapshots.listing.listing import show_snapshot
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.operation import (
    Operation,
    OutcomeDetails,
    begin,
    new_operation,
    record_operation,
)
from cutline.snapshots.records.operation_records import CheckedPoint, Outcome, read_outcome, write_operation_record
from cutline.storage.ids import new_operation_id
from cutline.storage.store import ObjectStore
from tests.unit.made_chains import FLEET
from tests.unit.made_commits import memory
from tests.unit.made_figures import BEGIN
from tests.unit.made_fleets import new_fleet, store_chain

LABEL = own_label("check", "")


def create(
    store: ObjectStore,
    increment: int,
    phases: dict[str, float] | None,
    *,
    state: Literal["done", "failed"] = "done",
    only_cut: bool = False,
) -> None:
    intent = structs.replace(new_operation("create", "daily", increment, ("a",)), only_cut=only_cut or UNSET)
    begin(store, intent)
    outcome = Outcome(
        operation=intent.id,
        kind="create",
        snapshot="daily",
        state=state,
        reason="",
        ended_at=intent.began_at,
        phases=phases if phases else UNSET,
    )
    write_operation_record(store, "outcome", outcome)


def found(snapshot: str = "daily", increment: int = 3) -> CheckedPoint:
    return CheckedPoint(snapshot, increment, "valid", full=True)


def check(store: ObjectStore, minutes: int, *checks: CheckedPoint, phases: dict[str, float] | None = None) -> None:
    began = BEGIN + timedelta(minutes=minutes)
    command = Command("check", "", new_operation_id(began))
    ending = Ending("done", "valid", 0, {}, checks, phases or {})
    record_without_intent(store, command, Time.of(began), LABEL, ending)


def test_phases_are_averaged_by_kind() -> None:
    store = memory()
    create(store, 0, {"copy": 10.0, "cut": 1.0})
    create(store, 1, {"cut": 2.0, "commit": 0.5})
    create(store, 2, {"cut": 4.0})
    create(store, 3, {"cut": 100.0}, state="failed")
    create(store, 3, None)
    figures = read_operation_figures(store)
    assert set(figures.phases) == {
        PhaseFigures("full", "copy", 1, 10.0, 10.0),
        PhaseFigures("full", "cut", 1, 1.0, 1.0),
        PhaseFigures("increment", "cut", 2, 3.0, 4.0),
        PhaseFigures("increment", "commit", 1, 0.5, 0.5),
    }
    assert (figures.read, figures.untimed, figures.are_all) == (5, 1, True)
    assert read_operation_figures(store, "other").phases == ()


def test_cuts_without_rows_and_drills_are_kinds_of_their_own() -> None:
    store = memory()
    create(store, 0, {"copy": 10.0, "cut": 3.0})
    create(store, 0, {"cut": 1.0}, only_cut=True)
    for command, seconds in (("restore", 5.0), ("drill", 7.0)):
        intent = structs.replace(new_operation("restore", "daily", 0, ("a",)), by=own_label(command, ""))
        begin(store, intent)
        outcome = Outcome(
            operation=intent.id,
            kind="restore",
            snapshot="daily",
            state="done",
            reason="",
            ended_at=intent.began_at,
            phases={"load rows": seconds},
        )
        write_operation_record(store, "outcome", outcome)
    assert {(one.kind, one.phase): one.mean_seconds for one in read_operation_figures(store).phases} == {
        ("full", "copy"): 10.0, ("full", "cut"): 3.0, ("only-cut", "cut"): 1.0,
        ("restore", "load rows"): 5.0, ("drill", "load rows"): 7.0,
    }  # fmt: skip


def test_the_steps_of_a_check_that_are_named_for_snapshots_are_one_phase() -> None:
    store = memory()
    phases = {"check executors": 1.0, "check daily": 2.0, "fold changes": 3.0, "check weekly": 4.0}
    check(store, 1, found(), found("weekly"), phases=phases)
    assert {one.phase: one.mean_seconds for one in read_operation_figures(store).phases} == {
        "check executors": 1.0, "check commits": 6.0, "fold changes": 3.0,
    }  # fmt: skip


def test_checks_are_the_newest_first_and_of_the_snapshot() -> None:
    store = memory()
    check(store, 1, found(increment=1))
    check(store, 2, found(increment=2), found("weekly"))
    runs = read_operation_figures(store, "daily").checks
    assert [one.point.increment for one in runs] == [2, 1]
    assert [one.point.snapshot for one in read_operation_figures(store).checks] == ["daily", "weekly", "daily"]


def test_only_the_newest_operations_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_figures, "OPERATIONS_MAX", 2)
    store = memory()
    for number in range(1, 4):
        check(store, number, found(increment=number))
    figures = read_operation_figures(store)
    assert ([one.point.increment for one in figures.checks], figures.read, figures.are_all) == ([3, 2], 2, False)


def test_a_report_finds_a_check_and_a_restore_behind_any_number_of_increments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_figures, "OPERATIONS_MAX", 4)
    monkeypatch.setattr(operation_figures, "INCREMENTS_MAX", 2)
    fleet = new_fleet(FLEET)
    store = fleet.store.open()
    check(store, 1, found("weekly", 0))
    intent = structs.replace(new_operation("restore", "weekly", 0, ("a",)), operation=new_operation_id(BEGIN))
    begin(store, intent)
    write_operation_record(
        store, "outcome",
        Outcome(
            operation=intent.id, kind="restore", snapshot="weekly", state="done", reason="",
            ended_at=intent.began_at, phases={"load rows": 5.0},
        ),
    )  # fmt: skip
    store_chain(fleet, "weekly", "2026-11-20T00:00:00Z")
    # What made chains record sorts after all other operations.
    store_chain(fleet, "daily", *(f"2026-11-21T{hour:02d}:00:00Z" for hour in range(10)))
    details = show_snapshot(fleet, "weekly")
    for figures in (
        read_figures(fleet, None, BEGIN), read_figures(fleet, "weekly", BEGIN), read_figures_of(fleet, details, BEGIN),
    ):  # fmt: skip
        (run,) = figures.operations.checks
        assert (run.point.snapshot, run.point.increment) == ("weekly", 0)
        assert [(one.kind, one.phase) for one in figures.operations.phases] == [("restore", "load rows")]
    # Two full snapshots, the check, the restore, and the newest two of nine increments; then without the increments.
    both, one = (read_figures(fleet, name, BEGIN).operations for name in (None, "weekly"))
    assert ((both.read, both.are_all), (one.read, one.are_all)) == ((6, False), (4, True))


def test_an_outcome_records_the_phases_of_its_operation_whether_it_is_done_or_fails() -> None:
    store = memory()
    for fails in (False, True):
        intent = new_operation("create", "daily", 0, ("a",))
        times = StepTimes(Silent())
        operation = Operation(intent, details=OutcomeDetails(times=times))
        try:
            with record_operation(store, operation, lambda: True, times):
                times.step("copy")
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        outcome = read_outcome(store, intent.id)
        assert outcome is not None
        assert outcome.state == ("failed" if fails else "done")
        assert isinstance(outcome.phases, dict)
        assert outcome.phases.keys() == {"copy"}


def test_a_check_records_how_much_it_compared_and_the_first_of_what_it_skipped() -> None:
    many = EXAMPLES_MAX + 5
    report = SnapshotReport("daily", 3, Compared(objects=2, rows=9))
    report.skipped = [Skipped(f"table {number}", "why" * 1000) for number in range(many)]
    report.conflicts = [Conflict("kind", "detail")] * 4
    figures = report.figures
    assert (figures.compared["objects"], figures.compared["rows"], figures.compared["bytes"]) == (2, 9, 0)
    assert (figures.conflicts, figures.skipped, len(figures.examples)) == (4, many, EXAMPLES_MAX)
    assert figures.examples[0].what == "table 0"
    assert len(figures.examples[0].why) < 400
