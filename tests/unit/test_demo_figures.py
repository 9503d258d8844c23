from __future__ import annotations

import pytest

from cutline.cli.demo.figures import longest_gap, marks, rates, sparkline


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▂▅█"


@pytest.mark.parametrize("values", [[], [0.0, 0.0]])
def test_a_sparkline_of_nothing_is_empty(values: list[float]) -> None:
    assert sparkline(values).strip() == ""


def test_rates_count_every_moment_once() -> None:
    moments = [10.0, 10.1, 11.9, 12.0, 13.5]
    found = rates(moments, 10.0, 14.0, 4)
    assert found == [2.0, 1.0, 1.0, 1.0]


def test_marks_stand_at_their_moments() -> None:
    assert marks({"0": 0.0, "1": 5.0, "x": 10.0}, 0.0, 10.0, 10) == "0    1   x"


def test_marks_never_cover_one_another() -> None:
    assert sorted(marks({"0": 5.0, "1": 5.0, "2": 5.0}, 0.0, 10.0, 10).replace(" ", "")) == ["0", "1", "2"]


def test_the_longest_gap_counts_from_the_start_of_the_bank() -> None:
    assert longest_gap([3.0, 4.0, 6.0], 0.0) == 3.0
    assert longest_gap([], 0.0) == 0.0
