"""The safe time of a cut: every transaction that any node committed before it, by that node's clock, is in the state.

It is the least of the nodes' own times. A node's time is that of its newest commit before the cut, or that of its start
marker if this is later: a node on which nothing is committed does not hold the fleet back, and a node that writes no
marker has no cut. A server takes a commit's time shortly before it writes the record, so the safe time is exact but for
transactions that were just between the two. A clock that was set back before the marker was written does not matter
(`with_last_commits`); if a clock is set back later, commits after the cut may have times before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType, structs

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Ints
from cutline.fleet.record import Time
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.cut_values import Cut, NodeCut
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED

if TYPE_CHECKING:
    from cutline.wal.cut.markers import WrittenMarker

# Commit times of nodes whose clocks differ by more are not worth comparing.
SKEW_SECONDS_MAX = 1.0


def safe_time_of_nodes(nodes: Iterable[NodeCut]) -> Time:
    """The safe time of the cut of these nodes."""
    return min(map(node_time, nodes), key=datetime.fromisoformat)


def node_time(cut: NodeCut) -> Time:
    """All that the node committed before this time lies before its position."""
    time = later(cut.marked_at, cut.last_commit_at)
    return time if isinstance(time, str) else cut.marked_at


def later(one: Time | UnsetType, other: Time | UnsetType) -> Time | UnsetType:
    """The later of two times; one of them if the other is not known."""
    if not isinstance(one, str) or not isinstance(other, str):
        return one if isinstance(one, str) else other
    return max(one, other, key=datetime.fromisoformat)


@dataclass(frozen=True, slots=True)
class Skew:
    """By how much the clocks of the nodes `behind` and `ahead` differ, in seconds: at least `least`.

    No two clocks differ by more than `most`.
    """

    least: float
    most: float
    behind: str
    ahead: str


def clock_skew(markers: Mapping[str, WrittenMarker]) -> Skew:
    """The largest difference between the clocks of the nodes whose markers these are.

    A node's clock was read at some moment between sending its marker and receiving its answer.
    """
    lowest = {node: (marker.written_at - marker.confirmed_at).total_seconds() for node, marker in markers.items()}
    highest = {node: (marker.written_at - marker.sent_at).total_seconds() for node, marker in markers.items()}
    behind, ahead = min(highest, key=lambda node: highest[node]), max(lowest, key=lambda node: lowest[node])
    most = max(highest.values()) - min(lowest.values()) if len(markers) > 1 else 0.0
    return Skew(max(lowest[ahead] - highest[behind], 0.0), most, behind, ahead)


POSTGRESQL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
# PostgreSQL has later times than Python.
LATEST_MICROSECONDS = (datetime.max.replace(tzinfo=UTC) - POSTGRESQL_EPOCH) // timedelta(microseconds=1)


def with_last_commits(windows: Mapping[str, NodeWindow], cut: Cut) -> Cut:
    """The resolved cut with the time of each node's newest commit before it."""
    return replace(cut, nodes=tuple(_with_last_commit(windows[node.node], node) for node in cut.nodes))


def _with_last_commit(window: NodeWindow, cut: NodeCut) -> NodeCut:
    op, lsn, times = (to_numpy(window.events[name]) for name in ("op", "lsn", "seq"))
    is_commit = ((op == COMMIT) | (op == COMMIT_PREPARED)) & (lsn >= window.previous) & (lsn < cut.position)
    is_early = lsn < window.start
    before_marker = later(_newest(times[is_commit & is_early]), window.last_commit_at)
    if isinstance(before_marker, str):
        before_marker = min(before_marker, window.marked_at, key=datetime.fromisoformat)
    return structs.replace(cut, last_commit_at=later(before_marker, _newest(times[is_commit & ~is_early])))


def _newest(times: Ints) -> Time | UnsetType:
    """The latest of these times of commits; UNSET if there is none."""
    newest = min(int(times.max(initial=0)), LATEST_MICROSECONDS)
    return Time.of(POSTGRESQL_EPOCH + timedelta(microseconds=newest)) if newest else UNSET
