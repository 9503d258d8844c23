"""How much the jobs read that fold, load or check stored objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import NamedObject, ObjectList
from cutline.spark.amount import Amount
from cutline.wal.segments.archive import Segment

# Rows of realistic tables take four times as many bytes in pages as stored.
PAGE_BYTES_PER_STORED_BYTE = 4


def amount_of(segments: Iterable[Segment], entries: Iterable[NamedObject]) -> Amount:
    """Return the amount of work with the segments and with the objects of the entries; listed objects count as well."""
    changes = size = rows = 0
    for segment in segments:
        changes += segment.changes
        size += segment.size
    for entry in entries:
        rows += sum(entry.rows.values())
        size += entry.bytes if isinstance(entry, ObjectList) else entry.size
    return Amount(PAGE_BYTES_PER_STORED_BYTE * size, rows + changes, changes)


def amount_of_copies(chain: Chain, nodes: Collection[str]) -> Amount:
    """Return the amount of work with all objects of these nodes' copies."""
    entries = [entry for commit in chain.commits for entry in commit.entries if entry.node in nodes]
    return amount_of((segment for node in nodes for segment in chain.segments(node)), entries)
