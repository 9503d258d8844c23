"""The archive of a node: its segments in order, as commits list them, and what each segment says about itself.

A segment is created once, under the number that follows the last segment's. Segment n + 1 begins where segment n ends.
This is checked whenever an archive is read, never assumed. Commands that only read documents use this module, so it
does not import what reads the segments themselves (wal/segments/segments.py), which takes as long as such a command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, field

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import Count, Integer, Record
from cutline.fleet.timeline_history import TimelineHistory
from cutline.nodes.groups import Group
from cutline.storage.errors import ChainEnd, SnapshotError


class Definition(Record, frozen=True):
    """A definition of the table `oid`; if `oid` is 0, the table is identified by its name.

    `copied_from` is the position of the node's base copy under this definition; None if there is no separate base copy.
    `is_gone`: the table no longer exists.
    """

    oid: Count
    group: Group
    copied_from: Lsn | None = None
    is_gone: bool = False


class ArchiveError(SnapshotError):
    """The archive of a node does not match its commits or its own metadata."""

    exit_code = 3


class SegmentDamagedError(ArchiveError):
    """A segment that no commit lists yet is damaged. No commit needs it, but the node's copy can't be continued."""


class OpenTransaction(Record, frozen=True):
    """The point where a segment ends inside a transaction that is too large for one segment: after the change `seq`.

    `changes` is the number of its changes in the archive so far.
    """

    lsn: Lsn
    seq: Integer
    changes: Count


class SegmentRange(Record, frozen=True):
    """The WAL of `node` that a segment holds: all records that end after `after`, up to `through`.

    With `open`, the segment also holds the beginning of the next transaction. `history` is that of the timeline of the
    shard's primary when the WAL was read, if it is known.
    """

    node: str
    operation: str
    after: Lsn
    through: Lsn
    open: OpenTransaction | None = None
    history: TimelineHistory | UnsetType = UNSET


class Segment(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One stored segment, as commits list it. The counts cover its whole content, regardless of any cut.

    `node` to `open` describe its range. The events can be read from the end of the object alone, which begins at
    `events_at` and has the digest `events_digest`. Older commits have neither field.
    """

    key: str
    number: Count
    size: Count
    digest: str
    events_at: Count | None = None
    events_digest: str = ""
    changes: Count
    events: Count
    partials: Count
    truncates: Count
    node: str
    operation: str
    after: Lsn
    through: Lsn
    open: OpenTransaction | None

    def contains(self, lsn: Lsn) -> bool:
        """Whether it may contain changes of the transaction at this position."""
        return self.after <= lsn < self.through or (self.open is not None and self.open.lsn == lsn)

    def reaches(self, position: Lsn) -> bool:
        """Whether it may contain changes of transactions at or after the position."""
        return self.through > position or (self.open is not None and self.open.lsn >= position)

    def may_count(self, begin: Lsn, end: Lsn, earlier: Iterable[Lsn]) -> bool:
        """Whether it may contain changes of transactions from `begin` to before `end`, or of those at `earlier`."""
        if not self.changes or self.after >= end:
            return False
        return (begin < end and self.reaches(begin)) or any(map(self.contains, earlier))


class ArchivedSegment(Struct, frozen=True):
    """A segment with the metadata that commits don't contain.

    `definitions` are the ones that no commit listed yet when the segment was written. `first_changes` are the positions
    of the first changes under them, keyed by group number. `history` is as in a SegmentRange.
    """

    segment: Segment
    definitions: tuple[Definition, ...] = ()
    first_changes: Mapping[int, Lsn] = field(default_factory=dict)
    history: TimelineHistory | UnsetType = UNSET


def archive_prefix(snapshot: str, node: str, operation: str) -> str:
    """Return the folder of one node's archive; `operation` began it: the full snapshot, or an increment later."""
    return f"snapshots/{snapshot}/wal/{node}/{operation}"


def segment_key(prefix: str, number: int) -> str:
    """Return the key of segment `number` of the archive; numbers start at 1."""
    return f"{prefix}/{number:020d}.parquet"


def last_number(segments: Sequence[Segment]) -> int:
    """Return the number of a node's last segment, or 0 if there is none; `segments` are in order."""
    return segments[-1].number if segments else 0


def check_contiguous(node: str, base: Lsn, segments: Iterable[Segment], finish: Lsn = ORIGIN, first: int = 1) -> None:
    """Raise ArchiveError unless the segments, numbered from `first` on, reach from `base` to `finish` without a gap."""
    through = base
    for expected, segment in enumerate(segments, start=first):
        if segment.number != expected or segment.after != through or segment.node != node:
            raise ArchiveError(
                f"node {node}: the archive has a gap at {through}, before segment {segment.key}",
                hint=NEW_CHAIN,
                ends_chain=ChainEnd.FOR_GOOD,
                details={"node": node, "object": segment.key},
            )
        through = segment.through
    if through < finish:
        raise ArchiveError(
            f"node {node}: the archive ends at {through}, before the end of the cut at {finish}",
            hint=NEW_CHAIN,
            ends_chain=ChainEnd.FOR_GOOD,
            details={"node": node},
        )


def has_place_of(one: str, other: str) -> bool:
    """Whether two keys of segments differ at most in the operation: a repair stores segments under one of its own."""
    parts, others = one.split("/"), other.split("/")
    return parts[:-2] == others[:-2] and parts[-1] == others[-1]


FORMAT = "cutline/segment/4"
NO_SEAL = "0" * 64


class SegmentMetadata(Record, frozen=True, tag_field="format", tag=FORMAT, kw_only=True):
    """The metadata in a segment (docs/store-format.md).

    `history` is as in a SegmentRange. `seal` is the digest of the file with the seal itself replaced by zeros.
    """

    key: str
    node: str
    operation: str
    after: Lsn
    through: Lsn
    open: OpenTransaction | None
    definitions: tuple[Definition, ...]
    first_changes: dict[int, Lsn]
    changes: Count
    events: Count
    partials: Count
    truncates: Count
    history: TimelineHistory | UnsetType = UNSET
    seal: str = NO_SEAL
