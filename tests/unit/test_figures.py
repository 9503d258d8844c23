"""Figures of snapshots: what commits say of each restore point, how chains grow, what counts for gaps."""

from __future__ import annotations

from datetime import timedelta

from msgspec import structs
from msgspec.structs import replace

from cutline.cli.report.sections import last_good_section
from cutline.fleet.record import Time
from cutline.snapshots.listing.figures import (
    Gaps,
    NodeLag,
    OperationFigures,
    PointFigures,
    StoreFigures,
    figures_of,
    gaps_of,
)
from cutline.snapshots.listing.listing import BROKEN, Entry
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.end_marks import EndMark
from cutline.snapshots.records.operation_records import CheckedPoint
from tests.unit.made_figures import BEGIN, made_chain, made_figures, made_snapshot


def test_a_restore_point_has_the_figures_of_its_commit() -> None:
    chain = made_chain(2)
    last = structs.replace(
        chain.increments[1], comment="before", seconds=7.5, counts={"bytes": 5, "changes": 3, "transactions": 2},
        cut=structs.replace(chain.increments[1].cut, attempts=2, causes=("a restart",), included_early=1, seconds=0.25),
    )  # fmt: skip
    chain = replace(chain, increments=(chain.increments[0], last))
    point = figures_of(Entry("daily", chain), chain).points[2]
    assert (point.increment, point.operation, point.comment, point.seconds) == (2, "op-2", "before", 7.5)
    assert (point.bytes, point.changes, point.transactions) == (5, 3, 2)
    assert (point.cut_seconds, point.attempts, point.causes) == (0.25, 2, ("a restart",))
    assert (point.in_flight, point.included_early) == (2, 1)
    assert point.cut_at == BEGIN + timedelta(minutes=2)


def test_growth_is_what_increments_add_in_a_day_and_shorter_chains_have_none() -> None:
    # An increment of 20 bytes a minute. The full snapshot is no growth.
    assert made_snapshot(1440).growth_bytes_per_day == 1440 * 20
    assert made_snapshot(4).bytes == 5 * 20
    assert made_snapshot(1439).growth_bytes_per_day is None
    assert made_snapshot(0).growth_bytes_per_day is None


def test_the_last_good_restore_point_is_none_that_a_check_found_in_conflict() -> None:
    def check(increment: int, result: str, minute: int) -> EndedCheck:
        ended_at = Time.of(BEGIN + timedelta(minutes=minute))
        return EndedCheck(f"op-{minute}", ended_at, CheckedPoint("daily", increment, result, full=False))

    snapshot, gaps = made_snapshot(4), Gaps(None, ())

    def last_good(*checks: EndedCheck) -> PointFigures | None:
        figures = StoreFigures("demo", BEGIN, (snapshot,), gaps, OperationFigures(checks=checks))
        texts = last_good_section(figures).texts
        assert ("valid" in [one.point.result for one in checks]) == texts[1].startswith("Last good check: daily at")
        return figures.last_good_point

    assert last_good() == snapshot.points[4]
    assert last_good(check(4, "valid", 9)) == snapshot.points[4]
    assert last_good(check(3, "conflicts", 9), check(2, "valid", 10)) == snapshot.points[2]
    assert StoreFigures("demo", BEGIN, (), gaps).last_good_point is None


def test_the_end_of_a_chain_is_a_gap() -> None:
    chain = made_chain(3)
    lost = EndMark("daily", "op-0", 3, "a", "2026-11-20T00:04:00Z")
    snapshot = figures_of(Entry("daily", chain, ended=lost), chain)
    (gap,) = gaps_of([snapshot], BEGIN + timedelta(minutes=3, seconds=1)).found
    assert (gap.after.increment, gap.before, gap.why) == (3, None, lost.text)
    # Where another snapshot has taken its place, the next chain had begun.
    replaced = figures_of(Entry("daily", chain, ended=structs.replace(lost, successor="weekly")), chain)
    assert gaps_of([replaced], BEGIN + timedelta(minutes=3, seconds=1)).found == ()
    gone = structs.replace(lost, successor="weekly", slot_problem="its slot is gone")
    snapshot = figures_of(Entry("daily", chain, ended=gone), chain)
    (gap,) = gaps_of([snapshot], BEGIN + timedelta(minutes=3, seconds=1)).found
    assert (snapshot.state, gap.why) == ("ended", gone.text)
    # Pruned increments are no surprise.
    pruned = figures_of(Entry("daily", chain, is_only_full=True), chain)
    assert gaps_of([pruned], BEGIN + timedelta(minutes=3, seconds=1)).found == ()


def test_broken_snapshots_and_restore_points_without_rows_close_no_gap() -> None:
    now = BEGIN + timedelta(minutes=10)
    rows = made_snapshot(4)
    assert len(gaps_of([rows], now).found) == 1
    later = made_snapshot(9, name="later")
    assert gaps_of([rows, later], now).found == ()
    for other in (replace(later, is_only_cut=True), replace(later, state=BROKEN)):
        assert len(gaps_of([rows, other], now).found) == 1


def test_points_of_all_snapshots_are_in_the_order_of_their_cuts() -> None:
    points = made_figures(made_snapshot(1, name="b"), made_snapshot(1, name="a")).points
    assert [(one.snapshot, one.increment) for one in points] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_the_lag_of_a_node_is_from_its_newest_commit_or_its_marker_to_the_cut() -> None:
    chain = made_chain(1)
    (node,) = chain.full.cut.nodes
    # The cut was made at midnight. An idle node counts with its marker, a busy one with its commit, if that is later.
    idle = structs.replace(node, last_commit_at="2026-11-19T23:00:00Z", marked_at="2026-11-19T23:59:59.750Z")
    busy = structs.replace(node, last_commit_at="2026-11-19T23:59:59.900Z", marked_at="2026-11-19T23:59:59.750Z")
    ahead = structs.replace(node, marked_at="2026-11-20T00:00:02Z")
    for one, expected in ((idle, NodeLag(0.25, 3600.0)), (busy, NodeLag(0.1, 0.1)), (ahead, NodeLag(-2.0, None))):
        cut = structs.replace(chain.full.cut, nodes=(one,), safe_at="2026-11-19T23:59:59Z")
        full = Chain(structs.replace(chain.full, cut=cut))
        (point,) = figures_of(Entry("daily", full), full).points
        assert point.lags == {"a": expected}
        assert point.safe_at == BEGIN - timedelta(seconds=1)
