"""Resolve every cut of a chain again from the archived events, and compare the result with its commit.

If a position is slightly wrong, every copy gains or loses the same whole transactions, so comparing the copies with
each other doesn't show it. As when the cut was made, the driver holds the events of only one cut in memory, plus at
most READS_AT_ONCE segments that are being read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pyarrow as pa
from msgspec import UNSET, Struct, UnsetType, field

from cutline.check.cut_findings import decided_differently, differences, lost_prepares, shared_parts, torn_conflict
from cutline.check.report import Conflict, Doubt, Findings
from cutline.check.times import note_marks
from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.row_batches import from_stream
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, Increment
from cutline.storage.errors import report_of
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_events import FleetEvents, fleet_events
from cutline.wal.cut.cut_values import InDoubt, NodeCut, Undecided
from cutline.wal.cut.markers import Marker, marker_from_bytes
from cutline.wal.cut.resolve import GlobalIdReusedError, NodeWindow, resolve_events
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError
from cutline.wal.segments.segments import MARKER, SEGMENT_SCHEMA, read_events

# Reading a small segment consists mostly of waiting for the store.
READS_AT_ONCE = 8
# At most this many transactions of each kind are named for a cut.
NAMED_MAX, DOUBTS_MAX = 100, 5


class StoredEvents(Struct, frozen=True):
    """The events of segments in the store. `kept` has Arrow streams of those that were read before, by object key.

    `held` has the rows of some segments, if the driver holds the archives.
    """

    store: ObjectStore
    kept: Mapping[str, bytes] = field(default_factory=dict)
    held: HeldObjects | None = None

    def read(self, segment: Segment) -> pa.Table:
        """Return the segment's events, read from the store if they were not kept; raises ObjectDamagedError."""
        if self.held is not None and (rows := self.held.rows.get(segment.key)):
            return rows.part(segment.changes)
        stream = self.kept.get(segment.key)
        return read_events(self.store, segment) if stream is None else from_stream(stream)

    def read_all(self, segments: Sequence[Segment]) -> list[pa.Table]:
        """Return the events of each segment, as `read` does; READS_AT_ONCE are read from the store at once."""
        were_read = self.kept if self.held is None else self.held.rows
        if all(segment.key in were_read for segment in segments):
            return [self.read(segment) for segment in segments]
        with ThreadPoolExecutor(READS_AT_ONCE) as threads:
            return list(threads.map(self.read, segments))


def check_cuts(
    chain: Chain, events: StoredEvents, findings: Findings, progress: Progress, after: int | None = None
) -> int:
    """Report a conflict for every cut that its archived events don't confirm; stop if a primary's archive is damaged.

    With `after`, only the cuts of later increments are resolved, and of a merged chain those after its first. Returns
    the number of global transactions that were compared, once for each pair of shards with parts of it. Raises
    StoreUnreachableError if the store does not answer: that proves nothing about a cut.
    """
    compared = 0
    known = _known_commits(chain, after)
    progress.step("resolve cuts again", total=len(chain.commits) - len(known), unit="cuts")
    archives = [_ShardArchive(shard, position) for shard, position in _first_slots(chain).items()]
    for commit in known:
        archives = _begin_again(archives, commit)
        for archive in archives:
            archive.extend(commit)
        _end_windows(archives, commit)
    for commit in chain.commits[len(known) :]:
        if findings.damaged & set(chain.primaries):
            return compared
        archives = _begin_again(archives, commit)
        try:
            windows = _read_windows(archives, commit, events)
            for archive in archives:
                if count := archive.count_in_idle_range(windows[archive.shard].events):
                    detail = (
                        f"earlier commits list the node as idle, but the archive contains {count:,} events from that"
                        " time"
                    )
                    findings.conflict(Conflict("cut", f"cut {commit.cut.id}: {detail}", node=archive.shard))
            fleet = fleet_events(windows)
            compared += _compare_shared(windows, fleet, commit, findings, is_last=commit is chain.last)
            cut = resolve_events(windows, fleet)
        except ObjectDamagedError as error:
            findings.damage(report_of(error))
            return compared
        except GlobalIdReusedError as error:
            findings.conflict(
                Conflict(
                    "cut",
                    f"cut {commit.cut.id} can't be resolved again: {error.message}",
                    global_id=str(error.details["global_id"]),
                )
            )
        else:
            for conflict in differences(commit.cut, cut, windows):
                findings.conflict(conflict)
            note_marks(commit, windows, findings)
        _end_windows(archives, commit)
        progress.advance(1)
    return compared


