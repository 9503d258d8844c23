from __future__ import annotations

import pytest

from cutline.snapshots.create.sequences import SequenceReading, find_restarted, latest_sequences
from cutline.snapshots.records.commit import Sequence


def sequence(last_value: int, *, is_called: bool = True, increment: int = 1, cycles: bool = False) -> Sequence:
    return Sequence(
        "s", "n", last_value, is_called=is_called, increment=increment, cycles=cycles, smallest=1, largest=9
    )


def reading(*sequences: Sequence) -> SequenceReading:
    return SequenceReading(sequences, {})


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
    assert latest_sequences(reading(before), reading(after)) == (expected,)


def test_new_sequences_are_kept_and_dropped_ones_are_not() -> None:
    gone, new = Sequence("s", "gone", 1, False, 1, False, 1, 9), Sequence("s", "new", 2, False, 1, False, 1, 9)  # noqa: FBT003  # as stored
    assert latest_sequences(reading(gone), reading(new)) == (new,)


def test_a_sequence_with_a_new_version_was_restarted() -> None:
    before = SequenceReading((), {"s.same": "700", "s.restarted": "700", "s.gone": "700"})
    after = SequenceReading((), {"s.same": "700", "s.restarted": "701", "s.new": "701"})
    assert find_restarted(before, after) == ["s.restarted", "s.new"]
