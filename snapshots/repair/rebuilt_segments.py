"""Rebuild a segment of a node's archive from the archive of another node of the shard.

Copies of a shard decode the same WAL, so both archives contain the same changes and events at the same positions; only
the borders of their segments differ. A segment contains everything whose record ends in its range, without the part of
a large transaction that the segment before it contains, and with the beginning of the transaction in which it ends.

A transaction that was prepared before its slot began is decoded when it is decided. Its place then does not follow from
its position, so a segment near such a transaction is not rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import from_json
from cutline.snapshots.fold.sources import Source, open_object, read_opened
from cutline.snapshots.records.chain import Chain
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Definition, Segment, SegmentMetadata, SegmentRange, archive_prefix
from cutline.wal.segments.segments import CHANGES, ENDS, METADATA_KEY, PREPARE, SEGMENT_SCHEMA, create_segment


class NotRebuildableError(Exception):
    """The objects can't be rebuilt from the copy, for this reason."""


def find_overlapping(chain: Chain, segment: Segment, copy: str) -> tuple[Segment, ...]:
    """Return the segments in the archive of `copy` from which `segment` can be rebuilt.

    They reach from its beginning to its end; if transactions continue in other segments, some more follow. Raises
    NotRebuildableError if the archive does not cover the segment's range of WAL.
    """
    begin: int = chain.archive_begin(copy)
    if begin > segment.after:
        raise NotRebuildableError(
            f"the archive of {copy} begins at {Lsn(begin)}, after the beginning of the segment at {segment.after}"
        )
    others, before = chain.segments(copy), segment_before(chain, segment)
    ended = max((other.through for other in others), default=chain.archive_begin(copy))
    if ended < segment.through:
        raise NotRebuildableError(f"the archive of {copy} ends at {ended}, before the segment at {segment.through}")
    # A segment that ends inside a transaction ends, like all that contain parts of the transaction, where it begins.
    is_parted = segment.open is not None or (before is not None and before.open is not None)
    begin = segment.after - 1 if is_parted else segment.after
    first = next((at for at, other in enumerate(others) if other.through > begin), len(others))
    last = next((at for at, other in enumerate(others) if other.through >= segment.through), len(others) - 1)
    return others[first:] if segment.open is not None else others[first : last + 1]


def segment_before(chain: Chain, segment: Segment) -> Segment | None:
    """Return the segment before this one in its archive; None if it is the first."""
    return next((one for one in chain.segments(segment.node) if one.number == segment.number - 1), None)


class _Decoded(Struct, frozen=True):
    """Rows of the other archive (SEGMENT_SCHEMA), and the definitions that no commit listed when they were decoded."""

    changes: pa.Table
    events: pa.Table
    definitions: tuple[Definition, ...]


def rebuild_segment(store: ObjectStore, chain: Chain, segment: Segment, copy: str, operation: str) -> Segment:
    """Store a segment with the same number and range of WAL under a key of `operation`, and return its entry.

    Raises NotRebuildableError, and ObjectDamagedError if an object of `copy` is damaged.
    """
    before = segment_before(chain, segment)
    decoded = _read(store, find_overlapping(chain, segment, copy), segment)
    changes = decoded.changes.filter(to_mask(_belong(decoded, segment, before)))
    ends = to_numpy(decoded.events["end_lsn"])
    events = decoded.events.filter(to_mask((ends > segment.after) & (ends <= segment.through)))
    wal_range = SegmentRange(segment.node, operation, segment.after, segment.through, segment.open)
    _check_counts(segment, changes, events, copy)
    _check_open(segment, changes, before, copy)
    prefix = archive_prefix(chain.name, segment.node, operation)
    continued = before.open if before is not None else None
    rows = (changes, events)
    return create_segment(
        store, prefix, segment.number, wal_range, rows, decoded.definitions, continued=continued
    ).segment


