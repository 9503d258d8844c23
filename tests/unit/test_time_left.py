"""A restore's time left: by the estimate at first, and the more by the pace of the run itself, the further it is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cutline.cli.output.restore_report import time_line
from cutline.fleet.progress import Reading, Silent
from cutline.restore.estimates import pace
from cutline.restore.estimates.estimate import COSTS, Estimate, RestoreStep, ShardVolume, estimate_restore
from cutline.restore.estimates.pace import RestorePace
from cutline.snapshots.fold.limits import CHANGES_MAX
from cutline.snapshots.records.operation_records import RestoreFigures, StepFigures

# Long ones: of a few seconds the pace says little.
SECONDS = {RestoreStep.SPARK: 500.0, RestoreStep.FOLD: 500.0, RestoreStep.ROWS: 2000.0, RestoreStep.INDEXES: 1000.0}


class Told(Silent):
    """Keeps the last reading."""

    last: Reading = Reading(0)

    def tell(self, reading: Reading) -> None:
        self.last = reading


class Clock:
    now = 500.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace.time, "monotonic", clock.monotonic)
    return clock


def volume(rows: int, changes: int = 0) -> ShardVolume:
    return ShardVolume({"s.t": rows}, changes, rows * 50, 0, 0, rows * 60, rows * 200, False, 1, {"s.t": 2})  # noqa: FBT003


def run_steps(clock: Clock, told: Told, factor: float) -> dict[str, tuple[float, float]]:
    """Run the steps `factor` times as long as estimated; return what was said, and what was really left."""
    clock.now = 500.0
    left = RestorePace(told, Estimate(SECONDS), "op")
    end = clock.now + factor * sum(SECONDS.values())
    found: dict[str, tuple[float, float]] = {}
    for step, seconds in SECONDS.items():
        left.step(step)
        for part in (0.25, 0.5, 0.75):
            clock.now += factor * seconds * 0.25
            left.tell(Reading(int(1000 * part), 1000, "rows"))
            found[f"{step} {part}"] = (told.last.seconds_left or -1.0, end - clock.now)
        clock.now += factor * seconds * 0.25
    return found


@pytest.mark.parametrize(("is_resumed", "left"), [(True, 1000.0), (False, 250.0)])
def test_what_was_loaded_before_does_not_count_for_the_pace_of_a_resumed_restore(
    clock: Clock, *, is_resumed: bool, left: float
) -> None:
    """Of 1000 rows 600 are there; 200 take 1000 seconds, and so do the others."""
    told = Told()
    resumed = RestorePace(told, Estimate({RestoreStep.ROWS: 2000.0}), "op", is_resumed=is_resumed)
    resumed.step(RestoreStep.ROWS)
    resumed.tell(Reading(600, 1000, "rows"))
    clock.now += 1000.0
    resumed.tell(Reading(800, 1000, "rows"))
    assert told.last.seconds_left == pytest.approx(left, rel=0.02)


def test_indexes_created_during_the_load_do_not_count_for_the_pace_of_their_step(clock: Clock) -> None:
    """Of 1000 rows 600 are indexed; 200 take 1000 seconds, and so do the others."""
    told = Told()
    running = RestorePace(told, Estimate({RestoreStep.INDEXES: 2000.0}), "op", has_early_indexes=True)
    running.step(RestoreStep.INDEXES)
    running.tell(Reading(600, 1000, "indexed rows"))
    clock.now += 1000.0
    running.tell(Reading(800, 1000, "indexed rows"))
    assert told.last.seconds_left == pytest.approx(1000.0, rel=0.1)


@pytest.mark.parametrize(("fixed", "left"), [(500.0, 500.0), (200.0, 800.0), (900.0, 500.0)])
def test_a_load_that_begins_slowly_goes_on_at_the_pace_of_its_rows(clock: Clock, fixed: float, left: float) -> None:
    """For 500 seconds no row comes, then half of them within 500 seconds; `fixed` of the idle ones don't count."""
    told = Told()
    running = RestorePace(told, Estimate({RestoreStep.ROWS: 2000.0}, fixed={RestoreStep.ROWS: fixed}), "op")
    running.step(RestoreStep.ROWS)
    for rows in (0, 500):
        clock.now += 500.0
        running.tell(Reading(rows, 1000, "rows"))
    assert told.last.seconds_left == pytest.approx(left, rel=0.02)


