"""What the retention rules keep, compared with a computation that judges each snapshot alone, in any order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.config import Retention
from fleet.record import Time
from snapshots.activity.checks import EndedCheck
from snapshots.records.operation_records import CheckedPoint, CheckResult
from snapshots.removal.retention import (
    HeldSnapshot,
    NoRetentionError,
    RetentionFate,
    RetentionVerdict,
    apply_retention,
    check_rules,
    list_kept_instead,
)

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def snapshot(name: str, *ages: float, is_whole: bool = True, found: CheckResult | None = None) -> HeldSnapshot:
    """A snapshot whose restore points are so many days old, the full snapshot first; `found`: what its check found."""
    return HeldSnapshot(name, tuple(NOW - age * DAY for age in ages), is_whole, checked=check(name, found))


def check(name: str, found: CheckResult | None) -> EndedCheck | None:
    """A check that ended at three o'clock in the morning of the day before."""
    at = Time("2026-11-19T04:00:00.000+01:00")
    return EndedCheck("op", at, CheckedPoint(name, 0, found, full=True)) if found else None


def whys(*found: HeldSnapshot, **rules: int) -> dict[str, tuple[str, ...]]:
    return {one.name: one.why for one in apply_retention(found, Retention(**rules), NOW)}


def fates(*found: HeldSnapshot, takes_last: bool = False, **rules: int) -> dict[str, str]:
    return {one.name: one.fate.value for one in apply_retention(found, Retention(**rules), NOW, takes_last=takes_last)}


def restore_point(name: str, age: float) -> HeldSnapshot:
    return HeldSnapshot(name, (NOW - age * DAY,), is_only_cut=True)


def test_restore_points_are_no_full_snapshots() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), restore_point("p", 7), restore_point("q", 1))
    assert fates(*found, keep_full=1) == {"q": "keep", "p": "keep", "b": "keep", "a": "delete"}
    # The newest snapshot with rows stays, even if only a restore point is young.
    assert fates(*found, keep_days=3) == {"q": "keep", "p": "delete", "b": "keep", "a": "delete"}
    assert fates(*found, keep_increments=0) == {"q": "keep", "p": "keep", "b": "keep", "a": "keep"}


def test_keep_full_keeps_the_newest() -> None:
    found = fates(snapshot("a", 3, 0.1), snapshot("b", 2), snapshot("c", 1), keep_full=2)
    assert found == {"c": "keep", "b": "keep", "a": "delete"}


def test_a_chain_is_only_as_old_as_its_newest_restore_point() -> None:
    found = fates(snapshot("a", 30, 20, 6.9), snapshot("b", 20, 7), snapshot("c", 1), keep_days=7)
    assert found == {"c": "keep", "b": "delete", "a": "keep"}


def test_a_snapshot_that_any_rule_keeps_stays() -> None:
    found = fates(snapshot("a", 9, 0.5), snapshot("b", 8), snapshot("c", 7), snapshot("d", 6), keep_full=2, keep_days=1)
    assert found == {"d": "keep", "c": "keep", "b": "delete", "a": "keep"}


def test_increments_that_no_rule_keeps_are_removed() -> None:
    found = fates(snapshot("a", 9, 8), snapshot("b", 7, 6), snapshot("c", 5, 4), snapshot("d", 3), keep_increments=2)
    assert found == {"d": "keep", "c": "keep", "b": "only-full", "a": "only-full"}
    # A chain with a young restore point keeps its increments.
    found = fates(
        snapshot("a", 9, 0.5), snapshot("b", 7, 6), snapshot("c", 5, 4), keep_increments=1, keep_days=1, keep_full=3
    )
    assert found == {"c": "keep", "b": "only-full", "a": "keep"}


def test_the_newest_chain_keeps_its_increments_under_any_rules() -> None:
    assert fates(snapshot("a", 9, 8), snapshot("b", 7, 6), keep_increments=0) == {"b": "keep", "a": "only-full"}


def test_the_last_restorable_snapshot_stays_unless_its_deletion_is_requested() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), snapshot("c", 7, is_whole=False))
    assert fates(*found, keep_days=1) == {"c": "keep", "b": "keep", "a": "delete"}
    assert fates(*found, keep_days=1, takes_last=True) == {"c": "keep", "b": "delete", "a": "delete"}


