"""Check the times in a chain's commits against each other.

Every create takes its times from clocks that agree, and refuses to continue a chain whose last cut is later than they
(nodes/clocks.py). So the order of the commits holds, whatever the clocks do: a violation is a conflict. Within a
commit, a clock may have been set between two readings. There, a difference is a doubt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import numpy as np

from cutline.check.report import Conflict, Doubt, Findings
from cutline.columns.arrow_numbers import to_numpy
from cutline.nodes.clocks import AGREE_SECONDS_MAX
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.ids import time_of_id
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.safe_time import LATEST_MICROSECONDS, POSTGRESQL_EPOCH
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, UNKNOWN_TIME

# Clocks that agree may differ by half of this, and so may two readings of different clocks.
SLACK_SECONDS = 2 * AGREE_SECONDS_MAX
TIME = "time"


def check_times(chain: Chain, findings: Findings) -> None:
    """Report commits whose times are not in order, and note times that a clock can show only if it was set."""
    before: Commit | None = None
    key_before = ""
    for commit in chain.commits:
        key = commit_key(chain.name, commit.increment)
        for detail in _out_of_order(before, commit, key_before):
            findings.conflict(Conflict(TIME, detail, object=key))
        for detail in _doubtful(before, commit):
            findings.doubt(Doubt(TIME, detail, object=key))
        before, key_before = commit, key


def _out_of_order(before: Commit | None, commit: Commit, key_before: str) -> Iterator[str]:
    """Describe times in an order that no create writes, even if clocks are wrong."""
    created, made = seconds_of(commit.created_at), seconds_of(commit.cut.made_at)
    began = time_of_id(commit.operation)
    if began is not None and abs(created - began.timestamp()) > SLACK_SECONDS:
        yield f"created_at is {commit.created_at}, but its operation began in the second {began:%Y-%m-%dT%H:%M:%SZ}"
    if before is None:
        return
    last = before.cut.made_at
    # Nothing shows which of the two commits is wrong, so both are named.
    previous = f"before the previous cut, which was made at {last} according to {key_before}"
    if made < seconds_of(last):
        yield f"its cut was made at {commit.cut.made_at}, {previous}"
    if created < seconds_of(last) - SLACK_SECONDS:
        yield f"created_at is {commit.created_at}, {previous}"


def _doubtful(before: Commit | None, commit: Commit) -> Iterator[str]:
    """Yield times that a clock can only show if it was set while the commit was created."""
    created, made = seconds_of(commit.created_at), seconds_of(commit.cut.made_at)
    if before is not None and made == seconds_of(before.cut.made_at):
        # The nodes' clocks were behind the previous cut, so this cut has got its time.
        return
    if not created - SLACK_SECONDS <= made <= created + commit.seconds + SLACK_SECONDS:
        yield (
            f"its cut was made at {commit.cut.made_at}, but it was created from {commit.created_at} on, in"
            f" {commit.seconds:g} s"
        )
    first, last = made - commit.cut.seconds - SLACK_SECONDS, made + SLACK_SECONDS
    others = [node for node in commit.cut.nodes if not first <= seconds_of(node.marked_at) <= last]
    # At least half of the nodes have clocks that are believed, and the cut has its time from these.
    if len(others) * 2 > len(commit.cut.nodes):
        marked = ", ".join(f"{node.marked_at} on {node.node}" for node in others[:3])
        yield f"its cut was made at {commit.cut.made_at}, but most nodes were marked at other times: {marked}"
    # The cut records how far the nodes' clocks differed when the markers were written.
    slack = commit.cut.skew_seconds + SLACK_SECONDS
    apart = [node for node in others if not first - slack <= seconds_of(node.marked_at) <= last + slack]
    if apart and len(others) * 2 <= len(commit.cut.nodes):
        marked = ", ".join(f"{node.marked_at} on {node.node}" for node in apart[:3])
        yield (
            f"its cut was made at {commit.cut.made_at}, when the clocks differed by at most"
            f" {commit.cut.skew_seconds:g} s, but it was marked at {marked}"
        )


def note_marks(commit: Commit, windows: Mapping[str, NodeWindow], findings: Findings) -> None:
    """Compare the time of each node's start marker with the times of the commits around it, by the same clock."""
    for node, window in windows.items():
        op, lsn, times = (to_numpy(window.events[name]) for name in ("op", "lsn", "seq"))
        is_commit = ((op == COMMIT) | (op == COMMIT_PREPARED)) & (times != UNKNOWN_TIME)
        is_commit &= (lsn >= window.previous) & (lsn < window.finish)
        is_early = is_commit & (lsn < window.start)
        is_late = is_commit & (lsn >= window.start)
        marked = seconds_of(window.marked_at)
        around = [("before", times[is_early].max())] if is_early.any() else []
        around += [("after", times[is_late].min())] if is_late.any() else []
        for what, time in around:
            moment = _moment(time)
            difference = moment.timestamp() - marked
            if difference > SLACK_SECONDS if what == "before" else difference < -SLACK_SECONDS:
                detail = (
                    f"cut {commit.cut.id}: its start marker was written at {window.marked_at}, but a transaction {what}"
                    f" it was committed at {moment:%Y-%m-%dT%H:%M:%SZ}: the clock was set back, or the time was changed"
                )
                findings.doubt(Doubt(TIME, detail, node=node))


def _moment(microseconds: np.int64) -> datetime:
    return POSTGRESQL_EPOCH + timedelta(microseconds=max(min(int(microseconds), LATEST_MICROSECONDS), 0))


def seconds_of(text: str) -> float:
    """Return a stored time in seconds since 1970. Python can't add to its earliest and latest times."""
    return datetime.fromisoformat(text).timestamp()
