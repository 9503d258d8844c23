"""Clocks of nodes and of the machine: which are believed, and what time this process has then."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from time import process_time
from typing import cast

import pytest

import cutline.storage.clock
from cutline.fleet.progress import Silent
from cutline.nodes.clocks import (
    AGREE_SECONDS_MAX,
    Agreement,
    ClockReading,
    ClocksDifferError,
    _largest_group,
    check_clocks,
    find_agreement,
    note_late_clock,
    use_clocks,
)
from cutline.storage.clock import follow_machine, set_time, steady_seconds, utc_now

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY, HOUR = 86400.0, 3600.0


class Notes(Silent):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def own_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's clock says that it is noon, and nobody was told anything."""
    monkeypatch.setattr("cutline.nodes.clocks.machine_now", lambda: NOON)
    monkeypatch.setattr("cutline.nodes.clocks._told_seconds", 0.0)
    yield
    follow_machine()


def at(ahead: float) -> datetime:
    return NOON + timedelta(seconds=ahead)


def reading(node: str, ahead: float, took: float = 0.2) -> ClockReading:
    """A node whose clock is so many seconds ahead of this machine's; it was answered at noon."""
    return ClockReading(node, at(ahead - took / 2), at(-took), NOON)


def believed(*ahead: float, not_before: datetime | None = None) -> tuple[float, str] | None:
    """By how much the right time is ahead of this machine's clock, and the nodes that are right, named a, b, …."""
    readings = [reading(node, seconds) for node, seconds in zip("abcdef", ahead, strict=False)]
    found = find_agreement(readings, not_before)
    return None if found is None else (round(found.ahead_seconds, 3), "".join(sorted(found.nodes)))


def test_clocks_that_may_agree_leave_the_machines_time() -> None:
    assert believed(0.0, 0.9, -0.9) == (0, "abc")
    # The answer took 10 s, and may have been read at any moment of these.
    slow = find_agreement([reading("a", 4.0, took=10.0)])
    assert slow == Agreement(0.0, frozenset("a"))


@pytest.mark.parametrize("off", [1.2, -1.2, 400 * DAY, -400 * DAY])
def test_the_nodes_are_believed_and_not_the_machine(off: float) -> None:
    assert believed(off) == (off, "a")
    assert believed(off, off) == (off, "ab")
    assert believed(off, off + 0.4, off - 0.4) == (off, "abc")


def test_most_nodes_are_believed_and_not_the_others() -> None:
    assert believed(400 * DAY, 0.0, 0.0) == (0, "bc")
    assert believed(-400 * DAY, 90 * DAY, 400 * DAY, 90 * DAY, 90 * DAY) == (90 * DAY, "bde")


def test_where_nodes_are_divided_the_machine_decides() -> None:
    assert believed(0.0, 400 * DAY) == (0, "a")
    assert believed(400 * DAY, 100.0) == (100, "b")
    assert believed(HOUR, HOUR, 0.0, 0.0) == (0, "cd")


@pytest.mark.parametrize("clocks", [(HOUR, -HOUR), (HOUR, -HOUR, 2 * HOUR), (HOUR, HOUR, -HOUR, -HOUR)])
def test_where_too_few_agree_none_is_believed(clocks: tuple[float, ...]) -> None:
    assert believed(*clocks) is None


def test_clocks_before_the_last_cut_are_wrong() -> None:
    cut = at(-HOUR)
    assert believed(-400 * DAY, not_before=cut) == (0, "")
    assert believed(-400 * DAY, 30.0, not_before=cut) == (30, "b")
    # A cut of a moment ago, and clocks that were set back a little since, or that differ a little.
    assert believed(-2.0, not_before=at(200)) == (-2, "a")
    later = at(HOUR)
    assert believed(0.0, 0.0, not_before=later) is None
    assert believed(2 * HOUR, not_before=later) == (2 * HOUR, "a")
    assert believed(not_before=later) is None
    assert believed(not_before=cut) == (0, "")


