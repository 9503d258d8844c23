"""The times in commits: what no clock can show, and what one shows only if it is set."""

from __future__ import annotations

import pyarrow as pa
import pytest
from msgspec import structs

from cutline.check.report import Findings, SnapshotReport
from cutline.check.times import check_times, note_marks
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import commit_key
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.segments.segments import SEGMENT_SCHEMA, UNKNOWN_TIME
from tests.unit.made_commits import commit, full_commit, increment_commit

DAY = "2026-11-20"
# Microseconds from 2000 to that day: 9,820 days.
MIDNIGHT = 9820 * 86400 * 1_000_000


def chain_of(*times: tuple[str, str]) -> Chain:
    """A chain whose commits were created and whose cuts were made at these times of the day."""
    made = []
    for number, (created, cut_at) in enumerate(times):
        one = commit(number)
        nodes = tuple(structs.replace(node, marked_at=Time(f"{DAY}T{cut_at}Z")) for node in one.cut.nodes)
        cut = structs.replace(one.cut, made_at=Time(f"{DAY}T{cut_at}Z"), nodes=nodes)
        operation = f"20261120T{created.replace(':', '')}Z-0123456789"
        made.append(structs.replace(one, created_at=Time(f"{DAY}T{created}Z"), cut=cut, operation=operation))
    full, *increments = made
    return Chain(full, tuple(increments))


def found(chain: Chain) -> tuple[list[str], list[str]]:
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    check_times(chain, findings)
    return [one.detail for one in findings.report.conflicts], [one.detail for one in findings.report.doubts]


def test_times_in_order_are_neither_conflicts_nor_doubts() -> None:
    assert found(chain_of(("10:00:00", "10:00:01"), ("11:00:00", "11:00:01"))) == ([], [])
    # The second increment's clocks are five minutes behind: its cut gets the time of the one before.
    assert found(chain_of(("10:00:00", "10:00:01"), ("09:55:02", "10:00:01"))) == ([], [])
    # Ids of other forms have no time.
    assert found(Chain(full_commit(), (increment_commit(1),))) == ([], [])


def test_a_cut_is_not_made_before_the_previous_cut() -> None:
    conflicts, _ = found(chain_of(("10:00:00", "10:00:01"), ("10:00:05", "09:59:59")))
    assert conflicts == [
        "its cut was made at 2026-11-20T09:59:59Z, before the previous cut, which was made at 2026-11-20T10:00:01Z"
        f" according to {commit_key('daily', 0)}"
    ]


def test_no_command_begins_before_the_previous_cut() -> None:
    conflicts, _ = found(chain_of(("10:00:00", "10:00:01"), ("09:50:00", "10:00:01")))
    assert conflicts == [
        "created_at is 2026-11-20T09:50:00Z, before the previous cut, which was made at 2026-11-20T10:00:01Z"
        f" according to {commit_key('daily', 0)}"
    ]


def test_the_id_of_an_operation_has_the_time_of_its_commit() -> None:
    chain = chain_of(("10:00:00", "10:00:01"))
    later = structs.replace(chain.full, created_at=Time(f"{DAY}T10:20:00Z"))
    conflicts, doubts = found(Chain(later))
    assert conflicts == [
        "created_at is 2026-11-20T10:20:00Z, but its operation began in the second 2026-11-20T10:00:00Z"
    ]
    # A cut twenty minutes before the command began: a clock may have been set.
    assert len(doubts) == 1


def test_a_clock_that_is_set_during_a_create_is_a_doubt() -> None:
    """An hour back, after the command began."""
    conflicts, doubts = found(chain_of(("10:00:00", "09:00:01")))
    assert conflicts == []
    assert doubts == [
        "its cut was made at 2026-11-20T09:00:01Z, but it was created from 2026-11-20T10:00:00Z on, in 1 s"
    ]


@pytest.mark.parametrize(
    ("wrong", "skew_seconds", "is_doubtful"), [(1, 43_200.0, False), (1, 30_000.0, True), (2, 43_200.0, True)]
)
def test_half_of_the_nodes_have_clocks_like_the_cut(wrong: int, skew_seconds: float, *, is_doubtful: bool) -> None:
    """The others may be as far from it as the clocks differed when the markers were written."""
    chain = chain_of(("10:00:00", "10:00:01"))
    (node,) = chain.full.cut.nodes
    other = structs.replace(node, marked_at=Time(f"{DAY}T22:00:00Z"))
    nodes = tuple(structs.replace(other if number < wrong else node, node=f"s{number}") for number in range(2))
    cut = structs.replace(chain.full.cut, nodes=nodes, skew_seconds=skew_seconds)
    conflicts, doubts = found(Chain(structs.replace(chain.full, cut=cut)))
    assert conflicts == []
    assert len(doubts) == is_doubtful


def event(lsn: int, seconds: float, op: str = "C") -> dict[str, object]:
    return {
        "lsn": lsn, "end_lsn": lsn + 1, "seq": MIDNIGHT + int(seconds * 1e6), "xid": 1, "global_id": None,
        "op": ord(op), "group": 0, "partition": -1, "key": b"", "row": b"",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("marked", "is_doubtful"), [("01:00:00", False), ("00:59:00", False), ("00:30:00", True), ("02:00:00", True)]
)
def test_a_start_marker_has_its_time_between_those_of_the_commits_around_it(marked: str, *, is_doubtful: bool) -> None:
    """Commits at 00:59:59 and 01:00:01. Those before the window, of a later cut, and without a time do not count."""
    applied = {**event(120, 0), "seq": UNKNOWN_TIME}
    rows = [event(5, 9e4), event(90, 3599), event(100, 0, "M"), event(110, 3601, "K"), applied, event(300, 0)]
    events = pa.Table.from_pylist(rows, SEGMENT_SCHEMA)
    window = NodeWindow(Lsn(10), Lsn(100), Lsn(200), events, Time(f"{DAY}T{marked}Z"))
    findings = Findings(SnapshotReport("daily", 0))
    note_marks(full_commit(), {"a": window}, findings)
    assert [doubt.node for doubt in findings.report.doubts] == ["a"] * is_doubtful
