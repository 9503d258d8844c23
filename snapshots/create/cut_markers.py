"""The markers of one attempt at a cut: written on all primaries, and found again in every node's decoded WAL."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pyarrow as pa
from msgspec import structs

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.nodes.clocks import ClockReading, check_clocks
from cutline.fleet.nodes.connections import NodeUnreachableError
from cutline.fleet.nodes.lock import FleetLock
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError
from cutline.wal.cut.markers import Marker, WrittenMarker, marker_from_bytes, write_markers
from cutline.wal.cut.safe_time import SKEW_SECONDS_MAX, Skew, clock_skew
from cutline.wal.segments.segment_schema import MARKER


class AttemptFailedError(Exception):
    """One attempt at a cut was inconsistent. The text names the node and the cause.

    `unreachable` is the error if the node is away.
    """

    def __init__(self, cause: str, unreachable: SnapshotError | None = None) -> None:
        super().__init__(cause)
        self.unreachable = unreachable


@dataclass(frozen=True, slots=True)
class CutMarkers:
    """The start marker of an attempt, and both of every primary, which took so many seconds.

    `made_at` is the latest time of a finish marker by the clocks that can be believed, and no earlier than the cut
    before: nothing that was committed later, by such a clock, is in the cut.
    """

    marker: Marker
    starts: Mapping[str, WrittenMarker]
    finishes: Mapping[str, WrittenMarker]
    seconds: float
    made_at: Time


def write_cut_markers(
    lock: FleetLock, start: Marker, progress: Progress, last_at: datetime | None = None
) -> CutMarkers:
    """Write the start marker on all primaries, then the finish marker on all of them.

    `last_at` is when the cut before was made. Raises AttemptFailedError if a session of the lock is lost, at once if a
    node is silent, and ClocksDifferError.
    """
    progress.step("cut")
    # A silent node ends the command: a retry would not help.
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
    readings = [ClockReading(node, one.written_at, one.sent_at, one.confirmed_at) for node, one in starts.items()]
    believed = check_clocks(readings, progress, last_at)
    # One session wrote both markers of a node, so the node was not restarted between them.
    return CutMarkers(start, starts, finishes, seconds, Time.of(latest_time(finishes, believed.nodes, last_at)))


def latest_time(finishes: Mapping[str, WrittenMarker], believed: Collection[str], last_at: datetime | None) -> datetime:
    """When the last record that can be in the cut was written, by the clocks of these nodes; at the latest."""
    # A clock is read shortly before its marker is written.
    latest = [finishes[node].written_at + _round_trip(finishes[node]) for node in believed] or [utc_now()]
    # Whatever the cut before has is in this one, too.
    return max(latest) if last_at is None else max(*latest, last_at)


def _round_trip(marker: WrittenMarker) -> timedelta:
    return max(marker.confirmed_at - marker.sent_at, timedelta(0))


def _warn_of_skew(skew: Skew, progress: Progress) -> None:
    if skew.least > SKEW_SECONDS_MAX:
        progress.note(
            f"warning: the clock of node {skew.ahead} is at least {skew.least:.1f} s ahead of node {skew.behind}'s; the"
            " cut does not depend on clocks, but the times of commits do: synchronize them"
        )


def _session_lost_text(primaries: Mapping[str, psycopg.Connection[Any]], error: Exception) -> str:
    lost = [node for node, connection in primaries.items() if connection.closed]
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = f"node {', '.join(lost)}" if lost else "a node"
    return f"{where}: its session was lost while markers were written: {reason.removeprefix(f'{where}: ')}"


def check_cut_markers(node: str, shard: str, marked: CutMarkers, events: pa.Table) -> None:
    """Raise AttemptFailedError unless the node's decoded WAL has both markers where they were written."""
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
        if positions.get(marker) != position:
            raise AttemptFailedError(f"node {node}: its decoded WAL lacks the {marker.kind} marker")
