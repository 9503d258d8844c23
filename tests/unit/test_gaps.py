"""Gaps between restore points: which spans are longer than usual, and where chains end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cutline.snapshots.listing.figures import RestorePlace, find_gaps

BEGIN = datetime(2026, 11, 20, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return BEGIN + timedelta(minutes=minutes)


def places(*minutes: float, snapshot: str = "daily", ended: str = "") -> list[RestorePlace]:
    last = len(minutes) - 1
    return [
        RestorePlace(snapshot, number, at(minute), ended if number == last else "")
        for number, minute in enumerate(minutes)
    ]


def test_a_span_of_more_than_three_times_the_median_is_a_gap() -> None:
    # Spans of 10, 10, 30 and 31 minutes: the median is 20, and no span is longer than 60.
    assert find_gaps(places(0, 10, 20, 50, 81), at(81)).found == ()
    # Spans of 10, 10, 10, 30 and 31: the median is 10, and 31 minutes are a gap, 30 are none.
    gaps = find_gaps(places(0, 10, 20, 30, 60, 91), at(91))
    assert (gaps.median_seconds, gaps.limit_seconds) == (600.0, 1800.0)
    (gap,) = gaps.found
    assert gap.before is not None
    assert (gap.after.increment, gap.before.increment, gap.seconds, gap.why) == (4, 5, 31 * 60.0, "")


def test_the_time_since_the_newest_restore_point_may_be_a_gap() -> None:
    assert find_gaps(places(0, 10, 20, 30), at(60)).found == ()
    (gap,) = find_gaps(places(0, 10, 20, 30), at(61)).found
    assert (gap.after.increment, gap.before, gap.seconds) == (3, None, 31 * 60.0)


def test_few_spans_have_no_usual_length() -> None:
    gaps = find_gaps(places(0, 1, 1000), at(99999))
    assert (gaps.median_seconds, gaps.limit_seconds, gaps.found) == (None, None, ())
    assert find_gaps([], at(0)).found == ()


def test_where_a_chain_ended_is_a_gap_of_any_length() -> None:
    first, second = places(0, 10, ended="it was lost"), places(12, 22, 32, snapshot="next")
    # They are ordered by time, whatever the order in which they are given.
    (gap,) = find_gaps([*second, *first], at(40)).found
    assert gap.before is not None
    assert (gap.after.snapshot, gap.before.snapshot, gap.seconds, gap.why) == ("daily", "next", 120.0, "it was lost")
    (gap,) = find_gaps(first, at(11)).found
    assert (gap.before, gap.until, gap.why) == (None, at(11), "it was lost")


def test_restore_points_of_another_chain_close_a_gap() -> None:
    assert find_gaps([*places(0, 10, 20, 30, 60, 91), *places(75, snapshot="other")], at(91)).found == ()
