"""The archive of one node in one chain: its segments, numbered without a hole, as commits list them.

Pure values: code here reads no object. Segment n + 1 begins where segment n ends. This is checked whenever an archive
is read, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import Count, Integer, Record
from cutline.storage.errors import ChainEnd, SnapshotError
from cutline.wal.segments.definitions import Definition


class ArchiveError(SnapshotError):
    """The archive of a node does not match its commits or its own metadata."""

    exit_code = 3


class OpenTransaction(Record, frozen=True):
    """Where a segment ends within a transaction that is too large for one segment: after the change `seq`."""

    lsn: Lsn
    seq: Integer


class SegmentRange(Record, frozen=True):
    """The WAL of `node` that a segment holds: all records that end after `after`, up to `through`.

    With `open`, the segment also holds the beginning of the next transaction.
    """

    node: str
    operation: str
    after: Lsn
    through: Lsn
    open: OpenTransaction | None = None


class Segment(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One stored segment, as commits list it. The counts are of its whole content, regardless of any cut.

    `node` to `open` are its range. The events can be read from the end of the object alone, from `events_at` on;
    `events_digest` is the digest of that part. Older commits have neither.
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


@dataclass(frozen=True, slots=True)
class ArchivedSegment:
    """A segment with those of its metadata that commits do not list.

    `definitions` are those that no commit listed when the segment was written. `first_changes` are the positions of the
    first changes under them, by group number.
    """

    segment: Segment
    definitions: tuple[Definition, ...] = ()
    first_changes: Mapping[int, Lsn] = field(default_factory=dict)


def archive_prefix(snapshot: str, node: str, chain: str) -> str:
    """The folder of one node's archive in one chain."""
    return f"snapshots/{snapshot}/wal/{node}/{chain}"


def segment_key(prefix: str, number: int) -> str:
    """The key of segment `number` of the archive; numbers start at 1."""
    return f"{prefix}/{number:020d}.parquet"


def last_number(segments: Sequence[Segment]) -> int:
    """The number of the last of a node's segments, which are in order; 0 without any."""
    return segments[-1].number if segments else 0


def check_contiguous(node: str, base: Lsn, segments: Iterable[Segment], finish: Lsn = ORIGIN, first: int = 1) -> None:
    """Raise ArchiveError unless the segments, numbered from `first` on, reach from `base` to `finish` with no hole."""
    through = base
    for expected, segment in enumerate(segments, start=first):
        if segment.number != expected or segment.after != through or segment.node != node:
            raise ArchiveError(
                f"node {node}: the archive has a hole at {through}, before segment {segment.key}",
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