def test_between_two_readings_the_time_is_counted_down_and_a_reading_of_one_node_changes_nothing(clock: Clock) -> None:
    told = Told()
    running = RestorePace(told, Estimate({RestoreStep.ROWS: 2000.0}), "op")
    running.step(RestoreStep.ROWS)
    clock.now += 1000.0
    running.tell(Reading(500, 1000, "rows"))
    for seconds in (10.0, 20.0):
        clock.now += 10.0
        running.tell(Reading(400, 500, "rows", "s1"))
        assert told.last.seconds_left == pytest.approx(1000.0 - seconds, rel=0.01)
    # Nor does one of a phase in which nothing is counted.
    clock.now += 480.0
    running.tell(Reading(500, 1000, "rows"))
    assert told.last.seconds_left == pytest.approx(500.0, rel=0.01)
    # It has stood still for longer than was left.
    clock.now += 600.0
    running.tell(Reading(500, 1000, "rows"))
    assert told.last.seconds_left == pytest.approx(2100.0, rel=0.01)


def test_steps_that_took_a_little_more_or_less_say_nothing_of_those_that_follow(clock: Clock) -> None:
    for factor, least, most in ((0.8, 0.9, 1.0), (1.25, 1.0, 1.1), (4.0, 3.0, 4.0)):
        told = Told()
        running = RestorePace(told, Estimate(SECONDS), "op")
        for step, seconds in list(SECONDS.items())[:3]:
            running.step(step)
            clock.now += factor * seconds
        running.step(RestoreStep.INDEXES)
        running.tell(Reading(0, 1000, "rows"))
        assert least <= (told.last.seconds_left or 0.0) / SECONDS[RestoreStep.INDEXES] <= most, factor


def test_what_takes_as_long_as_estimated_is_said_exactly(clock: Clock) -> None:
    for said, real in run_steps(clock, Told(), 1.0).values():
        assert said == pytest.approx(real)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_what_takes_otherwise_is_right_from_the_middle_of_the_longest_step_on(clock: Clock, factor: float) -> None:
    found = run_steps(clock, Told(), factor)
    # At the first one nothing is known yet: the estimate is wrong by the factor.
    said, real = found[f"{RestoreStep.SPARK} 0.25"]
    assert abs(said / real - 1) > 0.2
    for moment in (f"{RestoreStep.ROWS} 0.5", f"{RestoreStep.ROWS} 0.75", f"{RestoreStep.INDEXES} 0.5"):
        said, real = found[moment]
        assert said == pytest.approx(real, rel=0.2), moment


def test_the_seconds_of_steps_are_measured_once_each(clock: Clock) -> None:
    left = RestorePace(Told(), Estimate(SECONDS, dict.fromkeys(SECONDS, 7)), "op")
    for step in SECONDS:
        left.step(step)
        clock.now += 2
    left.end_node("s1", 70, {RestoreStep.INDEXES: 1.5})
    figures = left.figures(900, 7)
    assert figures.steps == {str(step): StepFigures(2.0, 7) for step in SECONDS}
    assert (figures.rows, figures.bytes, figures.transactions, figures.seconds) == (70, 900, 7, 8.0)


def test_figures_scale_the_fixed_time_of_small_restores_and_the_rate_of_large_ones() -> None:
    cost = COSTS[RestoreStep.ROWS]
    for rows in (1, 10**9):
        measured = StepFigures(3 * cost.seconds(rows), rows)
        figures = RestoreFigures(rows, 0, 0.0, {str(RestoreStep.ROWS): measured}, {}, transactions=0)
        for other in (rows, 2 * rows):
            expected = estimate_restore([volume(other)], figures, "op").seconds[RestoreStep.ROWS]
            assert expected == pytest.approx(3 * cost.seconds(other), rel=0.01)
    # Much more than was measured: what was fixed says nothing about the rate.
    figures = RestoreFigures(
        1, 0, 0.0, {str(RestoreStep.ROWS): StepFigures(3 * cost.seconds(1), 1)}, {}, transactions=0
    )
    far = estimate_restore([volume(10**9)], figures, "op").seconds[RestoreStep.ROWS]
    assert far == pytest.approx(cost.seconds(10**9), rel=0.02)


def test_figures_of_one_way_to_fold_say_nothing_of_another() -> None:
    few, many = volume(1000, CHANGES_MAX), volume(1000, CHANGES_MAX + 1)
    expected = estimate_restore([few]).seconds
    for measured in (few, many):
        slow = estimate_restore([measured])
        taken = {str(step): StepFigures(3 * seconds, slow.amounts[step]) for step, seconds in slow.seconds.items()}
        found = estimate_restore([few], RestoreFigures(1000, 0, 0.0, taken, {}, transactions=0), "op").seconds
        assert found[RestoreStep.SPARK] == pytest.approx(3 * expected[RestoreStep.SPARK])
        for step in (RestoreStep.FOLD, RestoreStep.ROWS):
            assert (found[step] > 2 * expected[step]) == (measured is few)
            assert (found[step] == expected[step]) == (measured is many)


