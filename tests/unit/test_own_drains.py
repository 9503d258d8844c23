"""Which WAL a command drains itself, and how many nodes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cutline.wal.drain.lags import drain_rounds, drains_at_once, is_for_spark

MIB = 1 << 20


@dataclass(frozen=True)
class Drain:
    wal_bytes: int


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
    [([], 16), ([0, 4], 16), ([5], 8), ([64] * 3, 8), ([65], 7), ([128, 1], 4), ([256, 1], 2), ([9999], 2)],
)
def test_fewer_nodes_are_drained_at_a_time_if_one_has_much_wal(mebibytes: list[int], at_once: int) -> None:
    assert drains_at_once(size * MIB for size in mebibytes) == at_once


@pytest.mark.parametrize(
    ("mebibytes", "rounds"),
    [
        ([], []),
        ([0, 3, 1], [([3, 1, 0], 16)]),
        ([0, 256, 4, 5], [([256, 5], 2), ([4, 0], 16)]),
        ([9, 70], [([70, 9], 7)]),
    ],
)
def test_a_node_with_much_wal_does_not_slow_down_the_drains_of_idle_nodes(
    mebibytes: list[int], rounds: list[tuple[list[int], int]]
) -> None:
    found = [
        ([task.wal_bytes // MIB for task in tasks], at_once)
        for tasks, at_once in drain_rounds(Drain(size * MIB) for size in mebibytes)
    ]
    assert found == rounds
