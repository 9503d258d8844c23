"""The segments that a chain still needs when it begins with a merge; expected values come from the ranges of WAL."""

from __future__ import annotations

import pytest

from cutline.fleet.lsn import Lsn
from cutline.snapshots.records.documents import parse_key
from cutline.snapshots.records.merge_records import MergedCopy, begin_key, merge_key
from cutline.snapshots.records.merged_chain import needed_segments
from cutline.wal.segments.archive import OpenTransaction, Segment


def segment(number: int, after: int, through: int, opened: int | None = None) -> Segment:
    opening = None if opened is None else OpenTransaction(Lsn(opened), 0, 0)
    return Segment(
        key=f"wal/{number}", number=number, size=1, digest="", changes=1, events=0, partials=0, truncates=0, node="a",
        operation="op", after=Lsn(after), through=Lsn(through), open=opening,
    )  # fmt: skip


ARCHIVE = (
    segment(1, 0, 100),
    segment(2, 100, 200, opened=350),
    segment(3, 200, 300, opened=350),
    segment(4, 300, 400),
    segment(5, 400, 500),
)


@pytest.mark.parametrize(
    ("counted_from", "pending", "in_doubt", "first"),
    [
        (350, (), (), 2),  # The transaction at 350 is not before the position, and begins in segment 2.
        (360, (), (), 2),  # Segment 4 has the end of the transaction at 350.
        (360, (350,), (), 2),
        (360, (250,), (), 2),
        (360, (), (50,), 1),
        (399, (), (), 2),
        (400, (), (), 5),
        (400, (99,), (), 1),
        (400, (300,), (), 2),
        (500, (), (), 5),
        (0, (), (), 1),
    ],
)
def test_segments_are_kept_from_the_first_that_still_counts(
    counted_from: int, pending: tuple[int, ...], in_doubt: tuple[int, ...], first: int
) -> None:
    copy = MergedCopy(base=Lsn(500), counted_from=Lsn(counted_from), pending=tuple(map(Lsn, pending)))
    kept = needed_segments(ARCHIVE, copy, map(Lsn, in_doubt))
    assert [one.number for one in kept] == list(range(first, 6))


@pytest.mark.parametrize(
    ("begin", "end", "earlier", "counting"),
    [
        (0, 1000, (), [1, 2, 3, 4, 5]),
        (0, 150, (), [1, 2]),
        (340, 1000, (), [2, 3, 4, 5]),
        (360, 1000, (), [4, 5]),
        (400, 1000, (), [5]),
        (500, 1000, (), []),
        (500, 1000, (350,), [2, 3, 4]),
        # The state at the cut of the merge itself: only what was prepared before and committed later may count.
        (450, 450, (), []),
        (450, 450, (50,), [1]),
    ],
)
def test_only_segments_with_changes_that_may_count_are_needed(
    begin: int, end: int, earlier: tuple[int, ...], counting: list[int]
) -> None:
    found = [one.number for one in ARCHIVE if one.may_count(Lsn(begin), Lsn(end), map(Lsn, earlier))]
    assert found == counting


def test_an_archive_without_segments_needs_none() -> None:
    assert needed_segments((), MergedCopy(base=Lsn(1), counted_from=Lsn(1))) == ()


def test_the_keys_are_those_of_the_snapshot() -> None:
    assert merge_key("chain", 30, 2) == "snapshots/chain/merges/0000000000000030.2.json"
    for key, number in ((merge_key("chain", 30), 30), (begin_key("chain", 30), 0)):
        parsed = parse_key("chain", key)
        assert parsed is not None
        assert parsed.number == number
