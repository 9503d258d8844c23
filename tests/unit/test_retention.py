"""What the retention rules keep, compared with a computation that judges each snapshot alone, in any order."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.fleet.config import Retention
from cutline.snapshots.records.operation_records import CheckResult
from cutline.snapshots.removal.retention import (
    HeldSnapshot,
    NoRetentionError,
    RetentionFate,
    RetentionVerdict,
    apply_retention,
    check_rules,
    list_kept_instead,
)
from tests.unit.made_retention import check, fates, restore_point, snapshot

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)


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


def test_an_older_chain_without_increments_gets_none_any_more() -> None:
    found = (snapshot("a", 9, goes_on=True), snapshot("b", 7), snapshot("c", 5, goes_on=True))
    # Nodes keep no WAL for `b`: its chain has ended already.
    assert fates(*found, keep_increments=1) == {"c": "keep", "b": "keep", "a": "only-full"}
    assert fates(*found, keep_increments=0) == {"c": "keep", "b": "keep", "a": "only-full"}
    assert fates(*found, keep_increments=3) == {"c": "keep", "b": "keep", "a": "keep"}
    assert fates(*found, keep_full=3) == {"c": "keep", "b": "keep", "a": "keep"}
    assert fates(*found, keep_increments=1, keep_days=10) == {"c": "keep", "b": "keep", "a": "keep"}
    whys = {one.name: one.why for one in apply_retention(found, Retention(keep_increments=1), NOW)}
    assert whys["a"] == ("no rule removes whole snapshots", "no increments follow: keep_increments 1")
    assert whys["c"] == ("no rule removes whole snapshots",)


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
        "keep_full 2: it is number 1 counting from the newest",
        "keep_days 1: its newest cut was made at 2026-11-20 00:00",
        "increments kept by keep_increments 1: number 1 counting from the newest",
    )
    assert found[1].why == (
        "keep_full 2: it is number 2 counting from the newest",
        "increments removed: keep_increments 1",
    )


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
        is_whole, goes_on = draw(st.booleans()), draw(st.booleans())
        made.append(HeldSnapshot(name, moments, is_whole, checked=check(name, result), is_continuable=goes_on))
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
        elif one.is_whole and not keeps_increments and (len(one.points) > 1 or one.is_continuable):
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
    unchecked = [replace(one, checked=None) for one in found]
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
