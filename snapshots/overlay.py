"""Overlay: the keys of one node that changed since its base, to tell which base rows still hold.

Keys are looked up by hash and then compared, so a collision costs time and never a row. It is sent to the
executors that read base objects: what the base pass lets through needs no shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wal.bytes_column import BytesColumn, Flags, Ints, from_arrow, from_list, gather, xxhash64
from wal.lines import equal


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys in the order of their hashes. `run_max`: how many of them at most share one hash."""

    hashes: npt.NDArray[np.uint64]
    keys: BytesColumn
    run_max: int

    def find(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Ints:
        """For every key its place in this set, -1 where it is not in it; `hashes` are those of the keys."""
        if hashes is None:
            hashes = xxhash64(keys)
        place = np.searchsorted(self.hashes, hashes)
        found = np.full(len(keys), -1, np.int64)
        for step in range(self.run_max):
            here = np.minimum(place + step, len(self.hashes) - 1)
            rows = np.flatnonzero((self.hashes[here] == hashes) & (found < 0))
            if len(rows) == 0:
                break
            same = equal(taken(keys, rows), taken(self.keys, here[rows]))
            found[rows[same]] = here[rows[same]]
        return found

    def contains(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Flags:
        """Which of `keys` are in this set."""
        return self.find(keys, hashes) >= 0


def key_set(keys: BytesColumn) -> KeySet:
    """The set of these keys, which are all different."""
    hashes = xxhash64(keys)
    order = np.argsort(hashes, kind="stable")
    return _in_order(hashes[order], taken(keys, order))


def _in_order(hashes: npt.NDArray[np.uint64], keys: BytesColumn) -> KeySet:
    """The set of keys that stand in the order of their hashes."""
    starts = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
    lengths = np.diff(np.concatenate([[0], starts, [len(hashes)]]))
    return KeySet(hashes, keys, int(lengths.max(initial=0)))


def taken(column: BytesColumn, rows: Ints) -> BytesColumn:
    """The values of these rows."""
    return gather(column.data, column.offsets[:-1][rows], column.lengths[rows])


def overlays(changed: pa.Table) -> dict[int, dict[int, KeySet]]:
    """By node and group the set of changed keys; `changed` has node, group and key, each key once."""
    found: dict[int, dict[int, KeySet]] = {}
    node, group = (np.asarray(changed[name].to_numpy()) for name in ("node", "group"))
    keys = column_of(changed["key"]) if len(changed) else from_list([])
    hashes = xxhash64(keys)
    # One order for all: there may be as many groups as keys.
    order = np.lexsort((hashes, group, node))
    node, group, hashes, keys = node[order], group[order], hashes[order], taken(keys, order)
    for of_node in runs(node):
        sets = found.setdefault(int(node[of_node.start]), {})
        for one in runs(group[of_node]):
            rows = slice(of_node.start + one.start, of_node.start + one.stop)
            sets[int(group[rows.start])] = _in_order(hashes[rows], part(keys, rows))
    return found


def part(column: BytesColumn, rows: slice) -> BytesColumn:
    """The values of these rows, side by side; copies no data."""
    offsets = column.offsets[rows.start : rows.stop + 1]
    return BytesColumn(column.data[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def runs(values: npt.NDArray[Any]) -> Iterator[slice]:
    """Where equal values stand side by side: every such run of rows."""
    starts = np.flatnonzero(values[1:] != values[:-1]) + 1
    bounds = [0, *starts.tolist(), len(values)] if len(values) else []
    yield from (slice(low, high) for low, high in pairwise(bounds))


def column_of(values: pa.Array | pa.ChunkedArray) -> BytesColumn:
    """An Arrow binary column, in one piece, as bytes."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray) and values.num_chunks > 1:
            # More than 2 GiB.
            values = values.cast(pa.large_binary()).combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = values.chunk(0)
    return from_arrow(values)
