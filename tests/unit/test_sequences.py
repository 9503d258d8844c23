from __future__ import annotations

import pytest

from cutline.snapshots.create.sequences import latest_sequences
from cutline.snapshots.records.commit import Sequence


def sequence(last_value: int, *, is_called: bool = True, increment: int = 1, cycles: bool = False) -> Sequence:
    return Sequence(
        "s", "n", last_value, is_called=is_called, increment=increment, cycles=cycles, smallest=1, largest=9
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (sequence(5), sequence(9), sequence(9)),
        (sequence(9), sequence(5), sequence(9)),
        (sequence(9), sequence(9, is_called=False), sequence(9)),
        (sequence(9, is_called=False), sequence(9), sequence(9)),
        (sequence(1), sequence(500, is_called=False), sequence(500, is_called=False)),
        (sequence(-5, increment=-3), sequence(-9, increment=-3), sequence(-9, increment=-3)),
        (sequence(-9, increment=-3), sequence(-5, increment=-3), sequence(-9, increment=-3)),
        # A sequence that cycled is not behind, nor is one whose direction was reversed.
        (sequence(9, cycles=True), sequence(1, cycles=True), sequence(1, cycles=True)),
        (sequence(9), sequence(3, increment=-1), sequence(3, increment=-1)),
    ],
)
def test_a_sequence_is_never_behind_where_it_stood(before: Sequence, after: Sequence, expected: Sequence) -> None:
    assert latest_sequences({"a": [before]}, {"a": [after]}) == {"a": (expected,)}


def test_new_sequences_are_kept_and_dropped_ones_are_not() -> None:
    gone, new = Sequence("s", "gone", 1, False, 1, False, 1, 9), Sequence("s", "new", 2, False, 1, False, 1, 9)  # noqa: FBT003  # as stored
    assert latest_sequences({"a": [gone], "b": []}, {"a": [new], "b": []}) == {"a": (new,), "b": ()}
