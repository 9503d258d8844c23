"""Verify that a server has the WAL that an archive holds, before its slot is advanced past that WAL.

After promotions, the servers of a shard may have different WAL at the same positions, and even timelines with the same
number. So the history of the server's timeline must have the WAL of that on which the archive was read. But two servers
that were promoted at the same position have equal histories. A slot at the end of the archive proves that the server
has the archived WAL, because a drain of this server has moved it there. A slot before the end proves nothing: the
server may have branched off in between. So the chain's markers in this range are read again. A server that has a marker
at the same position has all WAL before it, too: no other operation writes this marker, and the one that does writes it
again only if it makes another cut.

A drain that died between two segments leaves WAL behind the last marker. It may come from a server that has lost its
place since, so the transactions that end there are compared one by one: what ended, where, and when. If the archive
ends inside a transaction, that transaction must be the first that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, UnsetType

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import NEXT_COPIES
from cutline.fleet.timeline_history import TimelineHistory
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.wal.cut.markers import MARKER_PREFIX, Marker, marker_from_bytes
from cutline.wal.segments.archive import ArchivedSegment
from cutline.wal.segments.segments import (
    COMMIT,
    COMMIT_PREPARED,
    MARKER,
    PREPARE,
    ROLLBACK_PREPARED,
    UNKNOWN_TIME,
)

MESSAGE = b"M"
# The messages that end transactions: their events, and the offset of the time, which follows the end in most of them.
ENDING_MESSAGES = {b"C": (COMMIT, 18), b"P": (PREPARE, 18), b"K": (COMMIT_PREPARED, 18), b"r": (ROLLBACK_PREPARED, 26)}
END_OFFSET, NUMBER_BYTES = 10, 8
# The messages that begin a transaction and one that is prepared; the position of its end follows.
BEGINNING_MESSAGES = (b"B", b"b")
# The type, flags and position of a logical message in pgoutput, before its prefix.
HEAD_BYTES = 10


class WalDivergedError(RefusedError):
    """A node's server lacks WAL that the chain has of the node."""


class KnownMarker(Struct, frozen=True):
    """A marker that the WAL has at this position."""

    marker: Marker
    position: Lsn


class TransactionEnd(NamedTuple):
    """The end of a transaction, or of its PREPARE: the event, its end in the WAL, and its time (0: unknown)."""

    op: int
    end: int
    at: int


def ends_of_messages(messages: pa.Array) -> Iterator[TransactionEnd]:
    """Yield the ends of transactions among the messages of a slot (pgoutput), each with its time and without it."""
    kinds = pa.array(list(ENDING_MESSAGES), messages.type)
    for message in messages.filter(pc.is_in(pc.binary_slice(messages, 0, 1), kinds)).to_pylist():
        op, at = ENDING_MESSAGES[message[:1]]
        end, time = (int.from_bytes(message[place : place + NUMBER_BYTES], "big") for place in (END_OFFSET, at))
        yield TransactionEnd(op, end, time)
        yield TransactionEnd(op, end, UNKNOWN_TIME)


def ends_of_events(events: pa.Table, after: Lsn) -> Iterator[TransactionEnd]:
    """Yield the ends of transactions behind a position among events (SEGMENT_SCHEMA)."""
    ended = events.filter(to_mask((to_numpy(events["op"]) != MARKER) & (to_numpy(events["end_lsn"]) > after)))
    yield from map(
        TransactionEnd._make, zip(*(ended[name].to_pylist() for name in ("op", "end_lsn", "seq")), strict=True)
    )


def check_ends(node: str, missing: Iterable[TransactionEnd]) -> None:
    """Raise WalDivergedError if transactions of the archive are missing in the node's WAL."""
    if found := [one.end for one in missing]:
        end = Lsn(min(found))
        raise diverged_error(node, f"its WAL lacks a transaction that ends at {end}", {"position": str(end)})


def check_resumed(node: str, expected: Lsn, begun: Lsn | None) -> None:
    """Raise WalDivergedError unless the WAL continues with the transaction in which the archive ends, at `expected`.

    `begun` is the position of the first transaction in the WAL after the archive's end; None if there is none.
    """
    if begun != expected:
        problem = f"its WAL lacks the transaction at {expected}, whose beginning is in the archive"
        raise diverged_error(node, problem, {"position": str(expected)})


