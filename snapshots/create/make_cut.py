"""Make a cut: write markers on all primaries, archive every node's WAL up to them, and resolve the cut from it.

An inconsistent attempt is retried after a growing pause. The next attempt continues after the WAL already archived, and
ignores the failed attempt's markers because they carry a different cut id. A node that was restarted gets a new
session, which must acquire the fleet's lock again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pyarrow as pa
from msgspec import UNSET, Struct, UnsetType, structs
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NODES_NAMED_MAX, join_some, name_nodes
from cutline.fleet.progress import News, Progress
from cutline.fleet.record import Time
from cutline.nodes.clocks import ClockReading, check_clocks
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.lock import FleetLock
from cutline.nodes.sessions import Sessions
from cutline.snapshots.create.failover_slots import reading_failover_slots
from cutline.snapshots.records.commit import CutRecord
from cutline.spark.spark_jobs import NodeShares, SparkSource, run_own_tasks, run_tasks, start_session
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError, UnreachableError, error_of
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_values import Cut, InDoubt, Undecided
from cutline.wal.cut.markers import Marker, WrittenMarker, marker_from_bytes, write_markers
from cutline.wal.cut.resolve import NodeWindow, resolve
from cutline.wal.cut.safe_time import SKEW_SECONDS_MAX, Skew, clock_skew, safe_time_of_nodes
from cutline.wal.decoding.known_definitions import SchemaMovedError
from cutline.wal.drain.drain import drain
from cutline.wal.drain.drain_task import DrainReport, DrainTask
from cutline.wal.drain.lags import drain_rounds
from cutline.wal.drain.lineage import KnownMarker, check_markers, diverged_error, markers_of_events
from cutline.wal.drain.replay import ReplayLagError, await_standbys
from cutline.wal.segments.archive import ArchivedSegment, Segment
from cutline.wal.segments.segments import MARKER, SEGMENT_SCHEMA, read_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class AttemptFailedError(Exception):
    """An attempt at a cut was inconsistent. The text names the node and the cause.

    `unreachable` is the node's error if the cause is an unreachable node.
    """

    def __init__(self, cause: str, unreachable: SnapshotError | None = None) -> None:
        super().__init__(cause)
        self.unreachable = unreachable


class CutMarkers(Struct, frozen=True):
    """The markers of an attempt: the start marker, and both markers as written on every primary.

    `seconds` is the time that writing the markers took. `made_at` is the latest time of a finish marker according to
    the trusted clocks, but no earlier than the previous cut: according to these clocks, the cut contains nothing that
    was committed later.
    """

    marker: Marker
    starts: Mapping[str, WrittenMarker]
    finishes: Mapping[str, WrittenMarker]
    seconds: float
    made_at: Time


def write_cut_markers(lock: FleetLock, start: Marker, progress: Progress, last_at: datetime | None) -> CutMarkers:
    """Write the start marker on all primaries, then the finish marker on all of them.

    `last_at` is the time of the previous cut. Raises AttemptFailedError if a session that holds the lock is lost,
    SilentNodeError if a node does not answer, and ClocksDifferError.
    """
    progress.step("cut")
    # If a node is not responding, the command ends: a retry would not help.
    lock.sessions.watch.check()
    try:
        lock.renew()
    except NodeUnreachableError as error:
        raise AttemptFailedError(error.message, error) from error
    primaries = lock.sessions.primaries
    began = time.monotonic()
    try:
        starts = write_markers(primaries, start)
        progress.reached(CrashPoint.STARTS_WRITTEN)
        finishes = write_markers(primaries, structs.replace(start, kind="finish"))
        progress.reached(CrashPoint.FINISHES_WRITTEN)
    except (psycopg.OperationalError, NodeUnreachableError) as error:
        raise AttemptFailedError(_session_lost_text(primaries, error)) from error
    seconds = time.monotonic() - began
    _warn_of_skew(clock_skew(starts), progress)
    readings = [
        ClockReading(node, marker.written_at, marker.sent_at, marker.confirmed_at) for node, marker in starts.items()
    ]
    believed = check_clocks(readings, progress, last_at)
    # One session wrote both markers of a node, so the node was not restarted between them.
    return CutMarkers(start, starts, finishes, seconds, Time.of(latest_time(finishes, believed.nodes, last_at)))


def latest_time(finishes: Mapping[str, WrittenMarker], believed: Collection[str], last_at: datetime | None) -> datetime:
    """Return an upper bound, according to these nodes' clocks, for the time when the cut's last record was written."""
    # A clock is read shortly before its marker is written.
    latest = [finishes[node].written_at + _round_trip(finishes[node]) for node in believed] or [utc_now()]
    # This cut contains everything that the previous cut contains.
    return max(latest) if last_at is None else max(*latest, last_at)


def _round_trip(marker: WrittenMarker) -> timedelta:
    return max(marker.confirmed_at - marker.sent_at, timedelta(0))


def _warn_of_skew(skew: Skew, progress: Progress) -> None:
    if skew.least > SKEW_SECONDS_MAX:
        progress.note(
            f"warning: the clock of node {skew.ahead} is at least {skew.least:.1f} s ahead of node {skew.behind}'s; the"
            " cut does not depend on clocks, but commit times do: synchronize the clocks"
        )


def _session_lost_text(primaries: Mapping[str, psycopg.Connection[Any]], error: Exception) -> str:
    lost = [node for node, connection in primaries.items() if connection.closed]
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = name_nodes(lost) if lost else "a node"
    return f"{where}: its session was lost while markers were being written: {reason.removeprefix(f'{where}: ')}"


def check_cut_markers(node: str, shard: str, marked: CutMarkers, events: pa.Table) -> None:
    """Raise an error unless the node's decoded WAL contains both markers where they were written.

    That is AttemptFailedError for a primary. A standby whose primary has them is not a copy of it any more
    (WalDivergedError), however often the cut is repeated.
    """
    markers = events.filter(to_mask(to_numpy(events["op"]) == MARKER))
    positions: dict[Marker, int] = {}
    for content, position in zip(markers["row"].to_pylist(), markers["lsn"].to_pylist(), strict=True):
        try:
            positions[marker_from_bytes(content)] = position
        except ValueError:
            continue
    expected = {
        marked.marker: marked.starts[shard].position,
        structs.replace(marked.marker, kind="finish"): marked.finishes[shard].position,
    }
    for marker, position in expected.items():
        if positions.get(marker) == position:
            continue
        if node != shard:
            problem = f"its decoded WAL lacks the {marker.kind} marker of cut {marker.cut}, which its primary has"
            raise diverged_error(node, problem, {"cut": marker.cut, "position": str(position)})
        raise AttemptFailedError(f"node {node}: its decoded WAL lacks the {marker.kind} marker")


PAUSE_SECONDS_FIRST, PAUSE_SECONDS_MAX = 1.0, 10.0
# Pauses vary by this fraction either way, so that a periodic disturbance does not hit every attempt.
PAUSE_JITTER = 0.25


class CutInconsistentError(SnapshotError):
    """The cut was inconsistent in all attempts; nothing was committed."""

    exit_code = 9


class CutUnreachableError(UnreachableError):
    """A node could not be reached in the last attempt at a cut."""


class LastCut(Struct, frozen=True):
    """The previous cut on a primary: its position, and the transactions that were undecided and in doubt there.

    `last_commit_at` is the commit time of the newest transaction before the cut, and `marker` its finish marker, if it
    was a cut of this chain.
    """

    position: Lsn
    undecided: tuple[Undecided, ...] = ()
    in_doubt: tuple[InDoubt, ...] = ()
    last_commit_at: Time | UnsetType = UNSET
    marker: KnownMarker | None = None


class CutPlan(Struct, frozen=True):
    """The input of a cut: a drain task for every node (`make_cut` sets its `finish`), and the previous cut.

    `run` is the id of the operation's run (Operation.run_id), from which the ids of cuts are made. `known` holds each
    node's committed segments, at least those that reach beyond the previous cut. `last_at` is the time of the previous
    cut, if it belongs to the same chain. `wait_seconds` is the maximum wait for standbys. If it `spares_late` ones, it
    does not wait for standbys that it can do without and that will not be in time.
    """

    chain: str
    run: str
    tasks: Mapping[str, DrainTask]
    last_cut: Mapping[str, LastCut]
    known: Mapping[str, tuple[Segment, ...]]
    retries: int
    last_at: datetime | None
    wait_seconds: float
    spares_late: bool = False


class ArchivedCut(Struct, frozen=True):
    """A consistent cut, and the segments that were added to each node's archive up to its finish marker.

    `idle` holds the last segment of each idle node, that is, each node with nothing added to its archive. `dropped` has
    by node the positions of transactions with changes that were not archived, as in a DrainReport.
    """

    record: CutRecord
    archived: Mapping[str, tuple[ArchivedSegment, ...]]
    ignored: int
    idle: Mapping[str, Segment]
    dropped: Mapping[str, frozenset[int]]

    @property
    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """The segments by node, as a commit lists them."""
        return {node: tuple(segment.segment for segment in segments) for node, segments in self.archived.items()}


def make_cut(
    lock: FleetLock, plan: CutPlan, spark: SparkSource | None, store: ObjectStore, progress: Progress
) -> ArchivedCut:
    """Make the cut, retrying up to `plan.retries` times. Without `spark`, this process archives the WAL itself.

    If all attempts fail, raises CutInconsistentError, or CutUnreachableError if a node was unreachable in the last
    attempt. An error that a retry can't fix is raised immediately.
    """
    causes: list[str] = []
    for attempt in range(1, plan.retries + 2):
        try:
            start = Marker(plan.chain, f"{plan.run}.{attempt}", "start")
            marked = write_cut_markers(lock, start, progress, plan.last_at)
            reports = _drain(plan, marked, spark, progress, lock.sessions)
            progress.reached(CrashPoint.ARCHIVED)
            cut = _resolve(plan, marked, reports, store)
            progress.reached(CrashPoint.RESOLVED)
        except AttemptFailedError as error:
            causes.append(str(error))
            report = f"cut attempt {attempt} of {plan.retries + 1} was inconsistent: {error}"
            if attempt > plan.retries:
                progress.note(report)
                raise _cut_error(causes, error.unreachable) from error
            seconds = pause_seconds(attempt)
            progress.note(News(f"{report}; retrying in {seconds:.1f} s"))
            time.sleep(seconds)
            continue
        tasks = plan.tasks
        return ArchivedCut(
            _record(marked, cut, causes),
            {report.node: report.segments for report in reports},
            sum(report.ignored for report in reports),
            {report.node: last for report in reports if report.idle is not None and (last := tasks[report.node].last)},
            {report.node: report.dropped for report in reports},
        )
    raise ValueError(f"{plan.retries} retries")


def _record(marked: CutMarkers, cut: Cut, causes: list[str]) -> CutRecord:
    return CutRecord(
        id=marked.marker.cut,
        attempts=len(causes) + 1,
        causes=tuple(causes),
        seconds=round(marked.seconds, 6),
        nodes=cut.nodes,
        global_transactions=cut.global_transactions,
        included_early=cut.included_early,
        in_flight=cut.in_flight,
        made_at=marked.made_at,
        safe_at=safe_time_of_nodes(cut.nodes),
        skew_seconds=round(clock_skew(marked.starts).most, 3),
    )


def pause_seconds(attempt: int) -> float:
    """Return the pause after failed attempt number `attempt` (from 1): it doubles each time, up to a maximum."""
    seconds = min(PAUSE_SECONDS_FIRST * 2.0 ** (attempt - 1), PAUSE_SECONDS_MAX)
    return seconds * random.uniform(1 - PAUSE_JITTER, 1 + PAUSE_JITTER)


def _cut_error(causes: list[str], unreachable: SnapshotError | None) -> SnapshotError:
    attempts = f"{len(causes)} attempts" if len(causes) > 1 else "one attempt"
    if unreachable:
        return CutUnreachableError(
            f"no cut after {attempts}: {unreachable.message}",
            hint=unreachable.hint,
            details={**unreachable.details, "attempts": causes},
        )
    return CutInconsistentError(
        f"no consistent cut after {attempts}; last: {causes[-1]}",
        hint="find out why the node restarts or loses connections, then repeat the command; or allow more attempts:"
        " --retries N",
        details={"attempts": causes},
    )


def _drain(
    plan: CutPlan, marked: CutMarkers, spark: SparkSource | None, progress: Progress, sessions: Sessions
) -> list[DrainReport]:
    """Archive every node's WAL up to the finish marker of its primary."""
    session = start_session(spark, progress) if spark else None
    tasks = [replace(task, finish=marked.finishes[task.node.shard].position) for task in plan.tasks.values()]
    progress.step("archive WAL", total=len(tasks), unit="nodes")
    standbys = [task.node for task in tasks if task.node.backup_of is not None]
    finishes = {shard: marker.position for shard, marker in marked.finishes.items()}
    try:
        spared = {node.id for node in standbys if plan.spares_late and sessions.may_leave_out(node)}
        await_standbys(standbys, finishes, plan.wait_seconds, progress, "the cut", spared)
    except NodeUnreachableError as error:
        raise AttemptFailedError(error.message, error) from error
    shares = NodeShares[DrainTask].of_tasks(progress, tasks, lambda task: task.node.id, lambda task: task.wal_bytes)
    shares.begin()
    wait_seconds = min(plan.wait_seconds, sessions.fleet.standby_wait_seconds)
    with reading_failover_slots(sessions, tasks[0].slot, finishes, wait_seconds, progress):
        reports = _run_drains(tasks, session, sessions, shares)
    _raise_problems(reports)
    return reports


