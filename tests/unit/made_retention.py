"""Snapshots as retention sees them, and what it makes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cutline.fleet.config import Retention
from cutline.fleet.record import Time
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.operation_records import CheckedPoint, CheckResult
from cutline.snapshots.removal.retention import (
    HeldSnapshot,
    apply_retention,
)

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def days(count: float) -> float:
    """A number of days in seconds."""
    return count * 86400


def snapshot(
    name: str,
    *ages: float,
    is_whole: bool = True,
    found: CheckResult | None = None,
    goes_on: bool = False,
    pins: dict[int, str] | None = None,
) -> HeldSnapshot:
    """A snapshot whose restore points are so many days old, the full snapshot first; `found`: what its check found."""
    points = tuple(NOW - age * DAY for age in ages)
    return HeldSnapshot(name, points, is_whole, checked=check(name, found), is_continuable=goes_on, pins=pins or {})


def check(name: str, found: CheckResult | None) -> EndedCheck | None:
    """A check that ended at three o'clock in the morning of the day before."""
    at = Time("2026-11-19T04:00:00.000+01:00")
    return EndedCheck("op", at, CheckedPoint(name, 0, found, full=True)) if found else None


def whys(*found: HeldSnapshot, **rules: Any) -> dict[str, tuple[str, ...]]:
    return {one.name: one.why for one in apply_retention(found, Retention(**rules), NOW)}


def fates(*found: HeldSnapshot, takes_last: bool = False, **rules: Any) -> dict[str, str]:
    return {one.name: one.fate.value for one in apply_retention(found, Retention(**rules), NOW, takes_last=takes_last)}


def wanted(*found: HeldSnapshot, **rules: Any) -> dict[str, tuple[int, ...]]:
    """The increments that rules or pins keep for their own sake, by snapshot; even the last may be deleted."""
    verdicts = apply_retention(found, Retention(**rules), NOW, takes_last=True)
    return {one.name: one.wanted for one in verdicts}


def restore_point(name: str, age: float) -> HeldSnapshot:
    return HeldSnapshot(name, (NOW - age * DAY,), is_only_cut=True)
