"""The safe time of a cut, and how far the clocks of nodes differ: by arithmetic on times that are chosen here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.snapshots.create.make_cut import latest_time
from cutline.wal.cut.cut_values import Cut
from cutline.wal.cut.markers import WrittenMarker
from cutline.wal.cut.resolve import NodeWindow, resolve
from cutline.wal.cut.safe_time import clock_skew, safe_time_of_nodes
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, SEGMENT_SCHEMA

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
MICROSECONDS_TO_NOON = (NOON - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
START, FINISH = Lsn(1000), Lsn(1100)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def time_of(seconds: float) -> Time:
    return Time.of(at(seconds))


def event(op: int, lsn: int, seconds: float, global_id: str | None = None) -> dict[str, object]:
    """An event at `lsn`, `seconds` after noon."""
    moment = MICROSECONDS_TO_NOON + round(seconds * 1e6)
    return {
        "lsn": lsn, "end_lsn": lsn + 8, "seq": moment, "xid": lsn, "global_id": global_id, "op": op, "group": 0,
        "partition": -1, "key": b"", "row": b"",
    }  # fmt: skip


def window(*events: dict[str, object], last: Time | None = None, marked: float = 0.0) -> NodeWindow:
    table = pa.Table.from_pylist(list(events), SEGMENT_SCHEMA)
    return NodeWindow(Lsn(100), START, FINISH, table, time_of(marked), last_commit_at=UNSET if last is None else last)


def marker(seconds: float, sent: float = 0.0, confirmed: float = 0.0) -> WrittenMarker:
    return WrittenMarker(START, at(seconds), at(sent), at(confirmed))


def cut_of(**windows: NodeWindow) -> Cut:
    return resolve(windows)


def test_the_newest_commit_before_the_cut_counts_and_none_after_it_or_before_the_window() -> None:
    found = cut_of(
        a=window(
            event(COMMIT, 50, 99), event(COMMIT, 200, 1), event(COMMIT, 300, 2), event(COMMIT, 1050, 77), marked=10
        )
    )
    assert found.nodes[0].last_commit_at == time_of(2)


def test_a_commit_of_two_phases_counts_when_it_is_committed() -> None:
    found = cut_of(
        a=window(
            event(PREPARE, 200, 1, "g"), event(COMMIT_PREPARED, 300, 5, "g"), event(PREPARE, 400, 9, "h"), marked=10
        )
    )
    assert found.nodes[0].last_commit_at == time_of(5)


def test_without_a_commit_the_one_of_the_cut_before_counts() -> None:
    assert cut_of(a=window(last=time_of(-60))).nodes[0].last_commit_at == time_of(-60)


def test_a_clock_that_was_set_back_does_not_set_the_node_back() -> None:
    assert cut_of(a=window(event(COMMIT, 200, -90), last=time_of(-60))).nodes[0].last_commit_at == time_of(-60)


@pytest.mark.parametrize("events", [(event(COMMIT, 200, 3600),), (event(COMMIT, 200, -90),), ()])
@pytest.mark.parametrize("last", [None, time_of(3599)])
def test_a_clock_that_was_an_hour_ahead_and_set_back_does_not_set_the_safe_time_ahead(
    events: tuple[dict[str, object], ...], last: Time | None
) -> None:
    """The commits after the cut have times from noon on."""
    cut = cut_of(a=window(*events, last=last, marked=0))
    assert safe_time_of_nodes(cut.nodes) == time_of(0)
    was_ahead = last is not None or (event(COMMIT, 200, 3600) in events)
    expected = time_of(0) if was_ahead else time_of(-90) if events else UNSET
    assert cut.nodes[0].last_commit_at == expected
    # The cut after it has no time of before, either.
    again = cut_of(a=window(last=time_of(0), marked=60))
    assert safe_time_of_nodes(again.nodes) == time_of(60)


def test_of_a_clock_that_was_set_back_commits_after_the_marker_count_with_their_own_time() -> None:
    """As the position of b is raised past its marker, the first commit that is after the cut is at 10.3."""
    a = window(event(PREPARE, 200, 1, "g"), event(COMMIT_PREPARED, 300, 2, "g"), marked=20)
    b = window(
        event(COMMIT, 300, 3600), event(COMMIT, 1010, 10.1), event(PREPARE, 1020, 10.2, "g"), event(COMMIT, 1030, 10.3),
        marked=10,
    )  # fmt: skip
    nodes = cut_of(a=a, b=b).nodes
    assert safe_time_of_nodes(nodes) == nodes[1].last_commit_at == time_of(10.1)


def test_a_time_after_the_year_9999_does_not_end_the_cut() -> None:
    late, last = event(COMMIT, 200, 0) | {"seq": 2**63 - 1}, Time("9999-12-31T23:59:59.999Z")
    assert cut_of(a=replace(window(late), marked_at=last)).nodes[0].last_commit_at == last


def test_an_idle_node_does_not_hold_the_fleet_back() -> None:
    cut = cut_of(busy=window(event(COMMIT, 900, 9.9), marked=10.0), idle=window(event(COMMIT, 200, -3600), marked=10.2))
    assert safe_time_of_nodes(cut.nodes) == time_of(10.0)


def test_a_node_whose_position_was_raised_past_its_marker_counts_with_its_newest_commit() -> None:
    """The transaction g is committed before the start marker on a, and prepared after it on b."""
    a = window(event(PREPARE, 200, 1, "g"), event(COMMIT_PREPARED, 300, 2, "g"), marked=10.3)
    b = window(event(COMMIT, 1010, 10.1), event(PREPARE, 1020, 10.2, "g"), marked=10.0)
    nodes = cut_of(a=a, b=b).nodes
    assert [node.position for node in nodes] == [START, 1028]
    assert safe_time_of_nodes(nodes) == time_of(10.1)


def test_the_skew_is_known_but_for_the_time_that_a_marker_takes() -> None:
    skew = clock_skew({"a": marker(0.2, sent=0, confirmed=0.4), "b": marker(5.3, sent=0.1, confirmed=0.5)})
    # a is between 0.2 s behind and 0.2 s ahead of us, b between 4.8 and 5.2 s ahead.
    assert (round(skew.least, 6), round(skew.most, 6)) == (4.6, 5.4)
    assert (skew.behind, skew.ahead) == ("a", "b")


def test_a_cut_was_made_when_the_last_finish_marker_was_written_by_a_clock_that_can_be_believed() -> None:
    markers = {"a": marker(5.0, sent=0, confirmed=0.1), "b": marker(5.3, sent=0, confirmed=0.4), "far": marker(9e6)}
    # The clock is read before the marker is written, at most as long before its answer as that took.
    assert latest_time(markers, {"a", "b"}, None) == at(5.7)
    assert latest_time(markers, {"a"}, at(0)) == at(5.1)
    # What the cut before has is in this one, too: its clocks were ahead.
    assert latest_time(markers, {"a", "b"}, at(60)) == at(60)


def test_clocks_that_may_agree_have_no_least_skew() -> None:
    same = {"a": marker(0.2, sent=0, confirmed=0.4), "b": marker(0.3, sent=0.1, confirmed=0.5)}
    assert clock_skew(same).least == 0
    assert clock_skew({"a": same["a"]}).most == 0


def test_the_order_of_nodes_does_not_matter() -> None:
    markers = {"a": marker(0), "b": marker(3), "c": marker(-4)}
    one, other = clock_skew(markers), clock_skew(dict(reversed(markers.items())))
    assert one == other == replace(one, least=7.0, most=7.0, behind="c", ahead="b")
