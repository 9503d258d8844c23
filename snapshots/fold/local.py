"""Folding few changes in the driver: that takes less time than the jobs that would shuffle them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import column_of
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.find_sources import Sources
from cutline.snapshots.fold.sources import PROBLEM, SegmentSource
from cutline.snapshots.fold.superseding import find_last

READERS = 4
Reader = Callable[[SegmentSource], Iterator[pa.RecordBatch]]


class TooManyChangesError(Exception):
    """The changes are more than the driver should hold."""


def fold_locally(sources: Sources, read: Reader, schema: pa.Schema) -> pa.Table | None:
    """The last change of every node, group and key, and the rows of PROBLEM, as `schema`; None if Spark has to fold.

    `read` yields the changes of a segment (`schema`). Spark has to fold changes that are many, rows of groups without a
    key, and partial images.
    """
    size = sum(one.source.size for one in sources.segments)
    if sources.has_partials or sources.changes > limits.CHANGES_MAX or size > limits.STORED_BYTES_MAX:
        return None
    try:
        changes = pa.Table.from_batches(_read_all(sources.segments, read), schema=schema)
    except TooManyChangesError:
        return None
    group = to_numpy(changes["group"])
    if np.isin(group, list(sources.multisets)).any():
        return None
    is_problem = group == PROBLEM
    last = last_changes(changes.filter(to_mask(~is_problem)))
    return None if last is None else pa.concat_tables([changes.filter(to_mask(is_problem)), last])


def last_changes(changes: pa.Table) -> pa.Table | None:
    """The last of the changes (node, group, key, lsn, seq and others) of every key; None if two keys have one hash."""
    last = [changes.slice(0, 0)]
    node = to_numpy(changes["node"])
    numbers = np.unique(node)
    for number in numbers:
        # Changes of one node are not copied.
        of_node = changes.filter(to_mask(node == number)) if len(numbers) > 1 else changes
        group, lsn, seq = (to_numpy(of_node[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
        is_last = find_last(group, column_of(of_node["key"]), lsn, seq)
        if is_last is None:
            return None
        last.append(of_node if is_last.all() else of_node.filter(to_mask(is_last)))
    return pa.concat_tables(last)


def _read_all(segments: Iterable[SegmentSource], read: Reader) -> list[pa.RecordBatch]:
    sizes: list[int] = []

    def read_one(one: SegmentSource) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = []
        for batch in read(one):
            sizes.append(batch.nbytes)
            if sum(sizes) > limits.READ_BYTES_MAX:
                raise TooManyChangesError
            batches.append(batch)
        return batches

    with ThreadPoolExecutor(max_workers=READERS) as threads:
        return [batch for batches in threads.map(read_one, segments) for batch in batches]
