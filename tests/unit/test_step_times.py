"""The seconds of each step, as outcomes record them."""

from __future__ import annotations

import pytest

import cutline.fleet.progress as step_times
from cutline.fleet.progress import OTHERS, PHASES_MAX, Silent, StepTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(step_times.time, "monotonic", lambda: now[0])
    return now


def test_each_step_lasts_until_the_next_and_repeated_ones_are_added_up(clock: list[float]) -> None:
    times = StepTimes(Silent())
    clock[0] += 5.0
    assert times.phases() == {}
    for name, seconds in (("cut", 1.0), ("archive WAL", 2.0), ("cut", 0.25), ("commit", 4.0)):
        times.step(name)
        clock[0] += seconds
    assert list(times.phases().items()) == [("cut", 1.25), ("archive WAL", 2.0), ("commit", 4.0)]
    # The step goes on.
    clock[0] += 1.0
    assert times.phases()["commit"] == 5.0


def test_of_many_steps_the_shortest_are_recorded_together(clock: list[float]) -> None:
    times = StepTimes(Silent())
    for number in range(PHASES_MAX + 3):
        times.step(f"check {number}")
        clock[0] += number + 1.0
    phases = times.phases()
    assert len(phases) == PHASES_MAX + 1
    # The first three take 1, 2 and 3 seconds.
    assert phases[OTHERS] == 6.0
    assert phases[f"check {PHASES_MAX + 2}"] == PHASES_MAX + 3.0