def test_the_process_has_the_nodes_time_and_keeps_it_whatever_becomes_of_the_machines_clock() -> None:
    use_clocks([reading("a", 400 * DAY)])
    assert timedelta(0) <= utc_now() - at(400 * DAY) < timedelta(minutes=1)
    use_clocks([reading("a", 0.0)])
    assert abs(utc_now() - datetime.now(UTC)) < timedelta(minutes=1)
    # A reading of half an hour ago.
    set_time(NOON, steady_seconds() - 1800)
    assert timedelta(0) <= utc_now() - at(1800) < timedelta(minutes=1)


def test_a_machine_whose_clock_is_behind_a_cut_has_at_least_the_time_of_the_cut() -> None:
    notes = Notes()
    set_time(NOON, steady_seconds())
    note_late_clock(at(200), notes)
    assert notes.lines == []
    note_late_clock(at(400 * DAY), notes)
    assert notes.lines == [
        "a cut was made at 2027-12-25T12:00:00Z, but it is now 2026-11-20T12:00:00Z according to this machine"
    ]
    assert timedelta(0) <= utc_now() - at(400 * DAY) < timedelta(minutes=1)


def test_a_wrong_clock_is_told_once_and_again_when_it_changes() -> None:
    notes = Notes()
    for ahead in (400 * DAY, 400 * DAY + 0.5, 0.0, 0.0, -90.0, -7200.0):
        check_clocks([reading(node, ahead) for node in "abcd"], notes)
    start, end = "this machine's clock is ", ": the nodes' time is used; synchronize this machine's clock"
    nodes = "nodes a, b, c and 1 more"
    assert notes.lines == [
        f"{start}400 days behind {nodes}{end}",
        f"{start}90.0 s ahead of {nodes}{end}",
        f"{start}2 hours ahead of {nodes}{end}",
    ]


def test_a_refusal_names_every_clock() -> None:
    with pytest.raises(ClocksDifferError) as raised:
        check_clocks([reading("s1", HOUR), reading("s2", -HOUR)], Notes())
    assert raised.value.message == (
        "the clocks disagree, so none can be trusted: it is 2026-11-20T12:59:59Z according to node s1,"
        " 2026-11-20T10:59:59Z according to node s2, 2026-11-20T12:00:00Z according to this machine"
    )
    assert raised.value.exit_code == 3
    with pytest.raises(ClocksDifferError, match=r"^a cut was made at 2026-11-20T18:00:00Z, but it is now ") as raised:
        check_clocks([reading("s1", 0.0)], Notes(), at(6 * HOUR))
    assert "take a new full snapshot" in str(raised.value.hint)


def test_a_refusal_names_some_of_many_clocks() -> None:
    readings = [reading(f"s{n}", HOUR if n % 2 else -HOUR) for n in range(24)]
    with pytest.raises(ClocksDifferError) as raised:
        check_clocks(readings, Notes())
    shown = "s0, s2, s4, s6, s8, s10, s12, s14, s16, s18 and 2 more"
    assert f"it is 2026-11-20T10:59:59Z according to nodes {shown}, 2026" in raised.value.message
    assert raised.value.message.count("according to") == 3
    assert len(cast("dict[str, str]", raised.value.details["times"])) == 24


def test_the_largest_group_is_that_of_a_comparison_of_all_pairs() -> None:
    for seed in range(300):
        random = Random(seed)
        readings = [reading(f"n{n}", random.uniform(-900, 900)) for n in range(random.randrange(8))]
        machine = random.choice([[], [0.0]])
        ahead = [*(one.ahead_seconds for one in readings), *machine]
        groups = [[other for other in ahead if first <= other <= first + AGREE_SECONDS_MAX] for first in ahead]
        group = max(groups, key=len, default=[])
        found = [one.ahead_seconds for one in _largest_group(readings, machine)]
        assert found == group[: len(found)], seed
        assert group[len(found) :] in ([], machine), seed


def test_the_clocks_of_a_large_fleet_are_compared_at_once() -> None:
    readings = [reading(f"n{n}", n % 600) for n in range(5000)]
    began = process_time()
    assert find_agreement(readings) is not None
    # Comparing all pairs would take about a minute.
    assert process_time() - began < 5


def test_the_time_goes_on_while_it_is_not_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5.0, 8.5])
    monkeypatch.setattr("cutline.storage.clock.steady_seconds", lambda: next(counts))
    set_time(NOON, 3.0)
    assert [cutline.storage.clock.utc_now(), cutline.storage.clock.utc_now()] == [at(2), at(5.5)]
