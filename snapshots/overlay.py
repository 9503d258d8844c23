"""Overlay: the keys of one node that changed since its base, to tell which base rows still hold.

Keys are looked up by hash and then compared, so a collision costs time and never a row. It is sent to the
executors that read base objects: what the base pass lets through needs no shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wal.bytes_column import BytesColumn, Flags, Ints, from_arrow, gather, xxhash64
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
    ordered = hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(ordered) else ordered
    runs = np.diff(np.concatenate([starts, [len(ordered)]]).astype(np.int64))
    return KeySet(ordered, taken(keys, order), int(runs.max(initial=0)))


def taken(column: BytesColumn, rows: Ints) -> BytesColumn:
    """The values of these rows."""
    return gather(column.data, column.offsets[:-1][rows], column.lengths[rows])


def overlays(changed: pa.Table) -> dict[int, dict[int, KeySet]]:
    """By node and group the set of changed keys; `changed` has node, group and key, each key once."""
    found: dict[int, dict[int, KeySet]] = {}
    table = changed.combine_chunks()
    node, group = table["node"].to_numpy(), table["group"].to_numpy()
    for number in np.unique(node):
        for one in np.unique(group[node == number]):
            rows = np.flatnonzero((node == number) & (group == one))
            keys = table["key"].take(pa.array(rows)).combine_chunks()
            found.setdefault(int(number), {})[int(one)] = key_set(column_of(keys))
    return found


def column_of(values: pa.Array | pa.ChunkedArray) -> BytesColumn:
    """An Arrow binary column, in one piece, as bytes."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = values.chunk(0)
    return from_arrow(values)
