"""Merges: documents with which a chain begins at an increment, instead of at its full snapshot.

A merge lists a base of every copy at the cut of its increment: new objects, and those of earlier base copies in which
no row has changed since. Everything else of the beginning stays in the documents that already have it: the full
snapshot, the increments that changed definitions or DDL, and the increment itself (snapshots/records/merged_chain.py).

The base of a copy contains every change before a position, which is that of the cut. A transaction that was prepared
before it and undecided at the cut is not in the base. If it is committed later, its changes count, although they are
before the position. So the merge also lists the earlier segments that contain such transactions.

The merges of a snapshot are found by a listing and read by key. As with commits, a number whose merge was voided gets
another turn (snapshots/records/proven_chains.py). A mark says that the chain begins at its newest merge for good: what
no later state needs may be removed (BEGINS).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct, field, structs

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Count, Record, Seconds, Time
from cutline.snapshots.records.commit import BASE, NamedObject, ObjectList, StoredObject, Void, parts_of_entries
from cutline.snapshots.records.documents import (
    check_about,
    checking,
    parse_document,
    parse_key,
    read_body,
    unseal,
)
from cutline.storage.store import ObjectMissingError, ObjectStore, check_key
from cutline.wal.segments.archive import Segment

MERGE_FORMAT, BEGIN_FORMAT, PART_FORMAT = "cutline/merge/1", "cutline/begin/1", "cutline/merge-part/1"
COUNTS = ("rows", "objects", "bytes", "carried_objects", "carried_bytes")
MERGE_FILE = re.compile(r"(\d{16})(?:\.\d+)?\.json")


class MergedCopy(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the changes of a node's archive continue its base in a merge.

    The base contains every change before `base`. Changes count from `counted_from` on, and so do those of the
    transactions at `pending`, which were prepared before it and were undecided at the cut. `rolled_back` are the
    positions of PREPAREs in the listed segments that never count. The copy of a standby that the increment leaves out
    is carried as it is: its `base` is that of its base copy, and all of its changes count.
    """

    base: Lsn
    counted_from: Lsn
    pending: tuple[Lsn, ...] = ()
    rolled_back: tuple[Lsn, ...] = ()


class Merge(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag=MERGE_FORMAT):
    """A base of every copy at the cut of `increment`, made by `operation` from the chain alone.

    `commit` and `full` are the digests of the commits of the increment and of the full snapshot. `copies` is keyed by
    node. `objects` and `lists` are the base, and `segments` the segments of earlier commits that are still needed, by
    node. `counts` has the numbers of rows on primaries, of objects and of bytes, and how many objects and bytes of
    earlier base copies are `carried`. `proof` is a digest of the partition hashes, which were equal in the chain and
    in the new base. `digest` is stored in the file, and is "" until the file is written.
    """

    snapshot: str
    increment: Count
    operation: str
    chain: str
    made_at: Time
    seconds: Seconds
    by: str
    commit: str
    full: str
    counts: dict[str, Count]
    copies: dict[str, MergedCopy]
    objects: tuple[StoredObject, ...]
    lists: tuple[ObjectList, ...] = ()
    segments: dict[str, tuple[Segment, ...]] = field(name="archived", default_factory=dict)
    proof: str
    digest: str = ""

    @property
    def entries(self) -> tuple[NamedObject, ...]:
        """`objects` and `lists`."""
        return (*self.objects, *self.lists)


class Begin(Record, frozen=True, kw_only=True, tag_field="schema", tag=BEGIN_FORMAT):
    """The mark that a chain begins at its merge of `increment`, with digest `merge`: earlier states are given up."""

    snapshot: str
    chain: str
    increment: Count
    merge: str
    operation: str
    made_at: Time


class MergePart(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag=PART_FORMAT):
    """The base of one `node` in a merge that is not complete, so that a repetition need not write it again.

    `folded` is the digest of the chain that it was folded from. `objects`, `lists` and `counts` are as in a Merge.
    """

    operation: str
    node: str
    folded: str
    objects: tuple[StoredObject, ...]
    lists: tuple[ObjectList, ...] = ()
    counts: dict[str, Count]


def merge_key(snapshot: str, increment: int, turn: int = 1) -> str:
    """Return the key of the merge at an increment."""
    return f"snapshots/{snapshot}/merges/{increment:016d}{f'.{turn}' if turn > 1 else ''}.json"


