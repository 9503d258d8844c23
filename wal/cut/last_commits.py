"""When the newest transaction before a cut was committed on each node, from the times in its events.

A commit before the start marker whose time is later than the marker's shows that the clock was set back in between. It
counts with the marker's time: commits after the marker, which are not in the state, have times from the marker's on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from msgspec import UNSET, UnsetType, structs

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Ints
from cutline.fleet.record import Time
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.cut_values import Cut, NodeCut
from cutline.wal.cut.safe_time import later
from cutline.wal.segments.segment_schema import COMMIT, COMMIT_PREPARED

POSTGRESQL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
# PostgreSQL has later times than Python.
LATEST_MICROSECONDS = (datetime.max.replace(tzinfo=UTC) - POSTGRESQL_EPOCH) // timedelta(microseconds=1)


def with_last_commits(windows: Mapping[str, NodeWindow], cut: Cut) -> Cut:
    """The resolved cut with the time of each node's newest commit before it."""
    return replace(cut, nodes=tuple(_with_last_commit(windows[one.node], one) for one in cut.nodes))


def _with_last_commit(window: NodeWindow, cut: NodeCut) -> NodeCut:
    op, lsn, times = (to_numpy(window.events[name]) for name in ("op", "lsn", "seq"))
    is_commit = ((op == COMMIT) | (op == COMMIT_PREPARED)) & (lsn >= window.previous) & (lsn < cut.position)
    is_early = lsn < window.start
    before_marker = later(_newest(times[is_commit & is_early]), window.last_commit_at)
    if isinstance(before_marker, str) and isinstance(window.marked_at, str):
        before_marker = min(before_marker, window.marked_at, key=datetime.fromisoformat)
    return structs.replace(cut, last_commit_at=later(before_marker, _newest(times[is_commit & ~is_early])))


def _newest(times: Ints) -> Time | UnsetType:
    """The latest of these times of commits; UNSET if there is none. Early segments have 0."""
    newest = min(int(times.max(initial=0)), LATEST_MICROSECONDS)
    return Time.of(POSTGRESQL_EPOCH + timedelta(microseconds=newest)) if newest else UNSET
