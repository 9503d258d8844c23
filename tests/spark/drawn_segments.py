"""Segments of drawn changes, and what their last changes are by arithmetic."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.changed_keys import KeySet
from cutline.snapshots.fold.fold import Fold
from cutline.snapshots.fold.sources import BaseSource, BaseSources, SegmentSource, Source, Sources
from cutline.storage.open import open_store
from cutline.wal.segments.archive import SegmentRange
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment
from tests.run.soak import SEED

INSERTED, UPDATED, DELETED, PARTIAL = (ord(letter) for letter in "IUDu")
NODES, GROUPS, KEYS, SEGMENTS = ("a", "b"), (1, 2), 40, 4
# What nobody reads here: groups 1 and 2 of the first node have base rows, of the second group 2 alone.
BASES = (
    BaseSource(Source("base-a", "a", 0, 1, ""), {1: 5, 2: 5}),
    BaseSource(Source("base-b", "b", 1, 1, ""), {2: 5}),
)
Change = dict[str, Any]


def change(lsn: int, group: int, key: bytes, op: int, row: bytes) -> Change:
    return {
        "lsn": lsn, "end_lsn": lsn + 1, "seq": 0, "xid": 1, "group": group, "partition": 0, "key": key, "op": op,
        "row": row,
    }  # fmt: skip


def store_segments(folder: Path, changes: list[tuple[int, list[Change]]]) -> Sources:
    """Store one segment for each (node number, changes); group 3 has no key."""
    store = open_store(f"file://{folder}", {})
    held: list[SegmentSource] = []
    none = pa.Table.from_batches([], SEGMENT_SCHEMA)
    for number, (node, rows) in enumerate(changes):
        tables = (pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA), none)
        place = SegmentRange(NODES[node], "op", Lsn(0), Lsn(10_000))
        segment = create_segment(store, f"wal-{number}", 1, place, tables, continued=None).segment
        source = Source(segment.key, NODES[node], node, segment.size, segment.digest)
        held.append(SegmentSource(source, segment, Lsn(10_000), frozenset(), {}))
    return Sources(NODES, BaseSources.of(BASES), tuple(held), frozenset({3}), {(0, 1): 2})


def drawn_changes() -> list[tuple[int, list[Change]]]:
    """Changes of few keys on two nodes, in segments in no order of time."""
    drawn, segments = random.Random(SEED), []
    for number in range(SEGMENTS * len(NODES)):
        moments = range(number // 2 * 100 + 1, number // 2 * 100 + 100)
        rows: list[Change] = []
        for lsn in moments:
            key = b"%d" % drawn.randrange(KEYS)
            op = drawn.choice((INSERTED, UPDATED, DELETED))
            rows.append(change(lsn, drawn.choice(GROUPS), key, op, b"" if op == DELETED else key + b"\t%d\n" % lsn))
        segments.append((number % 2, rows))
    drawn.shuffle(segments)
    return segments


def last_of(changes: list[tuple[int, list[Change]]]) -> dict[tuple[int, int, bytes], Change]:
    """The last change of every node, group and key."""
    last: dict[tuple[int, int, bytes], Change] = {}
    for node, one in sorted(((node, one) for node, rows in changes for one in rows), key=lambda pair: pair[1]["lsn"]):
        last[node, one["group"], one["key"]] = one
    return last


def keys_of(folded: Fold) -> dict[int, dict[int, set[bytes]]]:
    """The exact changed keys by node number and group."""
    found: dict[int, dict[int, set[bytes]]] = {}
    for node, of_groups in folded.changed.items():
        for group, keys in of_groups.items():
            assert isinstance(keys, KeySet)
            found.setdefault(node, {})[group] = set(keys.keys.to_arrow().to_pylist())
    return found
