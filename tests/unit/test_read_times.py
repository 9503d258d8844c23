"""When objects were last read: places, parts and increments, in a record of bounded size."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cutline.check.read_times import (
    LastReads,
    PlaceRange,
    due_ranges,
    due_share,
    hashes_of,
    milliseconds_of,
    moment_of,
    places_of,
    subset_range,
)
from cutline.fleet.record import Time
from cutline.snapshots.records.operation_records import PLACES, READ_ENTRIES_MAX, ReadIncrement, ReadPart, ReadTimes

HALF = PLACES // 2


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def recorded(times: LastReads) -> ReadTimes:
    parts, increments = times.record()
    at = Time("2026-11-20T00:00:00Z")
    return ReadTimes(
        commits="d", last_operation="op", store="s", version="1", rules=1, compared_by="", compared_at=at,
        oldest_at=at, parts=parts, increments=increments,
    )  # fmt: skip


def test_a_moment_is_the_milliseconds_that_it_was_converted_to() -> None:
    moment = datetime(2026, 11, 20, 1, 2, 3, 4567, tzinfo=UTC)
    assert milliseconds_of(moment) == 1795136523004
    assert moment_of(1795136523004) == moment.replace(microsecond=4000)


def test_a_place_depends_only_on_the_key_and_subsets_divide_all_places() -> None:
    keys = [f"snapshots/daily/base/a/op/part-{number}.parquet" for number in range(1000)]
    places = places_of(hashes_of(keys))
    assert (places == places_of(hashes_of(keys[::-1]))[::-1]).all()
    assert ((places >= 0) & (places < PLACES)).all()
    for count in (1, 3, 7):
        ranges = [subset_range(number, count) for number in range(1, count + 1)]
        assert [ranges[0].low, ranges[-1].high] == [0, PLACES]
        assert [one.high for one in ranges[:-1]] == [one.low for one in ranges[1:]]
        counts = [int(((places >= one.low) & (places < one.high)).sum()) for one in ranges]
        assert sum(counts) == 1000
        # A binomial distribution: a fifth less than expected would be six standard deviations and more.
        assert min(counts) > 0.8 * 1000 / count


def test_an_object_was_last_read_when_its_part_was_reread_or_when_its_increment_was_read() -> None:
    times = LastReads.of_full(3, 100).with_increments(5, 200).with_part(PlaceRange(HALF, PLACES), 300)
    places, increments = ints(0, HALF - 1, HALF, 0, 0, HALF), ints(0, 3, 3, 4, 5, 5)
    assert times.last_read(places, increments).tolist() == [100, 100, 300, 200, 200, 300]
    # Increment 6 was read after the rereading, which did not cover it.
    times = times.with_increments(6, 250)
    assert times.last_read(ints(0, HALF), ints(6, 6)).tolist() == [250, 300]
    assert times.newest == 300


@given(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 64), st.integers(1, 1000)), max_size=80))
def test_parts_are_what_was_read_last_and_merging_makes_no_time_later(drawn: list[tuple[int, int, int]]) -> None:
    """Compared with an array of 64 cells, each a part of the places."""
    cell = PLACES // 64
    times, cells = LastReads.of_full(0, 1), np.ones(64, np.int64)
    places, increments = np.arange(64, dtype=np.int64) * cell + cell // 2, np.zeros(64, np.int64)
    for low, width, at in drawn:
        high = min(low + width, 64)
        times = times.with_part(PlaceRange(low * cell, high * cell), at)
        cells[low:high] = at
        assert times.last_read(places, increments).tolist() == np.maximum(cells, 1).tolist()
    compacted = times.compacted()
    assert len(compacted.parts) <= READ_ENTRIES_MAX
    # 64 cells fit, so nothing was lost.
    assert compacted.last_read(places, increments).tolist() == np.maximum(cells, 1).tolist()
    assert LastReads.of(recorded(compacted)) == compacted


def test_a_record_of_years_stays_small_and_errs_towards_rereading() -> None:
    hour, bound = 3_600_000, 30 * 24
    times = LastReads.of_full(0, 0)
    exact_parts, exact_increments = np.zeros(bound, np.int64), [0]
    step, rng = PLACES // bound, np.random.default_rng(1)
    for number in range(1, 3 * bound):
        now = number * hour
        times = times.with_increments(number, now)
        exact_increments.append(now)
        at = (number - 1) % bound
        times = times.with_part(PlaceRange(at * step, (at + 1) * step), now).compacted()
        exact_parts[at] = now
        assert max(len(times.parts), len(times.increments)) <= READ_ENTRIES_MAX
    cells, increments = rng.integers(0, bound, 2000), rng.integers(0, 3 * bound, 2000)
    exact = np.maximum(exact_parts[cells], np.array(exact_increments)[increments])
    found = times.last_read(cells * step, increments)
    assert (found <= exact).all()
    # 64 entries for a rotation of 720 hours: on average, a time is off by less than a day.
    assert (exact - found).mean() < 24 * hour
    assert found.min() > now - 2 * bound * hour


@pytest.mark.parametrize(("parts", "increments"), [
    ([(HALF, 1), (HALF, 2), (PLACES, 3)], [(0, 1)]),
    ([(PLACES, 1), (HALF, 1)], [(0, 1)]),
    ([(HALF, 1)], [(0, 1)]),
    ([(PLACES, 1)], [(3, 1), (2, 1)]),
])  # fmt: skip
def test_a_record_whose_entries_do_not_cover_every_place_in_order_is_refused(
    parts: list[tuple[int, int]], increments: list[tuple[int, int]]
) -> None:
    record = recorded(LastReads.of_full(0, 1))
    at = Time("2026-11-20T00:00:00Z")
    changed = {
        "parts": tuple(ReadPart(below, at) for below, _ in parts),
        "increments": tuple(ReadIncrement(number, at) for number, _ in increments),
    }
    with pytest.raises(ValueError, match=r"entries are not in order|do not cover every place"):
        LastReads.of(structs.replace(record, **changed))


def test_what_is_due_is_what_was_read_longest_ago_and_enough_to_finish_in_time() -> None:
    day = 86400.0
    # 24 of 30 days for a rotation: a day's share is a 24th.
    assert due_share(day, 30 * day) == pytest.approx(1 / 24)
    assert due_share(-5.0, 30 * day) == 0
    assert due_share(60 * day, 30 * day) == 1
    times = LastReads.of_full(0, 100).with_part(PlaceRange(0, HALF), 300).with_part(PlaceRange(0, 1000), 50)
    nothing = lambda _: False  # noqa: E731  # shorter than a function
    assert due_ranges(times, 0.0, nothing) == []
    assert due_ranges(times, 10 / PLACES, nothing) == [PlaceRange(0, 10)]
    assert due_ranges(times, 1010 / PLACES, nothing) == [PlaceRange(0, 1000), PlaceRange(HALF, HALF + 10)]
    everything = due_ranges(times, 1.0, nothing)
    assert everything == [PlaceRange(0, 1000), PlaceRange(HALF, PLACES), PlaceRange(1000, HALF)]
    # What is overdue is reread whatever the share, and counts towards it.
    assert due_ranges(times, 0.25, lambda one: one.low == HALF) == [PlaceRange(0, 1000), PlaceRange(HALF, PLACES)]
