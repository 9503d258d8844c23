"""Outcomes of checks in a store, as if checks had ended there."""

from __future__ import annotations

from datetime import UTC, datetime

from cutline.fleet.record import Time
from cutline.snapshots.records.operation_records import (
    PLACES,
    CheckedPoint,
    CheckResult,
    Outcome,
    ReadIncrement,
    ReadPart,
    ReadTimes,
    operation_key,
    outcome_name,
    write_operation_record,
)
from cutline.storage.ids import new_operation_id
from cutline.storage.store import ObjectStore


def point(snapshot: str, increment: int, result: CheckResult = "valid", *, full: bool = True) -> CheckedPoint:
    return CheckedPoint(snapshot, increment, result, full)


def read_times(oldest_at: str) -> ReadTimes:
    """The record of a check according to which everything has been read since then."""
    at = Time(oldest_at)
    return ReadTimes(
        commits="0" * 64, last_operation="op-1", store="0" * 64, version="0.1.0", rules=1, compared_by="",
        compared_at=at, oldest_at=at, parts=(ReadPart(PLACES, at),), increments=(ReadIncrement(1, at),),
    )  # fmt: skip


def ended(store: ObjectStore, minute: int, *points: CheckedPoint, kind: str = "check") -> str:
    """Store the outcome of a check that ended so many minutes after ten; return its id."""
    operation = f"20261124T10{minute:02}00Z-{minute:010x}"
    return _store(store, operation, datetime(2026, 11, 24, 10, minute, 30, tzinfo=UTC), points, kind)


def ended_at(store: ObjectStore, moment: datetime, *points: CheckedPoint) -> str:
    """Store the outcome of a check that ended then; return its id."""
    return _store(store, new_operation_id(moment), moment, points, "check")


def outcome_key(operation: str, *points: CheckedPoint) -> str:
    """The key of the outcome of a check with these findings."""
    return operation_key(operation, outcome_name(points))


def ended_after(store: ObjectStore, began: datetime, moment: datetime, *points: CheckedPoint) -> str:
    """Store the outcome of a check that began and ended then; return its id."""
    return _store(store, new_operation_id(began), moment, points, "check")


def _store(store: ObjectStore, operation: str, moment: datetime, points: tuple[CheckedPoint, ...], kind: str) -> str:
    at = Time.of(moment)
    outcome = Outcome(operation=operation, kind=kind, snapshot="", state="done", reason="", ended_at=at)
    if points:
        outcome = Outcome(
            operation=operation, kind=kind, snapshot="", state="done", reason="", ended_at=at, checked=points
        )
    write_operation_record(store, outcome_name(points), outcome)
    return operation
