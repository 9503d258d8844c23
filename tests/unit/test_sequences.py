from __future__ import annotations

import pytest

from snapshots.create.sequences import latest_sequences
from snapshots.records.commit import Sequence


def one(last_value: int, *, is_called: bool = True, increment: int = 1, cycles: bool = False) -> Sequence:
    return Sequence("s", "n", last_value, is_called=is_called, increment=increment, cycles=cycles)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (one(5), one(9), one(9)),
        (one(9), one(5), one(9)),
        (one(9), one(9, is_called=False), one(9)),
        (one(9, is_called=False), one(9), one(9)),
        (one(1), one(500, is_called=False), one(500, is_called=False)),
        (one(-5, increment=-3), one(-9, increment=-3), one(-9, increment=-3)),
        (one(-9, increment=-3), one(-5, increment=-3), one(-9, increment=-3)),
        # Where it begins again it is not behind, and where it was turned round neither.
        (one(9, cycles=True), one(1, cycles=True), one(1, cycles=True)),
        (one(9), one(3, increment=-1), one(3, increment=-1)),
    ],
)
def test_a_sequence_is_never_behind_where_it_stood(before: Sequence, after: Sequence, expected: Sequence) -> None:
    assert latest_sequences({"a": [before]}, {"a": [after]}) == {"a": (expected,)}


def test_sequences_that_came_since_stay_and_those_that_went_do_not() -> None:
    gone, new = Sequence("s", "gone", 1, False, 1, False), Sequence("s", "new", 2, False, 1, False)  # noqa: FBT003  # as stored
    assert latest_sequences({"a": [gone], "b": []}, {"a": [new], "b": []}) == {"a": (new,), "b": ()}