def _known_commits(chain: Chain, after: int | None) -> tuple[Commit, ...]:
    """Return the commits whose cuts need not be resolved again: those that an earlier check has compared.

    The cut with which a merged chain begins can't be: the archive before it may be gone.
    """
    if after is None:
        return chain.commits[:1] if chain.beginning else ()
    return chain.up_to(after).commits


def _compare_shared(
    windows: Mapping[str, NodeWindow], fleet: FleetEvents, commit: Commit, findings: Findings, *, is_last: bool
) -> int:
    """Report the transactions whose parts contradict each other; return how many pairs of parts were compared."""
    shared = shared_parts(fleet, commit.cut, tuple(windows))
    conflicts = [torn_conflict(torn, tuple(windows)) for torn in shared.torn]
    conflicts += _lost_prepares(windows, commit, is_last=is_last)
    for conflict in conflicts[:NAMED_MAX]:
        findings.conflict(conflict)
    if len(conflicts) > NAMED_MAX:
        detail = f"cut {commit.cut.id}: {len(conflicts) - NAMED_MAX:,} more transactions are not listed"
        findings.conflict(Conflict("transaction", detail))
    # In PostgreSQL, each part can be committed or rolled back by itself.
    decided = list(decided_differently(fleet, windows))
    for detail in decided[:DOUBTS_MAX]:
        what = "somebody decided its parts differently, used its gid twice, or changed the store"
        findings.doubt(Doubt("transaction", f"cut {commit.cut.id}: {detail}: {what}"))
    if len(decided) > DOUBTS_MAX:
        detail = f"cut {commit.cut.id}: {len(decided) - DOUBTS_MAX:,} more such transactions are not listed"
        findings.doubt(Doubt("transaction", detail))
    return shared.pairs + (shared.waiting if is_last else 0)


def _lost_prepares(windows: Mapping[str, NodeWindow], commit: Commit, *, is_last: bool) -> Iterator[Conflict]:
    """Yield a conflict for each COMMIT PREPARED whose PREPARE is missing.

    Those after the cut belong to the next cut, if there is one.
    """
    cuts = commit.cut.by_node
    for node, window in windows.items():
        cut = cuts[node]
        for global_id, position in lost_prepares(window, cut.finish if is_last else cut.position):
            detail = f"the archive contains the COMMIT PREPARED of the transaction, at {position}, but not its PREPARE"
            yield Conflict("transaction", detail, node=node, global_id=global_id)


class _ShardArchive(Struct):
    """The start of a shard's next window, and the segments of its archive that extend into that window.

    `idle_range` is the WAL in which the shard was idle according to the commits since its last segment.
    """

    shard: str
    position: Lsn
    idle_range: tuple[Lsn, Lsn] | None = None
    undecided: tuple[Undecided, ...] = ()
    in_doubt: tuple[InDoubt, ...] = ()
    last_commit_at: Time | UnsetType = UNSET
    segments: tuple[Segment, ...] = ()

    def extend(self, commit: Commit) -> tuple[Segment, ...]:
        """Add the commit's segments; return all segments in the window that ends at the commit's cut.

        Also return the segments of WAL in which earlier commits say that the shard was idle.
        """
        known = (*self.segments, *commit.segments.get(self.shard, ()))
        begin = min(self.position, self.idle_range[0]) if self.idle_range else self.position
        self.segments = tuple(segment for segment in known if segment.through > begin)
        return self.segments

    def count_in_idle_range(self, events: pa.Table) -> int:
        """Count the events in WAL that, according to earlier commits, contains only markers.

        The segment after this WAL begins before it, because the archive of an idle node is not extended.
        """
        if self.idle_range is None:
            return 0
        begin, finish = self.idle_range
        ends, op = to_numpy(events["end_lsn"]), to_numpy(events["op"])
        return int(np.count_nonzero((ends > begin) & (ends <= finish) & (op != MARKER)))

    def end_window(self, cut: NodeCut, last: Segment | None) -> None:
        """Begin the window after a cut; `last` is the last segment of the archive if the shard was idle."""
        self.idle_range = (last.through, cut.finish) if last else None
        self.position, self.undecided, self.in_doubt = cut.position, cut.undecided, cut.in_doubt
        self.last_commit_at = cut.last_commit_at