def _run_drains(
    tasks: list[DrainTask], session: SparkSession | None, sessions: Sessions, shares: NodeShares[DrainTask]
) -> list[DrainReport]:
    if session is not None:
        return run_tasks(session, drain, tasks, shares, watch=sessions.watch)
    by_node = {
        report.node: report
        for some, at_once in drain_rounds(tasks)
        for report in run_own_tasks(drain, some, sessions, shares, at_once)
    }
    return [by_node[task.node.id] for task in tasks]


def _raise_problems(reports: list[DrainReport]) -> None:
    """Raise the error of failed drains: AttemptFailedError, which is retried, if all failures are unreachable nodes."""
    failures = [(report.node, error_of(report.problem)) for report in reports if report.problem]
    final = [error for _, error in failures if not _is_transient(error)]
    # A new plan resolves the unknown definitions on all nodes that reported them, but does not help with other final
    # errors.
    moved = [error for error in final if isinstance(error, SchemaMovedError)]
    if moved and len(moved) == len(final):
        moved[0].details["moved"] = [table for error in moved for table in cast(list[object], error.details["moved"])]
    for error in [error for error in final if error not in moved][:1] or moved[:1]:
        if len(failures) > 1:
            error.details["others"] = [other.message for _, other in failures if other is not error]
        raise error
    if failures:
        raise AttemptFailedError(join_some((error.message for _, error in failures), NODES_NAMED_MAX), failures[0][1])