def _read(store: ObjectStore, others: Sequence[Segment], segment: Segment) -> _Decoded:
    """Read the other archive until the transactions at both borders of the segment have ended."""
    changes, events = [SEGMENT_SCHEMA.empty_table()], [SEGMENT_SCHEMA.empty_table()]
    definitions: dict[int, Definition] = {}
    opened = segment.open.lsn if segment.open else None
    for other in others:
        if other.after >= segment.through and (opened is None or _has_end(events, opened)):
            break
        file = open_object(store, source := source_of(other))
        metadata: SegmentMetadata = from_json(file.metadata.metadata[METADATA_KEY], SegmentMetadata)
        definitions |= {one.group.number: one for one in metadata.definitions}
        for table in read_opened(file, source, SEGMENT_SCHEMA):
            is_change = np.isin(to_numpy(table["op"]), CHANGES)
            changes.append(table.filter(to_mask(is_change)))
            events.append(table.filter(to_mask(~is_change)))
            late = (to_numpy(table["op"]) == PREPARE) & (to_numpy(table["end_lsn"]) <= other.after)
            if late.any():
                raise NotRebuildableError(
                    f"the archive of {other.node} contains a transaction that was prepared before its slot began"
                )
    return _Decoded(pa.concat_tables(changes), pa.concat_tables(events), tuple(definitions.values()))


def _has_end(events: Iterable[pa.Table], lsn: Lsn) -> bool:
    return any((_is_end(table) & (to_numpy(table["lsn"]) == lsn)).any() for table in events)


def _is_end(events: pa.Table) -> Flags:
    return np.isin(to_numpy(events["op"]), ENDS)


def source_of(segment: Segment) -> Source:
    """Return the source from which a segment is read."""
    return Source(segment.key, segment.node, 0, segment.size, segment.digest, segment=segment)


def _belong(decoded: _Decoded, segment: Segment, before: Segment | None) -> Flags:
    """Flag the changes that belong to the segment; `before` is the segment before it."""
    lsn, seq = to_numpy(decoded.changes["lsn"]), to_numpy(decoded.changes["seq"])
    ends = decoded.events.filter(to_mask(_is_end(decoded.events)))
    end_of = _ends_of(lsn, to_numpy(ends["lsn"]), to_numpy(ends["end_lsn"]))
    belong = (end_of > segment.after) & (end_of <= segment.through)
    if segment.open is not None:
        belong |= (lsn == segment.open.lsn) & (seq <= segment.open.seq)
    if before is not None and before.open is not None:
        belong &= ~((lsn == before.open.lsn) & (seq <= before.open.seq))
    return np.asarray(belong, np.bool_)


def _ends_of(lsn: Ints, begins: Ints, ends: Ints) -> Ints:
    """Return where the record of each change's transaction ends; -1 if it has not ended."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    if not len(begins):
        return np.full(len(lsn), -1, np.int64)
    place = np.minimum(np.searchsorted(begins, lsn), len(begins) - 1)
    return np.where(begins[place] == lsn, ends[place], -1)


def _check_open(segment: Segment, changes: pa.Table, before: Segment | None, copy: str) -> None:
    """Raise NotRebuildableError unless the transaction that the segment leaves open has as many changes as it says."""
    opened, continued = segment.open, before.open if before is not None else None
    if opened is None:
        return
    found = int((to_numpy(changes["lsn"]) == opened.lsn).sum())
    found += continued.changes if continued is not None and continued.lsn == opened.lsn else 0
    if found != opened.changes:
        raise NotRebuildableError(
            f"neither copy can be trusted: up to the end of the segment, the archive of {copy} has {found} changes of"
            f" the transaction at {opened.lsn}, but the commit lists {opened.changes} of {segment.node}"
        )


def _check_counts(segment: Segment, changes: pa.Table, events: pa.Table, copy: str) -> None:
    """Raise NotRebuildableError unless there are as many changes and events as the commit says."""
    op = to_numpy(changes["op"])
    found = (len(changes), len(events), int((op == ord("u")).sum()), int((op == ord("T")).sum()))
    expected = (segment.changes, segment.events, segment.partials, segment.truncates)
    if found != expected:
        names = "changes, events, changes with values left out, truncates"
        raise NotRebuildableError(
            f"neither copy can be trusted: the archive of {copy} has {found} rows ({names}) there, but the commit lists"
            f" {expected} of {segment.node}"
        )