@pytest.mark.parametrize(
    ("before", "rows", "is_rough"),
    [(10**8, 10**8, False), (7 * 10**7, 10**8, False), (14 * 10**7, 10**8, False), (6 * 10**7, 10**8, True),
     (16 * 10**7, 10**8, True), (1000, 1000, True), (0, 10**8, True)],
)  # fmt: skip
def test_only_a_long_restore_of_about_the_measured_size_is_estimated_surely(
    before: int, rows: int, *, is_rough: bool
) -> None:
    seconds = 200 * before / 10**8
    figures = RestoreFigures(
        before, 0, seconds, {str(RestoreStep.ROWS): StepFigures(seconds, before)}, {}, transactions=0
    )
    measured = figures if before else None
    assert estimate_restore([volume(rows)], measured, "op").is_rough == is_rough
    assert estimate_restore([volume(rows)], measured, "op", is_resumed=True).is_rough


def test_an_estimate_is_rough_without_a_measured_load_of_its_kind() -> None:
    # As many rows, and so many changes that these are folded in another way.
    few, many = volume(10**8, CHANGES_MAX), volume(10**8, CHANGES_MAX + 1)
    figures = {}
    for one in (few, many):
        expected = estimate_restore([one])
        taken = {str(step): StepFigures(seconds, expected.amounts[step]) for step, seconds in expected.seconds.items()}
        figures[one.changes] = RestoreFigures(one.row_count, 0, expected.total, taken, {}, transactions=0)
    assert not estimate_restore([many], figures[many.changes], "op").is_rough
    assert estimate_restore([many], figures[few.changes], "op").is_rough
    # No rows: nothing was loaded, and nothing was measured.
    tables = replace(volume(0), tables=10**6)
    assert estimate_restore([tables]).total > 100
    assert estimate_restore([tables]).is_rough


@pytest.mark.parametrize("is_rough", [True, False])
def test_every_reading_says_whether_its_time_left_is_rough(clock: Clock, *, is_rough: bool) -> None:
    told = Told()
    running = RestorePace(told, Estimate(SECONDS, is_rough=is_rough), "op")
    running.step(RestoreStep.ROWS)
    assert told.last.is_rough == is_rough
    clock.now += 1.0
    running.tell(Reading(1, 10, "rows", "s1"))
    assert (told.last.node, told.last.is_rough) == ("s1", is_rough)


def test_a_step_that_is_late_corrects_the_time_left_while_nothing_tells_how_far_it_is(clock: Clock) -> None:
    told = Told()
    running = RestorePace(told, Estimate({RestoreStep.SPARK: 3.0, RestoreStep.ROWS: 4.0}), "op")
    running.step(RestoreStep.SPARK)
    assert told.last.seconds_left == pytest.approx(7.0)
    clock.now += 30.0
    running.correct()
    # Half of what it is late, and the load ten times as long as expected.
    assert told.last.seconds_left == pytest.approx(0.5 * 27.0 + 4.0 * 10.0)
    running.step(RestoreStep.ROWS)
    running.tell(Reading(500, 1000, "rows"))
    before = told.last
    running.correct()
    assert told.last is before


def test_an_estimate_is_a_range_that_a_busy_machine_widens() -> None:
    idle, busy = estimate_restore([volume(1000)]), estimate_restore([volume(1000)], load=2.0)
    assert idle.bounds == (idle.total / 2, idle.total * 10)
    assert busy.bounds == (idle.total / 2, idle.total * 30)
    sure = Estimate({RestoreStep.ROWS: 100.0}, basis="op", is_rough=False)
    assert sure.bounds == (80.0, 125.0)


def test_a_plan_gives_a_range_only_if_a_restore_was_measured() -> None:
    seconds = {RestoreStep.ROWS: 20.0}
    unmeasured = " (no restore of all rows from this store has been measured yet)"
    assert time_line(Estimate(seconds)) == f"time: at most about 3 min 20 s, updated as it runs{unmeasured}"
    assert time_line(Estimate(seconds, basis="op")) == "time: 10.0 s to 1 min 00 s, updated as it runs, based on op"
    assert time_line(Estimate(seconds, basis="op", is_rough=False)) == "time: about 20.0 s, based on op"
