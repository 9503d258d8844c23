"""Figures of snapshots for the tests of reports: chains whose cuts are a minute apart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from msgspec import structs

from cutline.fleet.record import Time
from cutline.snapshots.listing.figures import OperationFigures, SnapshotFigures, StoreFigures, figures_of, gaps_of
from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, FullSnapshot, Increment
from tests.unit.made_commits import full_commit, increment_commit

BEGIN = datetime(2026, 11, 20, tzinfo=UTC)


def timed(commit: Commit, minutes: float, *, in_flight: int = 0, name: str = "daily") -> Commit:
    """The commit with a cut at that minute."""
    made_at = Time.of(BEGIN + timedelta(minutes=minutes))
    return structs.replace(commit, snapshot=name, cut=structs.replace(commit.cut, made_at=made_at, in_flight=in_flight))


def made_chain(count: int, *, name: str = "daily", comment: str = "") -> Chain:
    """A full snapshot and so many increments: number n has n in flight, and a cut in minute n."""
    full = timed(full_commit(), 0, name=name)
    rest = [timed(increment_commit(number), number, in_flight=number, name=name) for number in range(1, count + 1)]
    assert isinstance(full, FullSnapshot)
    increments = tuple(structs.replace(one, comment=comment) for one in rest if isinstance(one, Increment))
    return Chain(full, increments)


def made_snapshot(count: int, *, name: str = "daily", comment: str = "") -> SnapshotFigures:
    """The figures of that chain."""
    chain = made_chain(count, name=name, comment=comment)
    return figures_of(Entry(name, chain), chain)


def made_figures(*snapshots: SnapshotFigures, operations: OperationFigures | None = None) -> StoreFigures:
    """The figures of a store with these snapshots, a minute after its newest cut."""
    now = max(point.cut_at for one in snapshots for point in one.points) + timedelta(minutes=1)
    return StoreFigures("shop", now, snapshots, gaps_of(snapshots, now), operations or OperationFigures())
