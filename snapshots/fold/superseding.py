"""Superseding: find the changes that a later change in the same segment supersedes, by whole columns.

Superseded changes are not shuffled: a row that is updated a thousand times in a segment is one change.
"""

from __future__ import annotations

import numpy as np

from cutline.columns.bytes_column import BytesColumn, Flags, Ints, xxhash64


def last_of_every_key(groups: Ints, keys: BytesColumn, lsn: Ints, seq: Ints) -> Flags:
    """Find the rows that are the last, by (lsn, seq), of their group and key.

    If two keys have the same hash, all rows are returned as last: that costs time, but never a row.
    """
    found = find_last(groups, keys, lsn, seq)
    return np.ones(len(groups), np.bool_) if found is None else found


def find_last(groups: Ints, keys: BytesColumn, lsn: Ints, seq: Ints) -> Flags | None:
    """Find the rows that are the last, by (lsn, seq), of their group and key; None if two keys have the same hash."""
    count = len(groups)
    if count == 0:
        return np.ones(0, np.bool_)
    hashes = xxhash64(keys, groups.astype(np.uint64))
    order = np.lexsort((seq, lsn, hashes))
    ends = np.flatnonzero(np.concatenate([hashes[order][1:] != hashes[order][:-1], [True]]))
    lasts = np.repeat(order[ends], np.diff(np.concatenate([[-1], ends])))
    same = (groups[order] == groups[lasts]) & keys.take(order).equals(keys.take(lasts))
    if not same.all():
        return None
    is_last = np.zeros(count, np.bool_)
    is_last[order[ends]] = True
    return is_last
