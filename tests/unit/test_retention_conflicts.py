"""What retention makes of snapshots in which a check has found conflicts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cutline.fleet.config import Retention
from cutline.snapshots.removal.retention import (
    HeldSnapshot,
    list_kept_instead,
)
from tests.unit.made_retention import check, days, fates, snapshot, whys

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)


NEWEST = "it is the newest snapshot that can be restored"


def note(name: str) -> str:
    return (
        "it is not counted, because the check that ended at 2026-11-19 03:00 UTC found conflicts:"
        f" see snapshot check {name}"
    )


def test_a_snapshot_with_conflicts_takes_no_place_from_older_ones() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), snapshot("c", 7, found="conflicts"), snapshot("d", 6, found="valid"))
    assert fates(*found, last=2) == {"d": "keep", "c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, last=2) == {
        "d": ("last 2: it is the newest", NEWEST),
        "c": ("last 2: it is the 2nd newest", note("c")),
        "b": ("last 2: it is the 2nd newest without conflicts",),
        "a": ("no rule keeps it",),
    }
    # It is deleted as one without conflicts would be.
    assert fates(*found, last=1) == {"d": "keep", "c": "delete", "b": "delete", "a": "delete"}
    # Nobody asked what an inconclusive check or none would have found.
    unknown = (*found[:2], snapshot("c", 7, found="inconclusive"), found[3])
    assert fates(*unknown, last=2) == {"d": "keep", "c": "keep", "b": "delete", "a": "delete"}


def test_a_snapshot_with_conflicts_is_not_the_last_that_can_be_restored() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), snapshot("c", 2, found="conflicts"))
    assert fates(*found, within_seconds=days(3)) == {"c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, within_seconds=days(3))["b"] == ("it is the newest snapshot without conflicts",)
    assert fates(*found, within_seconds=days(1)) == {"c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, within_seconds=days(1))["c"] == ("it is the newest snapshot that can be restored", note("c"))
    assert fates(*found, within_seconds=days(1), takes_last=True) == {"c": "delete", "b": "delete", "a": "delete"}


def test_increments_are_numbered_without_snapshots_with_conflicts() -> None:
    found = (snapshot("a", 9, 8), snapshot("b", 7, 6), snapshot("c", 5, 4, found="conflicts"), snapshot("d", 3, 2))
    assert fates(*found, last=2, only_full=9) == {"d": "keep", "c": "keep", "b": "keep", "a": "only-full"}
    assert fates(*found, last=1, only_full=9) == {"d": "keep", "c": "only-full", "b": "only-full", "a": "only-full"}
    # The newest chain goes on; the newest without conflicts has the restore points that somebody would need.
    assert fates(*found[:3], only_full=9) == {"c": "keep", "b": "keep", "a": "only-full"}
    assert whys(*found[:3], only_full=9)["b"] == (
        "only_full 9: it is the newest without conflicts",
        "it is the newest snapshot without conflicts",
    )


def test_if_every_snapshot_has_conflicts_the_rules_go_by_age_and_number_as_ever() -> None:
    found = [snapshot(name, age, found="conflicts") for name, age in (("a", 9), ("b", 8), ("c", 7))]
    assert fates(*found, last=2) == {"c": "keep", "b": "keep", "a": "delete"}
    assert fates(*found, within_seconds=days(1)) == {"c": "keep", "b": "delete", "a": "delete"}
    assert whys(*found, within_seconds=days(1))["c"] == (NEWEST, note("c"))
    assert list_kept_instead(found, Retention(last=2), NOW, takes_last=False) == []


def test_an_unchecked_snapshot_does_not_displace_the_newest_valid_one_while_those_between_have_conflicts() -> None:
    """A prune between a create and its check: the check would find what the one before has found."""
    found = (
        *(snapshot("a", 9, 8, found="valid"), snapshot("b", 7, 6, found="valid")),
        *(snapshot("c", 5, found="conflicts"), snapshot("d", 3, 2)),
    )
    assert fates(*found, last=1) == {"d": "keep", "c": "delete", "b": "keep", "a": "delete"}
    assert whys(*found, last=1)["b"] == (
        "it is the newest snapshot found valid by a check, and checks of newer snapshots found conflicts",
    )
    assert fates(*found, last=1, takes_last=True) == {"d": "keep", "c": "delete", "b": "delete", "a": "delete"}
    # Without conflicts nobody knows of anything that is wrong.
    fine = (*found[:2], snapshot("c", 5), found[3])
    assert fates(*fine, last=1) == {"d": "keep", "c": "delete", "b": "delete", "a": "delete"}


def test_damaged_snapshots_and_restore_points_with_conflicts_are_judged_as_ever() -> None:
    point = HeldSnapshot("p", (NOW - DAY,), is_only_cut=True, checked=check("p", "conflicts"))
    found = (snapshot("a", 4), snapshot("b", 3), snapshot("c", 2, is_whole=False, found="conflicts"), point)
    assert fates(*found, last=1) == {"p": "keep", "c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, last=1)["b"] == ("last 1: it is the newest", NEWEST)


def test_what_is_kept_only_because_newer_ones_have_conflicts_is_known() -> None:
    found = [snapshot("a", 9, 8), snapshot("b", 7, 6), snapshot("c", 5, 4), snapshot("d", 3, found="conflicts")]
    assert list_kept_instead(found, Retention(last=2), NOW, takes_last=False) == ["b"]
    assert list_kept_instead(found, Retention(last=1, only_full=2), NOW, takes_last=False) == ["c", "b"]
    assert list_kept_instead(found[:3], Retention(last=2), NOW, takes_last=False) == []