def test_damaged_snapshots_are_neither_deleted_nor_counted() -> None:
    found = fates(
        snapshot("a", 4),
        snapshot("b", 3),
        snapshot("c", 2, is_whole=False),
        HeldSnapshot("d", (), is_whole=False),
        keep_full=1,
    )
    assert found == {"d": "keep", "c": "keep", "b": "keep", "a": "delete"}


def note(name: str) -> str:
    return (
        f"the check that ended at 2026-11-19 03:00 UTC found conflicts, so it is not counted: see snapshot check {name}"
    )


def test_a_snapshot_with_conflicts_takes_no_place_from_older_ones() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), snapshot("c", 7, found="conflicts"), snapshot("d", 6, found="valid"))
    assert fates(*found, keep_full=2) == {"d": "keep", "c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, keep_full=2) == {
        "d": ("keep_full 2: it is number 1 from the newest",),
        "c": ("keep_full 2: it is number 2 from the newest", note("c")),
        "b": ("keep_full 2: it is number 2 from the newest without conflicts",),
        "a": ("no rule keeps it",),
    }
    # It is deleted as one without conflicts would be.
    assert fates(*found, keep_full=1) == {"d": "keep", "c": "delete", "b": "delete", "a": "delete"}
    # Nobody asked what an inconclusive check or none would have found.
    unknown = (*found[:2], snapshot("c", 7, found="inconclusive"), found[3])
    assert fates(*unknown, keep_full=2) == {"d": "keep", "c": "keep", "b": "delete", "a": "delete"}


