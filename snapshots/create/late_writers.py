"""Prepared transactions that a copy of tables neither shows nor is followed by: they make the copy void.

A copy shows what was committed before its position. What is committed later is decoded from there on, but for a
transaction that was prepared before and is decided after it: its changes lie at its PREPARE. Making the copy's slot
waits for all that are under way, so there are only those which began meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pyarrow as pa

from columns.arrow_numbers import to_mask, to_numpy
from fleet.lsn import Lsn
from storage.store import ObjectStore
from wal.segments.archive import Segment
from wal.segments.segment_schema import COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED, SEGMENT_SCHEMA
from wal.segments.segments import read_events, read_places


def late_writers(store: ObjectStore, segments: Iterable[Segment], position: Lsn, numbers: Collection[int]) -> list[str]:
    """The gids, or global ids, of those that changed groups of these `numbers`; the position is the copy's."""
    segments = list(segments)
    tables = [read_events(store, segment).cast(SEGMENT_SCHEMA) for segment in segments]
    events = pa.concat_tables([pa.Table.from_batches([], SEGMENT_SCHEMA), *tables])
    op, xid = to_numpy(events["op"]), to_numpy(events["xid"])
    decided = np.isin(op, (COMMIT_PREPARED, ROLLBACK_PREPARED)) & (to_numpy(events["end_lsn"]) <= position)
    is_late = (op == PREPARE) & (to_numpy(events["lsn"]) < position) & ~np.isin(xid, xid[decided])
    late = events.filter(to_mask(is_late)).select(["lsn", "global_id"]).to_pylist()  # prepared during the copy
    if not late:
        return []
    met: set[int] = set()
    for segment in segments:
        if segment.changes:
            lsn, group = read_places(store, segment)
            met.update(lsn[np.isin(group, list(numbers))].tolist())
    return [str(one["global_id"]) for one in late if one["lsn"] in met]
