"""Making a cut: markers on all primaries, every node's archive brought up to them, the cut resolved.

An attempt that turns out inconsistent is repeated; what it archived is simply the beginning of the next one,
for its markers mean nothing to another cut id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from fleet.baseline import check_baseline
from fleet.connections import connect
from fleet.progress import Progress
from fleet.sessions import Sessions, identify
from fleet.watch import Watch
from snapshots.jobs import SparkSource, raise_first, run_tasks, started
from snapshots.manifest import CutRecord
from snapshots.points import Point
from storage.errors import SnapshotError
from storage.store import ObjectStore
from wal.archive import Segment
from wal.arrow_numbers import to_mask, to_numpy
from wal.cut import NodeWindow, resolve
from wal.cut_values import Cut, Undecided
from wal.drain import DrainTask, advanced, drain
from wal.markers import Marker, marker_from_bytes, write_markers
from wal.segment_schema import MARKER, SEGMENT_SCHEMA
from wal.segments import read_events


class CutInconsistentError(SnapshotError):
    """The cut stayed inconsistent after all retries; nothing that can be restored was left behind."""

    exit_code = 9


class _AttemptFailedError(Exception):
    """One attempt is void: `reason` names the node and what happened to it."""


@dataclass(frozen=True, slots=True)
class Before:
    """Where the cut before left a primary: its position, and the transactions left out."""

    position: int
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class CutPlan:
    """What a cut is made of: a drain task for every node (its `finish` is set here), and the cut before."""

    chain: str
    operation: str
    tasks: Mapping[str, DrainTask]
    before: Mapping[str, Before]
    retries: int = 3


@dataclass(frozen=True, slots=True)
class MadeCut:
    """A consistent cut, and the segments that every node's archive has gained up to its finish."""

    record: CutRecord
    segments: Mapping[str, tuple[Segment, ...]]
    ignored: int


@dataclass(frozen=True, slots=True)
class _Markers:
    marker: Marker
    starts: Mapping[str, int]
    finishes: Mapping[str, int]
    seconds: float


def make_cut(sessions: Sessions, plan: CutPlan, spark: SparkSource, store: ObjectStore, progress: Progress) -> MadeCut:
    """Make the cut, repeating it up to `plan.retries` times.

    Raises CutInconsistentError after that, and at once whatever no repetition would mend.
    """
    reasons: list[str] = []
    for attempt in range(1, plan.retries + 2):
        try:
            marked = _mark(sessions, Marker(plan.chain, f"{plan.operation}.{attempt}", "start"), progress)
            segments, ignored = _drained(plan, marked, spark, progress, sessions.watch)
            progress.reached(Point.ARCHIVED)
            cut = _resolved(plan, marked, segments, store)
            progress.reached(Point.RESOLVED)
        except _AttemptFailedError as error:
            reasons.append(str(error))
            progress.note(f"the cut is inconsistent, and made again: {error}")
            continue
        return MadeCut(CutRecord(marked.marker.cut, attempt, marked.seconds, cut), segments, ignored)
    raise CutInconsistentError(
        f"no consistent cut in {len(reasons)} attempts; last: {reasons[-1]}",
        hint="see why the node restarts or loses its connections, then repeat",
        details={"attempts": reasons},
    )


def _mark(sessions: Sessions, start: Marker, progress: Progress) -> _Markers:
    """Write the start marker on all primaries, then the finish marker on all of them."""
    progress.step("cut")
    sessions.watch.check()
    with_markers = _fresh(sessions)
    began = time.monotonic()
    try:
        starts = write_markers(with_markers, start)
        progress.reached(Point.STARTS_WRITTEN)
        finishes = write_markers(with_markers, replace(start, kind="finish"))
        progress.reached(Point.FINISHES_WRITTEN)
    except psycopg.OperationalError as error:
        raise _AttemptFailedError(f"a primary's session was lost between its markers: {error}") from error
    finally:
        for node, connection in with_markers.items():
            if connection is not sessions.connections[node]:
                connection.close()
    # A restart between the markers would have ended the session that wrote both.
    return _Markers(start, starts, finishes, time.monotonic() - began)


def _fresh(sessions: Sessions) -> dict[str, psycopg.Connection[Any]]:
    """The primaries' sessions, a new one where one was lost; each still to the node of the baseline."""
    found: dict[str, psycopg.Connection[Any]] = {}
    for node in sessions.nodes:
        if node.backup_of is not None:
            continue
        connection = sessions.connections[node.id]
        if connection.closed or connection.broken:
            connection = connect(node)
        identity = identify(node, connection)
        check_baseline({node.id: sessions.identities[node.id]}, {node.id: identity})
        found[node.id] = connection
    return found


def _drained(
    plan: CutPlan, marked: _Markers, spark: SparkSource, progress: Progress, watch: Watch
) -> tuple[dict[str, tuple[Segment, ...]], int]:
    """Bring every archive up to the finish marker; a standby's up to its primary's."""
    session = started(spark, progress)
    tasks = [advanced(task, marked.finishes[task.node.shard], task.known) for task in plan.tasks.values()]
    progress.step("archive WAL", total=len(tasks), unit="nodes")
    reports = run_tasks(session, drain, tasks, progress, watch)
    raise_first([report.problem for report in reports])
    return {report.node: report.segments for report in reports}, sum(report.ignored for report in reports)


def _resolved(plan: CutPlan, marked: _Markers, segments: Mapping[str, tuple[Segment, ...]], store: ObjectStore) -> Cut:
    windows: dict[str, NodeWindow] = {}
    for node, task in plan.tasks.items():
        before = plan.before[task.node.shard]
        window = [one for one in (*task.known, *segments[node]) if one.range.through > before.position]
        tables = [read_events(store, one) for one in window]
        events = pa.concat_tables(
            [pa.Table.from_batches([], SEGMENT_SCHEMA), *(table.cast(SEGMENT_SCHEMA) for table in tables)]
        )
        _check_markers(node, task.node.shard, marked, events)
        if task.node.backup_of is None:
            windows[node] = NodeWindow(
                before.position, marked.starts[node], marked.finishes[node], events, before.undecided
            )
    return resolve(windows)


def _check_markers(node: str, shard: str, marked: _Markers, events: pa.Table) -> None:
    """Both markers must come out of every node's WAL, where they were written."""
    markers = events.filter(to_mask(to_numpy(events["op"]) == MARKER))
    found: dict[Marker, int] = {}
    for content, position in zip(markers["row"].to_pylist(), markers["lsn"].to_pylist(), strict=True):
        try:
            found[marker_from_bytes(content)] = position
        except ValueError:
            continue
    expected = {
        marked.marker: marked.starts[shard],
        replace(marked.marker, kind="finish"): marked.finishes[shard],
    }
    for marker, position in expected.items():
        if found.get(marker) != position:
            raise _AttemptFailedError(f"node {node}: marker {marker.kind} did not come out of its WAL")
