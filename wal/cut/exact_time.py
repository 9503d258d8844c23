"""An exact time: a cut of the fleet between two cuts that were made, from the WAL that is archived between them.

A node's position at a time is the end of the last transaction that it committed before its first commit with a later
time. That is where recovery_target_time stops a server (PostgreSQL manual, "Recovery Target"). Commit times don't
always rise with WAL positions: a server sets the time shortly before it writes the record, and a clock can be set back.
So a commit whose time is not later, but whose record follows one with a later time, comes after the position.

From these positions, the rule of the cut (wal/cut/resolve.py) raises each node's position until no global transaction
is torn. The positions of the later cut satisfy the rule and are not lower than those at the time, and the rule finds
the lowest positions that satisfy it. So it never needs WAL beyond the later cut (docs/consistency.md, "Exact times").
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.cut_values import Cut, NodeCut
from cutline.wal.cut.resolve import resolve
from cutline.wal.cut.safe_time import LATEST_MICROSECONDS, POSTGRESQL_EPOCH
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, UNKNOWN_TIME

# How many transactions of a node are named.
EARLY_NAMED_MAX = 100


class EarlyTransaction(Struct, frozen=True):
    """A transaction that the state at an exact time has on a node that committed it later, or has not committed it.

    `global_id` is None for a local transaction; `committed_at` is None if it is still prepared in the archived WAL.
    """

    xid: int
    global_id: str | None
    committed_at: Time | None


class NodeAtTime(Struct, frozen=True):
    """A primary at an exact time.

    `at` is its position at that time, and `position` its position in the state. `last_commit_at` is the time of the
    last transaction before `position`, None if none was committed since the earlier cut. `early` counts the
    transactions in the state that the node committed later, or has not committed: the state has them because other
    nodes had committed them, or because they precede such a transaction in the node's WAL. `named` are the first of
    these. `late` counts the transactions that the state lacks although the node did not commit them later: their
    records follow one with a later time. `is_held`: the earlier cut contains a commit that is later by the node's
    clock.
    """

    node: str
    at: Lsn
    position: Lsn
    last_commit_at: Time | None
    early: int
    named: tuple[EarlyTransaction, ...]
    late: int
    is_held: bool


class CutAtTime(Struct, frozen=True):
    """The cut at an exact time, and its nodes. A NodeCut's `start` is the node's position at that time."""

    cut: Cut
    nodes: tuple[NodeAtTime, ...]


def resolve_at(
    earlier: Mapping[str, NodeCut], later: Mapping[str, NodeCut], events: Mapping[str, pa.Table], moment: datetime
) -> CutAtTime:
    """Resolve the cut at `moment`, which lies between two cuts; all mappings are keyed by primary.

    `events` (SEGMENT_SCHEMA) must contain all events between the two cuts' positions. Every resolved position is
    between those of the two cuts. Raises GlobalIdReusedError.
    """
    microseconds = (moment - POSTGRESQL_EPOCH) // timedelta(microseconds=1)
    windows = {
        node: NodeWindow(
            previous=cut.position,
            start=position_at(events[node], cut.position, later[node].position, microseconds),
            # What begins at the later cut's position or after it can't belong to the state.
            finish=later[node].position,
            events=events[node],
            marked_at=Time.exactly(moment),
            undecided=cut.undecided,
            in_doubt=cut.in_doubt,
            last_commit_at=cut.last_commit_at,
        )
        for node, cut in earlier.items()
    }
    cut = resolve(windows)
    cut = replace(cut, nodes=tuple(_without_rolled_back(one, earlier[one.node]) for one in cut.nodes))
    nodes = tuple(_describe(windows[one.node], one, earlier[one.node], microseconds, moment) for one in cut.nodes)
    return CutAtTime(cut, nodes)


def _without_rolled_back(cut: NodeCut, earlier: NodeCut) -> NodeCut:
    """Correct what is in doubt: the earlier cut left out what was rolled back before its finish marker.

    A ROLLBACK PREPARED may come after the position, although it comes before that marker. No other cut's position
    precedes the marker of the cut before it.
    """
    rolled_back = set(earlier.rolled_back)
    in_doubt = tuple(
        structs.replace(one, is_included=one.is_included and one.lsn not in rolled_back) for one in cut.in_doubt
    )
    return structs.replace(cut, in_doubt=in_doubt)


def position_at(events: pa.Table, earlier: Lsn, later: Lsn, microseconds: int) -> Lsn:
    """Return a node's position at a time (in microseconds since 2000), which is between two cuts' positions.

    Commits without a time, which a subscription applies, are included with the commits around them.
    """
    lsn, end, times = (to_numpy(events[name]) for name in ("lsn", "end_lsn", "seq"))
    is_commit = _are_commits(events) & (lsn >= earlier) & (lsn < later)
    first_later = lsn[is_commit & (times > microseconds)].min(initial=later)
    return Lsn(end[is_commit & (lsn < first_later)].max(initial=earlier))


def _are_commits(events: pa.Table) -> Flags:
    op = to_numpy(events["op"])
    are_commits: Flags = (op == COMMIT) | (op == COMMIT_PREPARED)
    return are_commits


def _describe(window: NodeWindow, cut: NodeCut, earlier: NodeCut, microseconds: int, moment: datetime) -> NodeAtTime:
    lsn, times, xid = (to_numpy(window.events[name]) for name in ("lsn", "seq", "xid"))
    is_commit = _are_commits(window.events) & (lsn >= window.previous) & (lsn < window.finish)
    is_before = is_commit & (lsn < cut.position)
    is_in_time = is_commit & (times > UNKNOWN_TIME) & (times <= microseconds)
    # The parts that the state has, and that the node commits after the position or not at all.
    ahead = {one.xid: one for one in cut.in_doubt if one.is_prepared and one.is_included}
    is_ahead = np.isin(xid, np.array(list(ahead), np.int64))
    is_early = is_commit & (times > microseconds) & (is_before | is_ahead)
    last = earlier.last_commit_at
    columns = window.events.select(["xid", "global_id", "seq"]).filter(to_mask(is_early)).to_pydict()
    named = [
        EarlyTransaction(one, global_id, _time_at(time)) for one, global_id, time in zip(*columns.values(), strict=True)
    ]
    committed = set(xid[is_commit].tolist())
    named += [EarlyTransaction(one.xid, one.global_id, None) for one in ahead.values() if one.xid not in committed]
    return NodeAtTime(
        node=cut.node,
        at=cut.start,
        position=cut.position,
        last_commit_at=_time_of_last(lsn[is_before], times[is_before]),
        early=len(named),
        named=tuple(named[:EARLY_NAMED_MAX]),
        late=int(np.count_nonzero(is_in_time & ~is_before & ~is_ahead)),
        is_held=isinstance(last, str) and datetime.fromisoformat(last) > moment,
    )


def _time_of_last(lsn: Ints, times: Ints) -> Time | None:
    """Return the time of the last of these commits that has a time."""
    lsn, times = lsn[times > UNKNOWN_TIME], times[times > UNKNOWN_TIME]
    return _time_at(int(times[np.argmax(lsn)])) if len(lsn) else None


def _time_at(microseconds: int) -> Time:
    return Time.exactly(POSTGRESQL_EPOCH + timedelta(microseconds=min(microseconds, LATEST_MICROSECONDS)))
