"""What the retention rules keep, compared with a computation that judges each restore point alone, in any order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cutline.fleet.config import CALENDAR_RULES, TIME_RULES, Retention
from cutline.snapshots.records.operation_records import CheckResult
from cutline.snapshots.removal.retention import (
    HeldSnapshot,
    RetentionFate,
    RetentionVerdict,
    apply_retention,
    list_kept_instead,
)
from tests.unit.made_retention import DAY, NOW, check, days, fates, restore_point, snapshot, wanted, whys

NEWEST = "it is the newest snapshot that can be restored"


def test_restore_points_are_no_full_snapshots() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), restore_point("p", 7), restore_point("q", 1))
    assert fates(*found, last=1) == {"q": "keep", "p": "keep", "b": "keep", "a": "delete"}
    # The newest snapshot with rows stays, even if only a restore point is young.
    assert fates(*found, within_seconds=days(3)) == {"q": "keep", "p": "delete", "b": "keep", "a": "delete"}
    # They have days of their own: those with rows lose none to them.
    same_day = (snapshot("a", 1.4), restore_point("p", 1.3), restore_point("q", 1.2), snapshot("b", 0))
    assert fates(*same_day, daily=2) == {"b": "keep", "q": "keep", "p": "delete", "a": "keep"}


def test_last_keeps_the_newest() -> None:
    found = fates(snapshot("a", 3), snapshot("b", 2), snapshot("c", 1), last=2)
    assert found == {"c": "keep", "b": "keep", "a": "delete"}
    assert set(fates(snapshot("a", 3), snapshot("b", 2), snapshot("c", 1), last="all").values()) == {"keep"}


def test_the_chain_with_the_newest_restore_point_stays() -> None:
    found = (snapshot("a", 3, 0.1), snapshot("b", 2), snapshot("c", 1))
    assert fates(*found, last=1) == {"c": "keep", "b": "delete", "a": "keep"}
    assert whys(*found, last=1)["a"] == ("it has the newest restore point",)
    assert fates(*found, last=1, takes_last=True) == {"c": "keep", "b": "delete", "a": "delete"}


def test_within_keeps_the_chains_of_young_restore_points() -> None:
    found = (snapshot("a", 30, 20, 6.9), snapshot("b", 20, 7), snapshot("c", 1))
    assert fates(*found, within_seconds=days(7)) == {"c": "keep", "b": "delete", "a": "keep"}
    assert wanted(*found, within_seconds=days(7)) == {"c": (0,), "b": (), "a": (2,)}


def test_a_snapshot_that_any_rule_keeps_stays() -> None:
    found = fates(
        snapshot("a", 9, 0.5), snapshot("b", 8), snapshot("c", 7), snapshot("d", 6), last=2, within_seconds=days(1)
    )
    assert found == {"d": "keep", "c": "keep", "b": "delete", "a": "keep"}


def test_increments_that_no_rule_keeps_are_removed() -> None:
    found = (snapshot("a", 9, 8), snapshot("b", 7, 6), snapshot("c", 5, 4), snapshot("d", 3))
    assert fates(*found, last=2, only_full=3) == {"d": "keep", "c": "keep", "b": "only-full", "a": "delete"}
    assert fates(*found, last=2, only_full="all") == {"d": "keep", "c": "keep", "b": "only-full", "a": "only-full"}
    # A chain with a young restore point keeps its increments.
    found = (snapshot("a", 9, 0.5), snapshot("b", 7, 6), snapshot("c", 5, 4))
    kept = fates(*found, last=1, within_seconds=days(1), only_full=3)
    assert kept == {"c": "keep", "b": "only-full", "a": "keep"}


def test_the_newest_chain_keeps_its_increments_under_any_rules() -> None:
    assert fates(snapshot("a", 9, 8), snapshot("b", 7, 6), only_full="all") == {"b": "keep", "a": "only-full"}
    # Even if the deletion of the last is requested, it goes on as long as any rule keeps it.
    assert fates(snapshot("b", 7, 6), only_full=1, takes_last=True) == {"b": "keep"}


def test_an_older_chain_without_increments_gets_none_any_more() -> None:
    found = (snapshot("a", 9, goes_on=True), snapshot("b", 7), snapshot("c", 5, goes_on=True))
    # Nodes keep no WAL for `b`: its chain has ended already.
    assert fates(*found, last=1, only_full=9) == {"c": "keep", "b": "keep", "a": "only-full"}
    assert fates(*found, last=3, only_full=9) == {"c": "keep", "b": "keep", "a": "keep"}
    assert fates(*found, within_seconds=days(10)) == {"c": "keep", "b": "keep", "a": "keep"}
    assert fates(*found, daily=3) == {"c": "keep", "b": "keep", "a": "only-full"}
    assert whys(*found, last=1, only_full=9) == {
        "c": (
            "last 1: it is the newest",
            "only_full 9: it is the newest",
            NEWEST,
        ),
        "b": ("only_full 9: it is the 2nd newest",),
        "a": ("only_full 9: it is the 3rd newest", "its chain ends here: no rule keeps increments"),
    }


def at(*texts: str) -> tuple[datetime, ...]:
    return tuple(datetime.fromisoformat(f"{text}Z") for text in texts)


def test_the_newest_restore_point_of_each_period_is_kept() -> None:
    # 2026-11-20 is a Friday. 2027-01-01 is still in week 53 of 2026.
    chain = HeldSnapshot(
        "a",
        at(
            *("2025-12-31T23:59", "2026-11-15T23:59:59", "2026-11-16T00:00", "2026-11-18T07:10", "2026-11-18T07:50"),
            *("2026-11-20T10:59", "2026-11-20T11:00"),
        ),
    )
    assert wanted(chain, hourly=2) == {"a": (5, 6)}
    # Hours and days without a restore point do not count.
    assert wanted(chain, hourly=3) == {"a": (4, 5, 6)}
    assert wanted(chain, daily=2) == {"a": (4, 6)}
    assert wanted(chain, daily=4) == {"a": (1, 2, 4, 6)}
    assert wanted(chain, weekly=2) == {"a": (1, 6)}
    assert wanted(chain, monthly=2) == {"a": (0, 6)}
    assert wanted(chain, yearly=1) == {"a": (6,)}
    assert wanted(chain, yearly="all") == {"a": (0, 6)}
    late = apply_retention(
        [HeldSnapshot("a", at("2026-12-31T12:00", "2027-01-01T12:00"))],
        Retention(weekly=9),
        datetime(2027, 1, 2, tzinfo=UTC),
        takes_last=True,
    )
    assert [(one.wanted, one.points[1].why) for one in late] == [((1,), ("weekly 9: newest of 2026-W53",))]


def test_periods_are_those_of_utc() -> None:
    zone = timezone(timedelta(hours=14))
    # In the zone of these times they are of two days.
    same = HeldSnapshot("a", (datetime(2026, 11, 19, 13, tzinfo=zone), datetime(2026, 11, 20, 13, 59, tzinfo=zone)))
    assert wanted(same, daily=9) == {"a": (0, 1)}
    assert wanted(HeldSnapshot("a", (same.points[1], datetime(2026, 11, 20, 14, tzinfo=zone))), daily=9) == {
        "a": (0, 1)
    }
    assert wanted(HeldSnapshot("a", (same.points[0], datetime(2026, 11, 19, 14, tzinfo=zone))), daily=9) == {
        "a": (0, 1)
    }
    assert wanted(HeldSnapshot("a", (same.points[0], datetime(2026, 11, 19, 13, 30, tzinfo=zone))), daily=9) == {
        "a": (1,)
    }


def test_every_restore_point_says_why_it_stays_or_goes() -> None:
    found = [snapshot("a", 9, 8.5, 8), snapshot("b", 7, 6, 5), snapshot("c", 1, 0.5)]
    verdicts = {one.name: one for one in apply_retention(found, Retention(only_full=3, weekly=2), NOW)}
    # The sixth day before is the Saturday of the last week, and the fifth its Sunday.
    assert [(one.why, one.needed_by, one.is_kept) for one in verdicts["b"].points] == [
        (("only_full 3: it is the 2nd newest",), None, True),
        ((), 2, True),
        (("weekly 2: newest of 2026-W46",), None, True),
    ]
    assert [(one.why, one.needed_by, one.is_kept) for one in verdicts["a"].points] == [
        (("only_full 3: it is the 3rd newest",), None, True),
        ((), None, False),
        ((), None, False),
    ]
    assert verdicts["b"].why == (
        "only_full 3: it is the 2nd newest",
        "weekly 2: 1 restore point",
    )
    # What follows the last that a rule keeps stays with its chain, which can't be cut.
    cut = apply_retention([snapshot("a", 9, 8, 7), snapshot("b", 1)], Retention(last=1), NOW)
    pinned = apply_retention([snapshot("a", 9, 8, 7, pins={1: "by me"}), snapshot("b", 1)], Retention(last=1), NOW)
    assert [one.is_kept for one in cut[1].points] == [False, False, False]
    assert [(one.why, one.needed_by, one.is_kept) for one in pinned[1].points] == [
        ((), 1, True),
        (("pinned: by me",), None, True),
        ((), None, True),
    ]


def test_a_pinned_restore_point_stays_under_any_rules() -> None:
    found = (snapshot("a", 9, 8, pins={1: "by me"}), snapshot("b", 7, 6, pins={0: "by me"}), snapshot("c", 1))
    assert fates(*found, last=1) == {"c": "keep", "b": "only-full", "a": "keep"}
    assert fates(*found, within_seconds=1, takes_last=True) == {"c": "delete", "b": "only-full", "a": "keep"}
    assert wanted(*found, last=1) == {"c": (0,), "b": (0,), "a": (1,)}
    assert whys(*found, last=1)["a"] == ("pinned: by me",)


def test_the_default_deletes_nothing_of_a_fleet_that_takes_no_snapshots_any_more() -> None:
    chain = snapshot("a", *(float(age) for age in range(3000, 2000, -1)))
    others = [snapshot(f"b{age}", age) for age in (1900, 1899)]
    kept = {one.name: one.fate for one in apply_retention([chain, *others], Retention(), NOW)}
    assert set(kept.values()) == {RetentionFate.KEEP}
    # The same, however long ago that was.
    assert kept == {
        one.name: one.fate for one in apply_retention([chain, *others], Retention(), NOW + timedelta(days=36500))
    }


def test_the_default_keeps_a_finite_number_of_daily_snapshots() -> None:
    # Two years of a full snapshot each day: 7 days, of which one is a Sunday; 3 more weeks; 12 months.
    daily = [snapshot(f"d{age}", age) for age in range(730)]
    kept = {one.name for one in apply_retention(daily, Retention(), NOW) if one.fate is RetentionFate.KEEP}
    ends_of_months = [date(2026, month, 1) - timedelta(days=1) for month in range(2, 12)] + [date(2025, 12, 31)]
    # The Sunday of the week before was five days ago. The newest month and the newest day are those of today.
    expected = {*range(7), 5, 12, 19, *((NOW.date() - end).days for end in ends_of_months)}
    assert kept == {f"d{age}" for age in expected}


def test_the_last_restorable_snapshot_stays_unless_its_deletion_is_requested() -> None:
    found = (snapshot("a", 9), snapshot("b", 8), snapshot("c", 7, is_whole=False))
    assert fates(*found, within_seconds=days(1)) == {"c": "keep", "b": "keep", "a": "delete"}
    assert fates(*found, within_seconds=days(1), takes_last=True) == {"c": "keep", "b": "delete", "a": "delete"}


def test_damaged_snapshots_are_neither_deleted_nor_counted() -> None:
    found = fates(
        snapshot("a", 4),
        snapshot("b", 3),
        snapshot("c", 2, is_whole=False),
        HeldSnapshot("d", (), is_whole=False),
        last=1,
    )
    assert found == {"d": "keep", "c": "keep", "b": "keep", "a": "delete"}


def test_a_snapshot_from_a_clock_that_was_ahead_is_kept_and_takes_no_place() -> None:
    found = (snapshot("a", 5), snapshot("b", 4), snapshot("c", 3, -400), *(snapshot(f"f{n}", -n) for n in range(1, 9)))
    kept = fates(*found, last=1, daily=1)
    assert kept == {**{f"f{n}": "keep" for n in range(1, 9)}, "c": "keep", "b": "keep", "a": "delete"}
    assert whys(*found, last=1)["c"] == (
        "it has a cut in the future (2027-12-25 12:00 UTC), so its age is not known and it is not counted",
    )
    # Clocks that agree may differ by minutes.
    assert fates(snapshot("a", 5), snapshot("b", -200 / 86400), last=1) == {"b": "keep", "a": "delete"}


COUNTS = st.none() | st.integers(1, 6) | st.just("all")
POINTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)
RESULTS: list[CheckResult | None] = [None, "valid", "conflicts", "inconclusive"]


@st.composite
def stores(draw: st.DrawFn) -> list[HeldSnapshot]:
    # No two full snapshots have the same time: a fleet takes one at a time. Some times are in the future.
    firsts = draw(st.lists(st.integers(-20, 400), max_size=8, unique=True))
    made: list[HeldSnapshot] = []
    for number, first in enumerate(firsts):
        name, steps = f"s{number}", sorted(draw(POINTS))[1:]
        moments = tuple(NOW - timedelta(hours=10 * first) + timedelta(hours=step) for step in [0, *steps])
        result = draw(st.sampled_from(RESULTS))
        is_whole, goes_on = draw(st.booleans()), draw(st.booleans())
        pinned = draw(st.none() | st.none() | st.integers(0, len(moments) - 1))
        pins = {} if pinned is None else {pinned: "by somebody"}
        made.append(HeldSnapshot(name, moments, is_whole, False, check(name, result), goes_on, pins))  # noqa: FBT003
    return made


SECONDS = st.none() | st.integers(1, 40).map(days)
ALL_RULES = st.builds(
    Retention, last=COUNTS, only_full=COUNTS, within_seconds=SECONDS, **{name: COUNTS for name in CALENDAR_RULES}
)
SET_RULES = ALL_RULES.filter(lambda rules: bool(rules.rules))


def judge(found: list[HeldSnapshot], rules: Retention, *, takes_last: bool) -> dict[str, RetentionVerdict]:
    return {one.name: one for one in apply_retention(found, rules, NOW, takes_last=takes_last)}


def has_conflicts(one: HeldSnapshot) -> bool:
    return one.checked is not None and one.checked.point.result == "conflicts"


def is_valid(one: HeldSnapshot) -> bool:
    return one.checked is not None and one.checked.point.result == "valid"


def is_counted(one: HeldSnapshot) -> bool:
    return one.is_whole and max(one.points) <= NOW + timedelta(minutes=5)


PERIODS: dict[str, Callable[[datetime], Any]] = {
    "hourly": lambda moment: (moment.date(), moment.hour),
    "daily": datetime.date,
    "weekly": lambda moment: moment.date() - timedelta(days=moment.weekday()),
    "monthly": lambda moment: (moment.year, moment.month),
    "yearly": lambda moment: moment.year,
}


def is_among(number: int, count: object) -> bool:
    return count == "all" or (isinstance(count, int) and number < count)


def expected_points(one: HeldSnapshot, series: list[HeldSnapshot], rules: Retention) -> set[int]:
    """What the rules keep of a snapshot, each restore point judged alone, among the snapshots of a series."""
    number = sum(other.points[0] > one.points[0] for other in series)
    kept = set(range(len(one.points))) if is_among(number, rules.last) else set()
    kept |= {0} if is_among(number, rules.only_full) else set()
    everything = [(point, other.points[0], i) for other in series for i, point in enumerate(other.points)]
    for increment, point in enumerate(one.points):
        place = (point, one.points[0], increment)
        if rules.within_seconds is not None and (NOW - point).total_seconds() < rules.within_seconds:
            kept.add(increment)
        for rule, period_of in PERIODS.items():
            period = period_of(point)
            is_newest = not any(period_of(other[0]) == period and other > place for other in everything)
            later = len({period_of(other[0]) for other in everything if period_of(other[0]) > period})
            if is_newest and is_among(later, rules.rules.get(rule)):
                kept.add(increment)
    return kept


@given(stores(), SET_RULES, st.booleans())
def test_any_store_is_judged_as_the_rules_one_by_one_would_judge_it(
    found: list[HeldSnapshot],
    rules: Retention,
    takes_last: bool,  # noqa: FBT001  # hypothesis gives it by position
) -> None:
    verdicts = judge(found, rules, takes_last=takes_last)
    assert verdicts.keys() == {one.name for one in found}
    counted = sorted(filter(is_counted, found), key=lambda one: one.points[0], reverse=True)
    sound = [one for one in counted if not has_conflicts(one)]
    stays = {series[0].name for series in (counted, sound) if series}
    if counted:
        stays.add(max(counted, key=lambda one: (max(one.points), one.points[0])).name)
    valid = next((one for one in sound if is_valid(one)), None)
    proven = {valid.name} if valid and any(has_conflicts(one) for one in counted[: counted.index(valid)]) else set()
    for one in found:
        verdict = verdicts[one.name]
        assert verdict.why
        assert len(verdict.points) == len(one.points)
        if not is_counted(one):
            assert verdict.fate is RetentionFate.KEEP
            continue
        kept = expected_points(one, counted if has_conflicts(one) else sound, rules) | one.pins.keys()
        by_rule = {point.increment for point in verdict.points if point.why}
        is_protected = not takes_last and one.name in stays | proven
        assert by_rule == kept | ({len(one.points) - 1} if is_protected else set())
        expected = RetentionFate.KEEP
        if not by_rule:
            expected = RetentionFate.DELETE
        elif max(by_rule) == 0 and one.name not in stays and not is_protected:
            series = counted if has_conflicts(one) else sound
            lasting = replace(rules, only_full=None, **dict.fromkeys(CALENDAR_RULES))
            has_more = len(one.points) > 1 or one.is_continuable
            is_ended = has_more and not expected_points(one, series, lasting)
            expected = RetentionFate.ONLY_FULL if is_ended else RetentionFate.KEEP
        assert verdict.fate is expected
        # What stays is restorable: it begins with the full snapshot and has no gap.
        remaining = [point.increment for point in verdict.points if point.is_kept]
        assert remaining == list(range(len(remaining)))
        assert by_rule <= set(remaining)
        left = {RetentionFate.DELETE: 0, RetentionFate.ONLY_FULL: 1, RetentionFate.KEEP: len(one.points)}
        assert len(remaining) == left[expected]
    kept_names = {one.name for one in counted if verdicts[one.name].fate is not RetentionFate.DELETE}
    fine = {one.name for one in sound}
    assert takes_last or ((not counted or kept_names) and (not fine or kept_names & fine))


LOSES = {RetentionFate.KEEP: 0, RetentionFate.ONLY_FULL: 1, RetentionFate.DELETE: 2}
MORE = {None: 0, "all": 1 << 60}


def size_of(count: Any) -> float:
    return MORE.get(count, count)


@given(stores(), SET_RULES, SET_RULES, st.booleans())
def test_more_rules_or_larger_numbers_never_delete_more(
    found: list[HeldSnapshot],
    rules: Retention,
    others: Retention,
    takes_last: bool,  # noqa: FBT001  # hypothesis gives it by position
) -> None:
    names = ("last", "only_full", "within_seconds", *CALENDAR_RULES)
    more = replace(rules, **{name: max(getattr(rules, name), getattr(others, name), key=size_of) for name in names})
    fewer, kept = (judge(found, some, takes_last=takes_last) for some in (rules, more))
    for name, one in kept.items():
        assert LOSES[one.fate] <= LOSES[fewer[name].fate]
        assert set(fewer[name].wanted) <= set(one.wanted)


@given(stores(), SET_RULES, st.booleans())
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
    with_conflicts = {one.name for one in found if is_counted(one) and has_conflicts(one)}
    # Those with conflicts leave their places to others; under no rule does one of them stay for its conflicts.
    more = {name for name in instead if otherwise[name].fate is RetentionFate.DELETE}
    assert not with_conflicts & more
    assert len(with_conflicts) > 0 or not instead


@given(stores(), SET_RULES)
def test_a_pin_keeps_only_what_it_needs(found: list[HeldSnapshot], rules: Retention) -> None:
    without = judge([replace(one, pins={}) for one in found], rules, takes_last=True)
    for one in judge(found, rules, takes_last=True).values():
        pins = next(other.pins for other in found if other.name == one.name)
        if not pins:
            assert one == without[one.name]
        else:
            assert all(one.points[increment].is_kept for increment in range(max(pins) + 1))


def test_only_rules_by_time_remove_restore_points_without_rows() -> None:
    found = [restore_point("p", 7), restore_point("q", 1), snapshot("a", 5)]
    for rules in (Retention(last=1), Retention(only_full=1), Retention(last=1, only_full=2)):
        assert {one.fate for one in apply_retention(found, rules, NOW)} == {RetentionFate.KEEP}
    for rule in TIME_RULES:
        rules = Retention(**{"within_seconds" if rule == "within" else rule: 1})
        kept = {one.name: one.fate.value for one in apply_retention(found, rules, NOW)}
        assert (kept["p"], kept["a"]) == ("delete", "keep")


def merged(first: int, merges: tuple[int, ...], *ages: float, **more: Any) -> HeldSnapshot:
    """A chain whose restore points from increment `first` on are so many days old, with merges."""
    return replace(snapshot("a", *ages, **more), first=first, merges=merges)


def begins(chain: HeldSnapshot, **rules: Any) -> int | None:
    (verdict,) = apply_retention([chain], Retention(**rules), NOW)
    stay = [point.increment for point in verdict.points if point.is_kept]
    assert stay == [one for one in chain.increments if one >= (verdict.begins or 0)]
    assert {*verdict.wanted} <= {*stay}
    return verdict.begins


def test_a_chain_begins_at_the_newest_merge_before_all_that_is_wanted() -> None:
    chain = merged(3, (3, 5, 7), 60, 50, 40, 30, 20, 10)
    assert begins(chain, within_seconds=days(35)) == 5
    assert begins(chain, within_seconds=days(5)) == 7
    assert begins(chain, within_seconds=days(55)) is None
    assert begins(merged(3, (), 60, 50, 40), within_seconds=days(5)) is None
    # Of the full snapshot and the merges, the newest N and what follows them.
    assert [begins(chain, last=last) for last in (1, 2, 3, 4, "all")] == [7, 5, None, None, None]
    assert begins(chain, last=1, monthly="all") is None
    # Pins count by their increments, and nothing is given up because of a merge with conflicts.
    assert begins(merged(3, (5, 7), 60, 50, 40, 30, 20, 10, pins={6: "held"}), last=1) == 5
    assert begins(merged(3, (5, 7), 60, 50, 40, 30, 20, 10, pins={3: "held"}), last=1) is None
    assert begins(merged(3, (5, 7), 60, 50, 40, 30, 20, 10, found="conflicts"), last=1) is None
    # A chain that can't be reduced to its full snapshot stays, and merges let no other snapshot go.
    old = replace(merged(3, (3,), 60, 50, goes_on=True), name="b")
    assert fates(chain, old, last=1, only_full=2) == {"a": "keep", "b": "keep"}


def test_a_chain_that_would_end_but_cannot_be_reduced_is_marked() -> None:
    newer = snapshot("c", 5, goes_on=True)

    def unreduced(old: HeldSnapshot, **rules: Any) -> bool:
        return {one.name: one.is_unreduced for one in apply_retention([old, newer], Retention(**rules), NOW)}["a"]

    old = merged(3, (3,), 60, 50, goes_on=True)
    assert unreduced(old, last=1, only_full=2)
    assert unreduced(merged(3, (3,), 60, goes_on=True), last=1, only_full=2)
    # It is to go on, has ended already, is wanted with its increments, goes, or can be reduced.
    assert not unreduced(old, last=2)
    assert not unreduced(merged(3, (3,), 60, 50), last=1, only_full=2)
    assert not unreduced(old, last=1, monthly=2)
    assert not unreduced(old, last=1)
    assert not unreduced(snapshot("a", 60, 50, goes_on=True), last=1, only_full=2)


def test_a_chain_that_is_merged_every_week_does_not_grow_without_end() -> None:
    """Three years of daily increments, a merge and then a prune by the default rules every week."""
    first, sizes = 0, list[int]()
    for day in range(0, 3 * 365, 7):
        points = tuple(NOW + increment * DAY for increment in range(first, day + 1))
        chain = HeldSnapshot("a", points, first=first, merges=tuple(range(7, day + 1, 7)))
        (verdict,) = apply_retention([chain], Retention(), NOW + day * DAY)
        first = verdict.begins or first
        sizes.append(day + 1 - first)
    # The last day of the twelfth month from the newest is 304 to 335 days old. The merge before it is up to six older.
    assert min(sizes[60:]) > 304
    assert max(sizes) <= 1 + 335 + 6
