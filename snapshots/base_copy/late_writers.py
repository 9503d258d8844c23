"""Find prepared transactions whose changes are neither in a base copy nor decoded after it: they invalidate the copy.

A copy shows what was committed before its position. Changes committed later are decoded from that position on, except
those of a transaction that was prepared before the position and is decided after it: they lie at its PREPARE. Creating
the copy's slot waits for all transactions in progress, so only those that began meanwhile are affected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.lsn import Lsn
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segment_schema import COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED, SEGMENT_SCHEMA
from cutline.wal.segments.segments import read_events, read_positions_and_groups


def find_late_writers(
    store: ObjectStore, segments: Iterable[Segment], position: Lsn, numbers: Collection[int]
) -> list[str]:
    """Return the gids, or global ids, of such transactions that changed the groups `numbers`.

    `position` is the copy's position on the node.
    """
    segments = list(segments)
    tables = [read_events(store, segment).cast(SEGMENT_SCHEMA) for segment in segments]
    events = pa.concat_tables([pa.Table.from_batches([], SEGMENT_SCHEMA), *tables])
    op, xid = to_numpy(events["op"]), to_numpy(events["xid"])
    decided = np.isin(op, (COMMIT_PREPARED, ROLLBACK_PREPARED)) & (to_numpy(events["end_lsn"]) <= position)
    is_late = (op == PREPARE) & (to_numpy(events["lsn"]) < position) & ~np.isin(xid, xid[decided])
    late = events.filter(to_mask(is_late)).select(["lsn", "global_id"]).to_pylist()
    if not late:
        return []
    prepared_at: set[int] = set()
    for segment in segments:
        if segment.changes:
            lsn, group = read_positions_and_groups(store, segment)
            prepared_at.update(lsn[np.isin(group, list(numbers))].tolist())
    return [str(one["global_id"]) for one in late if one["lsn"] in prepared_at]
