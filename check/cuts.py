"""Resolve every cut of a chain again from the archived events, and compare the result with its commit.

If a position is slightly wrong, every copy gains or loses the same whole transactions, so comparing the copies with
each other doesn't show it. As when the cut was made, the driver holds the events of only one cut in memory, plus at
most READS_AT_ONCE segments that are being read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType

from cutline.check.report import Conflict, Findings
from cutline.check.times import note_marks
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.row_batches import from_stream
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.storage.errors import report_of
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_values import Cut, InDoubt, NodeCut, Undecided
from cutline.wal.cut.markers import Marker, marker_from_bytes
from cutline.wal.cut.resolve import GlobalIdReusedError, NodeWindow, resolve
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.segments import MARKER, SEGMENT_SCHEMA, Segment, read_events

# Reading a small segment consists mostly of waiting for the store.
READS_AT_ONCE = 8
NODE_FIELDS = ("position", "undecided", "rolled_back", "in_doubt", "local_transactions", "last_commit_at")
TOTALS = ("global_transactions", "included_early", "in_flight")


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """The events of segments in the store. `kept` has Arrow streams of those that were read before, by object key."""

    store: ObjectStore
    kept: Mapping[str, bytes] = field(default_factory=dict)

    def read(self, segment: Segment) -> pa.Table:
        """Return the segment's events, read from the store if they were not kept; raises ObjectDamagedError."""
        stream = self.kept.get(segment.key)
        return read_events(self.store, segment) if stream is None else from_stream(stream)


def check_cuts(chain: Chain, events: StoredEvents, findings: Findings, progress: Progress) -> None:
    """Report a conflict for every cut that its archived events don't confirm; stop if a primary's archive is damaged.

    Raises StoreUnreachableError if the store does not answer: that proves nothing about a cut.
    """
    progress.step("resolve cuts again", total=len(chain.commits), unit="cuts")
    archives = [_ShardArchive(shard, chain.full.base[shard]) for shard in chain.full.primaries]
    for commit in chain.commits:
        if findings.damaged & set(chain.full.primaries):
            return
        try:
            windows = _read_windows(archives, commit, events)
            for archive in archives:
                if count := archive.count_in_idle_range(windows[archive.shard].events):
                    detail = (
                        f"earlier commits list the node as idle, but the archive contains {count} events from that time"
                    )
                    findings.conflict(Conflict("cut", f"cut {commit.cut.id}: {detail}", node=archive.shard))
            cut = resolve(windows)
        except ObjectDamagedError as error:
            findings.damage(report_of(error))
            return
        except GlobalIdReusedError as error:
            findings.conflict(Conflict("cut", f"cut {commit.cut.id} can't be resolved again: {error.message}"))
        else:
            for node, detail in _differences(commit, cut):
                findings.conflict(Conflict("cut", f"cut {commit.cut.id}: {detail}", node=node))
            note_marks(commit, windows, findings)
        for archive in archives:
            archive.end_window(commit)
        progress.advance(1)


@dataclass(slots=True)
class _ShardArchive:
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

    def end_window(self, commit: Commit) -> None:
        cut, last = commit.cut.of(self.shard), commit.idle.get(self.shard)
        self.idle_range = (last.through, cut.finish) if last else None
        self.position, self.undecided, self.in_doubt = cut.position, cut.undecided, cut.in_doubt
        self.last_commit_at = cut.last_commit_at


def _read_windows(archives: list[_ShardArchive], commit: Commit, stored: StoredEvents) -> dict[str, NodeWindow]:
    """Read every shard's events between the previous cut and the commit's cut; raises ObjectDamagedError."""
    listed = [(archive.shard, segment) for archive in archives for segment in archive.extend(commit)]
    with ThreadPoolExecutor(READS_AT_ONCE) as threads:
        event_tables = threads.map(lambda entry: stored.read(entry[1]).cast(SEGMENT_SCHEMA), listed)
        tables = {archive.shard: [pa.Table.from_batches([], SEGMENT_SCHEMA)] for archive in archives}
        for (shard, _), table in zip(listed, event_tables, strict=True):
            tables[shard].append(table)
    windows: dict[str, NodeWindow] = {}
    for archive in archives:
        cut, events = commit.cut.of(archive.shard), pa.concat_tables(tables[archive.shard])
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


def _differences(commit: Commit, resolved: Cut) -> Iterable[tuple[str | None, str]]:
    for again in resolved.nodes:
        stored = commit.cut.of(again.node)
        for name in NODE_FIELDS:
            expected, given = _comparable(again, name), _comparable(stored, name)
            if given != expected:
                yield (
                    again.node,
                    f"{name} is {_shown(given)} in the commit, but {_shown(expected)} in the archived events",
                )
    for name in TOTALS:
        if getattr(resolved, name) != getattr(commit.cut, name):
            given, expected = getattr(commit.cut, name), getattr(resolved, name)
            yield None, f"{name} is {given} in the commit, but {expected} in the archived events"


def _comparable(cut: NodeCut, name: str) -> object:
    value = getattr(cut, name)
    return frozenset(value) if isinstance(value, tuple) else value


def _shown(value: object) -> str:
    return f"a list of {len(value)} transactions" if isinstance(value, frozenset) else str(value)


def check_markers(chain: Chain, markers: Mapping[str, Mapping[bytes, Lsn]], findings: Findings) -> None:
    """Check that every undamaged archive contains both markers of every cut, at the positions stored in the commit.

    The archive of a node that is idle at the last cut ends before that cut, and perhaps before earlier ones. Their
    markers will be in its next segment.
    """
    for node, contents in markers.items():
        if node in findings.damaged:
            continue
        idle = chain.last.idle.get(node)
        positions: dict[Marker, Lsn] = {}
        for content, position in contents.items():
            # The archive also contains the markers of other chains.
            with suppress(ValueError):
                positions[marker_from_bytes(content)] = position
        for commit in chain.commits:
            cut = commit.cut.of(chain.shard_of(node))
            if idle is not None and cut.start >= idle.through:
                continue
            for kind, position in (("start", cut.start), ("finish", cut.finish)):
                if positions.get(Marker(chain.full.chain, commit.cut.id, kind)) != position:
                    detail = f"the archive contains no {kind} marker of cut {commit.cut.id} at {position}"
                    findings.conflict(Conflict("marker", detail, node=node))


def check_restore_point(chain: Chain, store: ObjectStore, findings: Findings, progress: Progress) -> None:
    """Read every object and resolve the cut again; report a conflict for every damaged object and every difference."""
    segments = [segment for node in chain.nodes for segment in chain.segments(node.node)]
    progress.step("read WAL archive", total=len(segments), unit="objects")
    markers: dict[str, dict[bytes, Lsn]] = {node.node: {} for node in chain.nodes}
    for segment in segments:
        try:
            markers[segment.node] |= _read_markers(store, segment)
        except ObjectDamagedError as error:
            findings.damage(report_of(error))
        else:
            findings.count(objects=1, size_bytes=segment.size)
        progress.advance(1)
    check_markers(chain, markers, findings)
    check_cuts(chain, StoredEvents(store), findings, progress)
    findings.report.compared.transactions += chain.last.cut.global_transactions


def _read_markers(store: ObjectStore, segment: Segment) -> dict[bytes, Lsn]:
    """Verify every byte of the segment; return its markers with their positions."""
    read_listed(store, segment.node, segment.key, (segment.size, segment.digest))
    events = read_events(store, segment)
    markers = events.filter(to_mask(to_numpy(events["op"]) == MARKER))
    return dict(zip(markers["row"].to_pylist(), map(Lsn, markers["lsn"].to_pylist()), strict=True))
