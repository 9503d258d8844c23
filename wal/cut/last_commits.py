"""When the newest transaction before a cut was committed on each node, from the times in its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from msgspec import UNSET, structs

from columns.arrow_numbers import to_numpy
from fleet.record import Time
from wal.cut.cut_events import NodeWindow
from wal.cut.cut_values import Cut, NodeCut
from wal.cut.safe_time import later
from wal.segments.segment_schema import COMMIT, COMMIT_PREPARED

POSTGRESQL_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
# PostgreSQL has later times than Python.
LATEST_MICROSECONDS = (datetime.max.replace(tzinfo=UTC) - POSTGRESQL_EPOCH) // timedelta(microseconds=1)


def with_last_commits(windows: Mapping[str, NodeWindow], cut: Cut) -> Cut:
    """The resolved cut with the time of each node's newest commit before it."""
    return replace(cut, nodes=tuple(_with_last_commit(windows[one.node], one) for one in cut.nodes))


def _with_last_commit(window: NodeWindow, cut: NodeCut) -> NodeCut:
    op, lsn, times = (to_numpy(window.events[name]) for name in ("op", "lsn", "seq"))
    is_commit = ((op == COMMIT) | (op == COMMIT_PREPARED)) & (lsn >= window.previous) & (lsn < cut.position)
    # Early segments have 0. Clocks may be set back, so the newest is not always the last one, or in this window.
    newest = min(int(times[is_commit].max(initial=0)), LATEST_MICROSECONDS)
    found = Time.of(POSTGRESQL_EPOCH + timedelta(microseconds=newest)) if newest else UNSET
    return structs.replace(cut, last_commit_at=later(found, window.last_commit_at))