def begin_key(snapshot: str, increment: int) -> str:
    """Return the key of the mark that a chain begins at an increment."""
    return f"snapshots/{snapshot}/begins/{increment:016d}.json"


class MergePlace(Struct, frozen=True):
    """The place of the merge at an increment: the first turn not voided. `merge` is None if that turn is not taken."""

    key: str
    turn: int
    merge: Merge | None


def read_merge_turn(store: ObjectStore, key: str) -> Merge | Void:
    """Read a merge, or the void in its place; raise ObjectMissingError or ManifestError."""
    content, digest = unseal(key, read_body(store, key))
    turn: Merge | Void = parse_document(key, content, Merge | Void)
    if isinstance(turn, Void):
        return turn
    with checking(key):
        check_merge(turn)
    return structs.replace(turn, digest=digest)


def find_merge(store: ObjectStore, snapshot: str, increment: int) -> MergePlace:
    """Find the merge at an increment, or the free turn after its voids; raise ManifestError if a turn can't be read."""
    turn = 1
    while True:
        key = merge_key(snapshot, increment, turn)
        try:
            found = read_merge_turn(store, key)
        except ObjectMissingError:
            return MergePlace(key, turn, None)
        check_about(key, f"increment {found.increment} of {found.snapshot}", f"increment {increment} of {snapshot}")
        if isinstance(found, Merge):
            return MergePlace(key, turn, found)
        turn += 1


def merge_numbers(store: ObjectStore, snapshot: str) -> list[int]:
    """Return the increments for which a listing shows a merge or a void, in order."""
    matches = map(MERGE_FILE.fullmatch, store.list_children(f"snapshots/{snapshot}/merges"))
    return sorted({int(match[1]) for match in matches if match})


def newest_merge(store: ObjectStore, snapshot: str, increment: int | None = None) -> Merge | None:
    """Return the newest merge at or before `increment` (None: of all); raise ManifestError if it can't be read."""
    for number in reversed(merge_numbers(store, snapshot)):
        if increment is None or number <= increment:
            merge = find_merge(store, snapshot, number).merge
            if merge is not None:
                return merge
    return None


def read_merges(store: ObjectStore, snapshot: str) -> Iterator[Merge]:
    """Yield all merges of a snapshot, oldest first; raise ManifestError if one of them can't be read."""
    for number in merge_numbers(store, snapshot):
        if (merge := find_merge(store, snapshot, number).merge) is not None:
            yield merge


def first_increment(store: ObjectStore, snapshot: str) -> int:
    """Return the increment at which the chain begins for good; 0 unless a mark says otherwise."""
    matches = map(MERGE_FILE.fullmatch, store.list_children(f"snapshots/{snapshot}/begins"))
    return max((int(match[1]) for match in matches if match), default=0)


def check_merge(merge: Merge) -> None:
    """Raise ValueError unless the merge's parts are consistent."""
    if not merge.increment:
        raise ValueError("a merge at the full snapshot replaces nothing")
    if not merge.counts.keys() >= {*COUNTS}:
        raise ValueError(f"counts lacks some of {', '.join(COUNTS)}")
    keys = [entry.key for entry in (*parts_of_entries(merge.entries), *_segments_of(merge))]
    if len({*keys}) < len(keys):
        raise ValueError("it lists an object twice")
    for entry in parts_of_entries(merge.entries):
        parsed = parse_key(merge.snapshot, check_key(entry.key))
        if entry.kind != BASE or parsed is None or parsed.node != entry.node or entry.node not in merge.copies:
            raise ValueError(f"object {entry.key} is not part of a base of the snapshot's nodes")
    for node, segments in merge.segments.items():
        for segment in segments:
            parsed = parse_key(merge.snapshot, check_key(segment.key))
            if parsed is None or (segment.node, parsed.node, parsed.number) != (node, node, segment.number):
                raise ValueError(f"segment {segment.key} does not belong to the archive of {node}")
    if merge.segments.keys() != merge.copies.keys():
        raise ValueError("archived and copies are about different nodes")


def _segments_of(merge: Merge) -> Iterable[Segment]:
    return (segment for segments in merge.segments.values() for segment in segments)
