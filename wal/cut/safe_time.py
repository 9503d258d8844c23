"""The safe time of a cut: every transaction that any node committed before it, by that node's clock, is in the state.

The safe time is the earliest of the nodes' times. A node's time is the time of its newest commit before the cut or the
time of its start marker, whichever is later, so an idle node does not hold the fleet back. A server sets a commit's
time shortly before it writes the record, so the safe time is exact except for transactions between these two steps. If
a clock is set back before the marker is written, no harm is done (`with_last_commits`). If it is set back later,
commits after the cut may have times before the safe time. Transactions that a subscription applies have no time by the
node's clock, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType, structs
from msgspec.structs import replace

from cutline.fleet.record import Time
from cutline.wal.cut.cut_values import Cut, NodeCut

if TYPE_CHECKING:
    from cutline.columns.bytes_column import Ints
    from cutline.wal.cut.cut_events import NodeWindow
    from cutline.wal.cut.markers import WrittenMarker

# If clocks differ by more than this, comparing commit times from different nodes is pointless.
SKEW_SECONDS_MAX = 1.0


def safe_time_of_nodes(nodes: Iterable[NodeCut]) -> Time:
    """Return the safe time of a cut of these nodes."""
    return min(map(node_time, nodes), key=datetime.fromisoformat)


def node_time(cut: NodeCut) -> Time:
    """Return the node's time: all of the node's commits with earlier times are before its position."""
    time = later(cut.marked_at, cut.last_commit_at)
    return time if isinstance(time, str) else cut.marked_at


def later(one: Time | UnsetType, other: Time | UnsetType) -> Time | UnsetType:
    """Return the later of two times; if only one is known, return that one."""
    if not isinstance(one, str) or not isinstance(other, str):
        return one if isinstance(one, str) else other
    return max(one, other, key=datetime.fromisoformat)


class Skew(Struct, frozen=True):
    """The difference between the nodes' clocks in seconds: at least `least`, between the nodes `behind` and `ahead`.

    No two clocks differ by more than `most`.
    """

    least: float
    most: float
    behind: str
    ahead: str


def clock_skew(markers: Mapping[str, WrittenMarker]) -> Skew:
    """Return the largest difference between the clocks of the nodes that wrote these markers.

    Each node read its clock after its marker was sent and before its answer arrived.
    """
    lowest = {node: (marker.written_at - marker.confirmed_at).total_seconds() for node, marker in markers.items()}
    highest = {node: (marker.written_at - marker.sent_at).total_seconds() for node, marker in markers.items()}
    behind, ahead = min(highest, key=lambda node: highest[node]), max(lowest, key=lambda node: lowest[node])
    most = max(highest.values()) - min(lowest.values()) if len(markers) > 1 else 0.0
    return Skew(max(lowest[ahead] - highest[behind], 0.0), most, behind, ahead)


POSTGRESQL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
# PostgreSQL's times extend beyond Python's.
LATEST_MICROSECONDS = (datetime.max.replace(tzinfo=UTC) - POSTGRESQL_EPOCH) // timedelta(microseconds=1)


def with_last_commits(windows: Mapping[str, NodeWindow], cut: Cut) -> Cut:
    """Add the time of each node's newest commit before the cut."""
    return replace(cut, nodes=tuple(_with_last_commit(windows[node.node], node) for node in cut.nodes))


def _with_last_commit(window: NodeWindow, cut: NodeCut) -> NodeCut:
    # Imported here: commands that only read documents do without Arrow.
    from cutline.columns.arrow_numbers import to_numpy
    from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED

    op, lsn, times = (to_numpy(window.events[name]) for name in ("op", "lsn", "seq"))
    is_commit = ((op == COMMIT) | (op == COMMIT_PREPARED)) & (lsn >= window.previous) & (lsn < cut.position)
    is_early = lsn < window.start
    before_marker = later(_newest(times[is_commit & is_early]), window.last_commit_at)
    if isinstance(before_marker, str):
        before_marker = min(before_marker, window.marked_at, key=datetime.fromisoformat)
    return structs.replace(cut, last_commit_at=later(before_marker, _newest(times[is_commit & ~is_early])))


def _newest(times: Ints) -> Time | UnsetType:
    """Return the latest of these commit times; UNSET if there are none."""
    newest = min(int(times.max(initial=0)), LATEST_MICROSECONDS)
    return Time.of(POSTGRESQL_EPOCH + timedelta(microseconds=newest)) if newest else UNSET
