"""Which WAL a command drains itself, and how many nodes at a time."""

from __future__ import annotations

import pytest

from cutline.wal.drain.lags import drains_at_once, is_for_spark

MIB = 1 << 20


@pytest.mark.parametrize(
    ("mebibytes", "is_own"),
    [
        ([], True),
        ([0], True),
        # Spark could not divide the work either.
        ([100_000], True),
        ([100_000, 256], True),
        ([100_000, 257], False),
        ([200, 200], True),
        ([300, 300], False),
        ([2] * 120, True),
        ([2] * 130, False),
    ],
)
def test_spark_must_have_nodes_to_drain_side_by_side(mebibytes: list[int], *, is_own: bool) -> None:
    assert is_for_spark({str(number): size * MIB for number, size in enumerate(mebibytes)}) != is_own


@pytest.mark.parametrize(
    ("mebibytes", "at_once"),
    [([], 8), ([0, 0], 8), ([64] * 3, 8), ([65], 7), ([128, 1], 4), ([256, 1], 2), ([9999], 2)],
)
def test_fewer_nodes_are_drained_at_a_time_if_one_has_much_wal(mebibytes: list[int], at_once: int) -> None:
    assert drains_at_once(size * MIB for size in mebibytes) == at_once
