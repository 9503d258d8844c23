"""The ends of transactions in a slot's messages are those of the events that a drain has archived."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cutline.columns.bytes_column import from_list
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.snapshots.create.make_cut import AttemptFailedError, CutMarkers, check_cut_markers
from cutline.wal.cut.markers import Marker, WrittenMarker
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.drain.lineage import (
    TransactionEnd,
    WalDivergedError,
    check_ends,
    check_resumed,
    ends_of_events,
    ends_of_messages,
    first_begun,
)
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED, SEGMENT_SCHEMA
from tests.unit.made_commits import MARKED_AT
from tests.wal import pgoutput_messages as pgoutput

MESSAGES = [
    pgoutput.begin(100, 7),
    pgoutput.commit(100, 140),
    pgoutput.begin_prepare(200, 240, 8, "g"),
    pgoutput.prepare(200, 240, 8, "g"),
    pgoutput.begin_prepare(300, 340, 9, "h"),
    pgoutput.prepare(300, 340, 9, "h"),
    pgoutput.commit_prepared(400, 440, 8, "g"),
    pgoutput.rollback_prepared(340, 540, 9, "h"),
]
EXPECTED = [(COMMIT, 140), (PREPARE, 240), (PREPARE, 340), (COMMIT_PREPARED, 440), (ROLLBACK_PREPARED, 540)]


def test_messages_and_events_have_the_same_ends() -> None:
    events = Decoder("a", (), "exact").feed(from_list(MESSAGES)).events
    ends = list(ends_of_events(events, ORIGIN))
    assert ends == [TransactionEnd(op, end, pgoutput.MICROSECONDS) for op, end in EXPECTED]
    found = set(ends_of_messages(from_list(MESSAGES).to_arrow()))
    check_ends("a", set(ends) - found)
    # Of a transaction that a subscription has applied, the time is not that of the node.
    check_ends("a", {one._replace(at=0) for one in ends} - found)
    assert [one.end for one in ends_of_events(events, Lsn(340))] == [440, 540]


@pytest.mark.parametrize("change", [{"end": 141}, {"at": pgoutput.MICROSECONDS + 1}, {"op": PREPARE}])
def test_another_end_time_or_kind_is_of_another_server(change: dict[str, int]) -> None:
    found = set(ends_of_messages(from_list(MESSAGES).to_arrow()))
    expected = TransactionEnd(COMMIT, 140, pgoutput.MICROSECONDS)._replace(**change)
    with pytest.raises(WalDivergedError, match="node a: its WAL lacks a transaction that ends at 0/8"):
        check_ends("a", {expected} - found)


def test_a_transaction_that_goes_on_is_the_first_that_follows() -> None:
    messages = from_list(MESSAGES).to_arrow()
    first = first_begun(messages)
    assert first is not None
    check_resumed("a", first, first)
    assert first_begun(messages.slice(len(messages) - 1)) is None
    for begun in (None, Lsn(first + 1)):
        with pytest.raises(WalDivergedError, match="node a: its WAL lacks the transaction at 0/"):
            check_resumed("a", first, begun)


def test_a_standby_that_lacks_its_primarys_markers_has_another_history() -> None:
    """For a primary, the next attempt may find them; for its standby, no attempt will."""
    written = WrittenMarker(Lsn(10), *[datetime.now(UTC)] * 3)
    marked = CutMarkers(Marker("chain", "cut", "start"), {"a": written}, {"a": written}, 0.0, MARKED_AT)
    events = SEGMENT_SCHEMA.empty_table()
    with pytest.raises(AttemptFailedError, match="node a: its decoded WAL lacks the start marker"):
        check_cut_markers("a", "a", marked, events)
    with pytest.raises(WalDivergedError, match="node a1: its decoded WAL lacks the start marker of cut cut, which"):
        check_cut_markers("a1", "a", marked, events)