def _is_transient(error: SnapshotError) -> bool:
    """Whether the node became unreachable while its slot was read; a retry then continues where the archive ends."""
    # A retry would not help if the standby lags: the drain has already waited for it.
    is_lag = isinstance(error, ReplayLagError)
    return error.exit_code == UnreachableError.exit_code and "node" in error.details and not is_lag


def _resolve(plan: CutPlan, marked: CutMarkers, reports: list[DrainReport], store: ObjectStore) -> Cut:
    windows: dict[str, NodeWindow] = {}
    by_node = {report.node: report for report in reports}
    # The primaries first: what their WAL lacks, their standbys' lacks as well.
    for node, task in sorted(plan.tasks.items(), key=lambda one: one[1].node.backup_of is not None):
        report = by_node[node]
        before = plan.last_cut[task.node.shard]
        # If the primary's copy begins again, its position is after the last cut, but its standby's archive continues.
        since = min(before.position, before.marker.position) if before.marker and task.last else before.position
        window = [
            segment
            for segment in (*plan.known.get(node, ()), *(archived.segment for archived in report.segments))
            if segment.through > since
        ]
        tables = [read_events(store, segment) for segment in window]
        if report.idle is not None:
            tables.append(report.idle)
        events = pa.concat_tables(
            [pa.Table.from_batches([], SEGMENT_SCHEMA), *(table.cast(SEGMENT_SCHEMA) for table in tables)]
        )
        check_cut_markers(node, task.node.shard, marked, events)
        # WAL after the archive was read now, perhaps from another server than at the previous cut.
        if task.last_marker is not None and task.last is not None and task.last_marker.position > task.last.through:
            check_markers(node, [task.last_marker], set(markers_of_events(events)))
        if task.node.backup_of is None:
            windows[node] = NodeWindow(
                before.position,
                marked.starts[node].position,
                marked.finishes[node].position,
                events,
                Time.of(marked.starts[node].written_at),
                before.undecided,
                before.in_doubt,
                before.last_commit_at,
            )
    return resolve(windows)