def test_a_snapshot_with_conflicts_is_not_the_last_that_can_be_restored() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), snapshot("c", 2, found="conflicts"))
    assert fates(*found, keep_days=3) == {"c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, keep_days=3)["b"] == ("it is the last snapshot without conflicts",)
    assert fates(*found, keep_days=1) == {"c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, keep_days=1)["c"] == ("it is the newest snapshot that can be restored", note("c"))
    assert fates(*found, keep_days=1, takes_last=True) == {"c": "delete", "b": "delete", "a": "delete"}


def test_increments_are_numbered_without_snapshots_with_conflicts() -> None:
    found = (snapshot("a", 9, 8), snapshot("b", 7, 6), snapshot("c", 5, 4, found="conflicts"), snapshot("d", 3, 2))
    assert fates(*found, keep_increments=2) == {"d": "keep", "c": "keep", "b": "keep", "a": "only-full"}
    assert fates(*found, keep_increments=1) == {"d": "keep", "c": "only-full", "b": "only-full", "a": "only-full"}
    # The newest chain goes on; the newest without conflicts has the restore points that somebody would need.
    assert fates(*found[:3], keep_increments=0) == {"c": "keep", "b": "keep", "a": "only-full"}
    assert whys(*found[:3], keep_increments=0)["b"] == (
        "no rule removes whole snapshots",
        "increments kept because checks of newer ones found conflicts",
    )


def test_if_every_snapshot_has_conflicts_the_rules_go_by_age_and_number_as_ever() -> None:
    found = [snapshot(name, age, found="conflicts") for name, age in (("a", 9), ("b", 8), ("c", 7))]
    assert fates(*found, keep_full=2) == {"c": "keep", "b": "keep", "a": "delete"}
    assert fates(*found, keep_days=1) == {"c": "keep", "b": "delete", "a": "delete"}
    assert whys(*found, keep_days=1)["c"] == ("it is the last snapshot that can be restored", note("c"))
    assert list_kept_instead(found, Retention(keep_full=2), NOW, takes_last=False) == []


def test_an_unchecked_snapshot_does_not_displace_the_newest_valid_one_while_those_between_have_conflicts() -> None:
    """A prune between a create and its check: the check would find what the one before has found."""
    found = (
        *(snapshot("a", 9, 8, found="valid"), snapshot("b", 7, 6, found="valid")),
        *(snapshot("c", 5, found="conflicts"), snapshot("d", 3, 2)),
    )
    assert fates(*found, keep_full=1, keep_increments=1) == {"d": "keep", "c": "delete", "b": "keep", "a": "delete"}
    assert whys(*found, keep_full=1, keep_increments=1)["b"] == (
        "it is the newest that a check found valid, and checks of newer ones found conflicts",
        "increments kept because checks of newer ones found conflicts",
    )
    assert fates(*found, keep_full=1, takes_last=True) == {"d": "keep", "c": "delete", "b": "delete", "a": "delete"}
    # Without conflicts nobody knows of anything that is wrong.
    fine = (*found[:2], snapshot("c", 5), found[3])
    assert fates(*fine, keep_full=1) == {"d": "keep", "c": "delete", "b": "delete", "a": "delete"}


def test_damaged_snapshots_and_restore_points_with_conflicts_are_judged_as_ever() -> None:
    point = HeldSnapshot("p", (NOW - DAY,), is_only_cut=True, checked=check("p", "conflicts"))
    found = (snapshot("a", 4), snapshot("b", 3), snapshot("c", 2, is_whole=False, found="conflicts"), point)
    assert fates(*found, keep_full=1) == {"p": "keep", "c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, keep_full=1)["b"] == ("keep_full 1: it is number 1 from the newest",)


def test_what_is_kept_only_because_newer_ones_have_conflicts_is_known() -> None:
    found = [snapshot("a", 9, 8), snapshot("b", 7, 6), snapshot("c", 5, 4), snapshot("d", 3, found="conflicts")]
    assert list_kept_instead(found, Retention(keep_full=2), NOW, takes_last=False) == ["b"]
    assert list_kept_instead(found, Retention(keep_full=2, keep_increments=1), NOW, takes_last=False) == ["c", "b"]
    assert list_kept_instead(found[:3], Retention(keep_full=2), NOW, takes_last=False) == []


def test_times_of_different_zones_are_compared() -> None:
    zone = timezone(timedelta(hours=14))
    young = HeldSnapshot("a", (datetime(2026, 11, 20, 2, 0, 1, tzinfo=zone),))
    old = HeldSnapshot("b", (datetime(2026, 11, 20, 2, 0, 0, tzinfo=zone),))
    found = apply_retention([young, old], Retention(keep_days=1), datetime(2026, 11, 20, 12, tzinfo=UTC))
    assert {one.name: one.fate.value for one in found} == {"a": "keep", "b": "delete"}


def test_a_snapshot_from_a_clock_that_was_ahead_is_young() -> None:
    assert fates(snapshot("a", -3), snapshot("b", 5), keep_days=1) == {"a": "keep", "b": "delete"}


def test_retention_without_rules_is_a_usage_error() -> None:
    with pytest.raises(NoRetentionError) as error:
        check_rules(Retention())
    assert error.value.exit_code == 2
    check_rules(Retention(keep_increments=0))


def test_every_verdict_says_why() -> None:
    found = apply_retention(
        [snapshot("a", 3, 2), snapshot("b", 1, 0.5)], Retention(keep_full=2, keep_days=1, keep_increments=1), NOW
    )
    assert found[0].why == (
        "keep_full 2: it is number 1 from the newest",
        "keep_days 1: its newest cut was made at 2026-11-20 00:00",
        "increments kept by keep_increments 1: number 1 from the newest",
    )
    assert found[1].why == ("keep_full 2: it is number 2 from the newest", "increments removed: keep_increments 1")


COUNTS = st.none() | st.integers(0, 6)
POINTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


RESULTS: list[CheckResult | None] = [None, "valid", "conflicts", "inconclusive"]


@st.composite
def stores(draw: st.DrawFn) -> list[HeldSnapshot]:
    # No two full snapshots have the same time: a fleet takes one at a time.
    firsts = draw(st.lists(st.integers(0, 400), max_size=8, unique=True))
    made: list[HeldSnapshot] = []
    for number, first in enumerate(firsts):
        name, steps = f"s{number}", sorted(draw(POINTS))[1:]
        moments = tuple(NOW - timedelta(hours=10 * first) + timedelta(hours=step) for step in [0, *steps])
        result = draw(st.sampled_from(RESULTS))
        made.append(HeldSnapshot(name, moments, draw(st.booleans()), checked=check(name, result)))
    return made


ALL_RULES = st.builds(Retention, keep_full=COUNTS, keep_days=COUNTS, keep_increments=COUNTS)


def judge(found: list[HeldSnapshot], rules: Retention, *, takes_last: bool) -> dict[str, RetentionVerdict]:
    return {one.name: one for one in apply_retention(found, rules, NOW, takes_last=takes_last)}


def has_conflicts(one: HeldSnapshot) -> bool:
    return one.checked is not None and one.checked.point.result == "conflicts"


def is_valid(one: HeldSnapshot) -> bool:
    return one.checked is not None and one.checked.point.result == "valid"


@given(stores(), ALL_RULES, st.booleans())
def test_any_store_is_judged_as_the_rules_one_by_one_would_judge_it(
    found: list[HeldSnapshot],
    rules: Retention,
    takes_last: bool,  # noqa: FBT001  # hypothesis gives it by position
) -> None:
    full, days, increments = rules.keep_full, rules.keep_days, rules.keep_increments
    verdicts = judge(found, rules, takes_last=takes_last)
    assert verdicts.keys() == {one.name for one in found}
    kept: set[str] = set()
    for one in found:
        newer = [other for other in found if other.is_whole and other.points[0] > one.points[0]]
        without = [other for other in newer if not has_conflicts(other)]
        number = len(newer if has_conflicts(one) else without)
        is_young = days is not None and any((NOW - point).total_seconds() < days * 86400 for point in one.points)
        by_rule = is_young or (full is not None and number < full) or (full is None and days is None)
        keeps_increments = increments is None or number < increments or number == 0 or is_young
        is_proven = is_valid(one) and len(without) < len(newer) and not any(map(is_valid, newer)) and not takes_last
        expected = RetentionFate.KEEP
        if one.is_whole and not by_rule:
            expected = RetentionFate.DELETE
        elif one.is_whole and not keeps_increments and len(one.points) > 1:
            expected = RetentionFate.ONLY_FULL
        verdict = verdicts[one.name]
        assert verdict.why
        if verdict.fate is not expected:
            # The only exceptions are the newest restorable snapshot, of all or of those without conflicts, and the
            # newest valid one while a newer one has conflicts.
            assert (verdict.fate, takes_last) == (RetentionFate.KEEP, False)
            assert is_proven or (number == 0 and expected is RetentionFate.DELETE)
        if one.is_whole and is_proven:
            assert verdict.fate is RetentionFate.KEEP
        if one.is_whole and verdict.fate is not RetentionFate.DELETE:
            kept.add(one.name)
    whole = {one.name for one in found if one.is_whole}
    fine = {one.name for one in found if one.is_whole and not has_conflicts(one)}
    assert takes_last or ((not whole or kept) and (not fine or kept & fine))


LOSES = {RetentionFate.KEEP: 0, RetentionFate.ONLY_FULL: 1, RetentionFate.DELETE: 2}


@given(stores(), ALL_RULES, st.booleans())
def test_what_checks_have_found_deletes_nothing_and_keeps_little_more(
    found: list[HeldSnapshot],
    rules: Retention,
    takes_last: bool,  # noqa: FBT001  # hypothesis gives it by position
) -> None:
    unchecked = [HeldSnapshot(one.name, one.points, one.is_whole) for one in found]
    verdicts = judge(found, rules, takes_last=takes_last)
    otherwise = judge(unchecked, rules, takes_last=takes_last)
    assert all(LOSES[one.fate] <= LOSES[otherwise[name].fate] for name, one in verdicts.items())
    instead = {name for name, one in verdicts.items() if one.fate is not otherwise[name].fate}
    assert list_kept_instead(found, rules, NOW, takes_last=takes_last) == [one for one in verdicts if one in instead]
    more = [name for name in instead if otherwise[name].fate is RetentionFate.DELETE]
    with_conflicts = sum(1 for one in found if one.is_whole and has_conflicts(one))
    # Each with conflicts leaves its place to one other; besides, the newest valid one stays.
    assert len(more) <= min(rules.keep_full or 1, with_conflicts) + 1
    assert not with_conflicts or not {one.name for one in found if has_conflicts(one)} & set(more)
    if not with_conflicts:
        assert not instead