def _first_slots(chain: Chain) -> dict[str, Lsn]:
    """Return the positions of the slots of the primaries with which the chain begins."""
    shards = chain.full.cut.by_node
    return {shard: position for shard, position in chain.first_slots.items() if shard in shards}


def _begin_again(archives: list[_ShardArchive], commit: Commit) -> list[_ShardArchive]:
    """Return the archives that the commit continues, and those of the primaries whose copies begin with it."""
    if not isinstance(commit, Increment):
        return archives
    shards = commit.cut.by_node
    begun = {node: _ShardArchive(node, renewal.base) for node, renewal in commit.renewed.items() if node in shards}
    left = {archive.shard: archive for archive in archives if archive.shard in shards}
    return list((left | begun).values())


def _end_windows(archives: list[_ShardArchive], commit: Commit) -> None:
    cuts = commit.cut.by_node
    for archive in archives:
        archive.end_window(cuts[archive.shard], commit.idle.get(archive.shard))


def _read_windows(archives: list[_ShardArchive], commit: Commit, stored: StoredEvents) -> dict[str, NodeWindow]:
    """Read every shard's events between the previous cut and the commit's cut; raises ObjectDamagedError."""
    listed = [(archive.shard, segment) for archive in archives for segment in archive.extend(commit)]
    tables = {archive.shard: [pa.Table.from_batches([], SEGMENT_SCHEMA)] for archive in archives}
    for (shard, _), table in zip(listed, stored.read_all([segment for _, segment in listed]), strict=True):
        tables[shard].append(table)
    windows: dict[str, NodeWindow] = {}
    cuts = commit.cut.by_node
    for archive in archives:
        cut, events = cuts[archive.shard], pa.concat_tables(tables[archive.shard])
        windows[archive.shard] = NodeWindow(
            archive.position,
            cut.start,
            cut.finish,
            events,
            cut.marked_at,
            archive.undecided,
            archive.in_doubt,
            archive.last_commit_at,
        )
    return windows


def _ends_before(commit: Commit, node: str, cut: NodeCut) -> bool:
    """Whether the node's archive ended before the commit's cut."""
    end = commit.end_of_archive(node)
    return end is not None and cut.start >= end.through


def check_markers(
    chain: Chain, markers: Mapping[str, Mapping[bytes, Lsn]], findings: Findings, after: int | None = None
) -> None:
    """Check that every undamaged archive contains both markers of every cut, at the positions stored in the commit.

    The archive of a node whose copy began again has the markers of the cuts since then.
    The archive of a node that is idle or absent at the last cut ends before that cut, and perhaps before earlier ones.
    Their markers will be in its next segment. With `after`, the markers are those of later increments, and so of the
    cuts for which the node was idle then.
    """
    for node, contents in markers.items():
        if node in findings.damaged:
            continue
        idle, known = chain.last.end_of_archive(node), _known_commits(chain, after)
        was_idle = known[-1].end_of_archive(node) if known else None
        first, begun = chain.first_cut(node), chain.begun(chain.shard_of(node))
        cuts = list(zip(chain.commits[first:], chain.cuts_since(node), strict=True))
        earlier = cuts[: max(len(known) - first, 0)]
        awaited = [(commit, cut) for commit, cut in earlier if was_idle and cut.start >= was_idle.through]
        positions: dict[Marker, Lsn] = {}
        for content, position in contents.items():
            # The archive also contains the markers of other chains.
            with suppress(ValueError):
                positions[marker_from_bytes(content)] = position
        for commit, cut in (*awaited, *cuts[max(len(known) - first, 0) :]):
            if idle is not None and cut.start >= idle.through:
                continue
            if commit.increment < begun and _ends_before(commit, node, cut):
                # A failover may have lost the markers, so that the primary's copy began again.
                continue
            for kind, position in (("start", cut.start), ("finish", cut.finish)):
                if positions.get(Marker(chain.full.chain, commit.cut.id, kind)) != position:
                    detail = f"the archive contains no {kind} marker of cut {commit.cut.id} at {position}"
                    findings.conflict(Conflict("marker", detail, node=node))
