"""Prepared transactions that a base copy lacks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pyarrow as pa
import pytest

from cutline.fleet.lsn import Lsn
from cutline.snapshots.base_copy.copy_slots import find_changed_groups, find_prepared
from cutline.storage.memory import InMemoryStore
from cutline.wal.segments.archive import SegmentRange
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment

NAMES = count()
COPIED, OTHER = 5, 6
COPY = 200
HELD = SegmentRange("n1", "op", Lsn(0), Lsn(1000))

# A row of a segment: op, LSN, end LSN, xid, group.
Row = tuple[str, int, int, int, int]


def row(row: Row) -> dict[str, object]:
    op, lsn, end, xid, group = row
    return {
        "lsn": lsn, "end_lsn": end, "seq": 0, "xid": xid, "global_id": f"g{xid}", "op": ord(op), "group": group,
        "partition": 0, "key": b"1", "row": b"1\n",
    }  # fmt: skip


def find_in_archive(changes: Sequence[Row], events: Sequence[Row], split: int = 0) -> list[str]:
    """Find the late writers in an archive; the events from `split` on are in a second segment."""
    store = InMemoryStore(f"memory://late-{next(NAMES)}")
    parts = [(changes, events[:split]), ((), events[split:])] if split else [(changes, events)]
    segments = [
        create_segment(
            store, "wal", number, HELD,
            tuple(pa.Table.from_pylist([row(one) for one in rows], schema=SEGMENT_SCHEMA) for rows in part),  # type: ignore[arg-type]
            continued=None,
        ).segment
        for number, part in enumerate(parts, start=1)
    ]  # fmt: skip
    prepared = find_prepared(store, segments, Lsn(COPY))
    changed = find_changed_groups(store, segments, prepared, {COPIED})
    assert all(groups == {COPIED} for groups in changed.values())
    assert list(changed) == sorted(changed)
    return [prepared[lsn] for lsn in changed]


CHANGE: Row = ("U", 100, 100, 7, COPIED)
PREPARE: Row = ("P", 100, 110, 7, 0)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([PREPARE], ["g7"]),
        ([PREPARE, ("K", 250, 260, 7, 0)], ["g7"]),
        # A rollback has two positions: the end of the PREPARE, and its own end.
        ([PREPARE, ("R", 110, 260, 7, 0)], ["g7"]),
        ([PREPARE, ("K", 150, COPY, 7, 0)], []),
        ([PREPARE, ("R", 110, 160, 7, 0)], []),
        ([PREPARE, ("K", 150, 160, 8, 0)], ["g7"]),
        ([("P", 220, 230, 7, 0)], []),
        ([("C", 100, 110, 7, 0)], []),
        ([], []),
    ],
)
def test_a_transaction_prepared_before_the_copy_and_decided_after_it_is_late(
    events: list[Row], expected: list[str]
) -> None:
    assert find_in_archive([CHANGE], events) == expected


def test_only_transactions_that_changed_a_copied_group_count() -> None:
    events: list[Row] = [PREPARE, ("P", 120, 130, 8, 0)]
    assert find_in_archive([("U", 100, 100, 7, OTHER)], events) == []
    assert find_in_archive([("U", 100, 100, 7, OTHER), ("I", 120, 120, 8, COPIED)], events) == ["g8"]
    # A change of another transaction, at another position.
    assert find_in_archive([("U", 90, 90, 9, COPIED)], events) == []


def test_a_decision_in_a_later_segment_counts() -> None:
    assert find_in_archive([CHANGE], [PREPARE, ("K", 150, 160, 7, 0)], split=1) == []
    assert find_in_archive([CHANGE], [PREPARE, ("K", 250, 260, 7, 0)], split=1) == ["g7"]


def test_transactions_that_were_decoded_when_they_were_decided_are_found_in_later_segments() -> None:
    store = InMemoryStore(f"memory://late-{next(NAMES)}")
    # What was prepared before the slot existed is archived with its COMMIT PREPARED, here in the second segment.
    parts: list[list[Row]] = [
        [PREPARE, ("P", 120, 130, 9, 0), ("K", 150, 160, 9, 0)],
        [("P", 50, 60, 8, 0), ("K", 300, 310, 8, 0)],
    ]
    segments = [
        create_segment(
            store, "wal", number, HELD,
            (SEGMENT_SCHEMA.empty_table(), pa.Table.from_pylist([row(one) for one in events], schema=SEGMENT_SCHEMA)),
            continued=None,
        ).segment
        for number, events in enumerate(parts, start=1)
    ]  # fmt: skip
    assert find_prepared(store, segments, Lsn(COPY)) == {Lsn(50): "g8", Lsn(100): "g7"}
