"""The archive of one node in one chain: its segments, numbered without a hole, as commits describe them.

Pure values: nothing here reads an object. Segment n + 1 begins where segment n ends: that is checked whenever
an archive is read, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fleet.hints import NEW_CHAIN
from fleet.lsn import lsn_from_text, lsn_to_text
from storage.errors import SnapshotError
from wal.versions import Version


class ArchiveError(SnapshotError):
    """The archive of a node is not what its commits and its own metadata say."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """Where in a transaction too large for one segment the segment ends: after its change `seq`."""

    lsn: int
    seq: int


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Which WAL of `node` a segment holds: what ends after `after` and up to `through`.

    With `open`, also the beginning of the transaction that comes next.
    """

    node: str
    operation: str
    after: int
    through: int
    open: OpenTransaction | None = None

    def to_json(self) -> dict[str, Any]:
        """The range as metadata and commits have it."""
        entry = asdict(self) | {"after": lsn_to_text(self.after), "through": lsn_to_text(self.through)}
        if self.open:
            entry["open"] = {"lsn": lsn_to_text(self.open.lsn), "seq": self.open.seq}
        return entry


@dataclass(frozen=True, slots=True)
class Segment:
    """One stored segment. Counts are of what it holds, whatever a cut makes of it.

    The object's end from `events_at` on is all that reading the events takes, and has a digest of its own. Commits of
    before it was there have neither. What an attempt began is known only of segments that no commit lists: the
    `definitions` that no commit listed when it was written, and by their numbers where the `first_changes` under them
    are in it.
    """

    key: str
    number: int
    range: SegmentRange
    size: int
    digest: str
    changes: int
    events: int
    partials: int
    truncates: int
    events_at: int | None = None
    events_digest: str = ""
    definitions: tuple[Version, ...] = field(default=(), compare=False)
    first_changes: Mapping[int, int] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The segment's entry in a commit."""
        counts = {name: getattr(self, name) for name in ("changes", "events", "partials", "truncates")}
        entry = {"key": self.key, "number": self.number, "size": self.size, "digest": self.digest}
        if self.events_at is not None:
            entry |= {"events_at": self.events_at, "events_digest": self.events_digest}
        return entry | counts | self.range.to_json()


def range_from_json(entry: dict[str, Any]) -> SegmentRange:
    """Read what `SegmentRange.to_json` wrote."""
    opened = entry["open"]
    return SegmentRange(
        entry["node"],
        entry["operation"],
        lsn_from_text(entry["after"]),
        lsn_from_text(entry["through"]),
        OpenTransaction(lsn_from_text(opened["lsn"]), opened["seq"]) if opened else None,
    )


def segment_from_json(entry: dict[str, Any]) -> Segment:
    """Read what `Segment.to_json` wrote."""
    names = ("key", "number", "size", "digest", "changes", "events", "partials", "truncates")
    events = {name: entry[name] for name in ("events_at", "events_digest") if name in entry}
    return Segment(range=range_from_json(entry), **{name: entry[name] for name in names}, **events)


def archive_prefix(snapshot: str, node: str, chain: str) -> str:
    """The folder of one node's archive in one chain."""
    return f"snapshots/{snapshot}/wal/{node}/{chain}"


def segment_key(prefix: str, number: int) -> str:
    """The key of the archive's segment `number`, from 1."""
    return f"{prefix}/{number:020d}.parquet"


def check_contiguous(node: str, base: int, segments: Iterable[Segment], finish: int = 0) -> None:
    """Raise ArchiveError unless the segments are numbered from 1 without a hole, from `base` on, and reach `finish`."""
    through = base
    for expected, segment in enumerate(segments, start=1):
        if segment.number != expected or segment.range.after != through or segment.range.node != node:
            raise ArchiveError(
                f"node {node}: the archive has a hole at {lsn_to_text(through)}, before {segment.key}",
                hint=NEW_CHAIN,
                details={"node": node, "object": segment.key},
            )
        through = segment.range.through
    if through < finish:
        raise ArchiveError(
            f"node {node}: the archive ends at {lsn_to_text(through)}, before the cut does, at {lsn_to_text(finish)}",
            hint=NEW_CHAIN,
            details={"node": node},
        )