def first_begun(messages: pa.Array) -> Lsn | None:
    """Return the position of the first transaction that begins among the messages of a slot (pgoutput)."""
    kinds = pa.array(list(BEGINNING_MESSAGES), messages.type)
    begun = messages.filter(pc.is_in(pc.binary_slice(messages, 0, 1), kinds))
    return Lsn(int.from_bytes(begun[0].as_py()[1:9], "big")) if len(begun) else None


def markers_of_messages(messages: pa.Array) -> Iterator[KnownMarker]:
    """Yield Cutline's markers among the messages of a slot (pgoutput)."""
    for message in messages.filter(pc.equal(pc.binary_slice(messages, 0, 1), MESSAGE)).to_pylist():
        prefix_end = message.index(b"\0", HEAD_BYTES)
        if message[HEAD_BYTES:prefix_end] == MARKER_PREFIX:
            begin = prefix_end + 5
            length = int.from_bytes(message[prefix_end + 1 : begin], "big")
            yield from _known(message[begin : begin + length], int.from_bytes(message[2:HEAD_BYTES], "big"))


def markers_of_events(events: pa.Table) -> Iterator[KnownMarker]:
    """Yield the markers among events (SEGMENT_SCHEMA)."""
    markers = events.filter(to_mask(to_numpy(events["op"]) == MARKER))
    for content, position in zip(markers["row"].to_pylist(), markers["lsn"].to_pylist(), strict=True):
        yield from _known(content, position)


def _known(content: bytes, position: int) -> Iterator[KnownMarker]:
    try:
        yield KnownMarker(marker_from_bytes(content), Lsn(position))
    except ValueError:
        return


def check_histories(node: str, was: TimelineHistory, through: Lsn, now: TimelineHistory) -> None:
    """Raise WalDivergedError if the server, with the history `now`, lacks WAL up to `through` of the history `was`."""
    parted = was.parted_from(now)
    if parted is None or parted >= through:
        return
    how = f"which left the history of the chain's timeline {was.timeline} at {parted}"
    if now.switches.get(was.timeline) == parted:
        how = f"which left timeline {was.timeline} at {parted}"
    if parted == ORIGIN:
        how = f"which does not continue timeline {was.timeline}"
        if now.is_unknown:
            how = f"whose history file {now.file_name} it lacks"
        elif was.is_unknown:
            how = f"whose history can't be compared, because the server lacked {was.file_name} at the last increment"
    raise diverged_error(
        node,
        f"its server is on timeline {now.timeline}, {how}, but the chain has WAL of timeline {was.timeline} up to"
        f" {through}",
        {"was": was.timeline, "now": now.timeline, "switch": str(parted), "end": str(through)},
    )


def check_archived_history(node: str, newest: ArchivedSegment | None, now: TimelineHistory | UnsetType) -> None:
    """Raise WalDivergedError if the server, with the history `now`, lacks WAL of the newest segment of its archive.

    The drain that stored that segment has verified the archive before it.
    """
    if newest is not None and not isinstance(newest.history, UnsetType) and not isinstance(now, UnsetType):
        check_histories(node, newest.history, newest.segment.through, now)


def check_markers(node: str, expected: Iterable[KnownMarker], found: Set[KnownMarker]) -> None:
    """Raise WalDivergedError unless all expected markers are where they were."""
    for known in expected:
        if known not in found:
            raise diverged_error(
                node,
                f"its WAL lacks the {known.marker.kind} marker of cut {known.marker.cut} at {known.position}",
                {"cut": known.marker.cut, "position": str(known.position)},
            )


def agreed_position(error: SnapshotError) -> Lsn | None:
    """Return up to where the server has the WAL of the chain; 0/0 if unknown, and None if the error is another.

    Only histories that part show such a position: what else is missing only shows that they had parted before.
    """
    if not isinstance(error, WalDivergedError):
        return None
    switch = error.details.get("switch")
    return Lsn.parse(str(switch)) if switch else ORIGIN


def diverged_error(node: str, problem: str, details: Mapping[str, object]) -> WalDivergedError:
    """Return the error for a node whose server lacks WAL of the chain."""
    return WalDivergedError(
        f"node {node}: {problem}: a failover lost transactions that the chain may contain",
        hint=NEXT_COPIES,
        details={"node": node, **details},
    )
