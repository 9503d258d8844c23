"""Overlay: the keys of one node that changed since its base, to find the base rows that are still valid.

Keys are looked up by hash and then compared, so a hash collision costs time but never a row. The overlay is sent to
the executors that read base objects, so valid base rows need no shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, from_list, runs, xxhash64

# Hashes are sorted into slots by their highest bits. Up to 2^18 keys have 16 to 32 slots each, more have fewer.
SLOTS_PER_KEY_BITS, SLOT_BITS_MAX = 4, 22


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys in the order of their hashes. `run_max`: the largest number of keys with the same hash."""

    hashes: npt.NDArray[np.uint64]
    keys: BytesColumn
    run_max: int

    def find(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Ints:
        """The index of each key in this set, -1 if it is not in it; pass the keys' `hashes` if they are known."""
        if hashes is None:
            hashes = xxhash64(keys)
        indexes = np.full(len(keys), -1, np.int64)
        some = self._maybe_contained(hashes)
        hashes = hashes[some]
        place = np.searchsorted(self.hashes, hashes)
        for step in range(self.run_max):
            here = np.minimum(place + step, len(self.hashes) - 1)
            chosen = np.flatnonzero((self.hashes[here] == hashes) & (indexes[some] < 0))
            if len(chosen) == 0:
                break
            rows = some[chosen]
            same = keys.take(rows).equals(self.keys.take(here[chosen]))
            indexes[rows[same]] = here[chosen[same]]
        return indexes

    def _maybe_contained(self, hashes: npt.NDArray[np.uint64]) -> Ints:
        """The indexes of the hashes that may be in this set: most others are not searched for, which takes longer."""
        bits = min(len(self.hashes).bit_length() + SLOTS_PER_KEY_BITS, SLOT_BITS_MAX)
        if len(hashes) << SLOTS_PER_KEY_BITS < len(self.hashes):
            return np.arange(len(hashes))
        shift = np.uint64(64 - bits)
        slots = np.zeros(1 << bits, np.bool_)
        slots[self.hashes >> shift] = True
        return np.flatnonzero(slots[hashes >> shift])

    def contains(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Flags:
        """Which of `keys` are in this set."""
        return self.find(keys, hashes) >= 0


def key_set(keys: BytesColumn) -> KeySet:
    """Build the set of these keys, which must be distinct."""
    hashes = xxhash64(keys)
    order = np.argsort(hashes, kind="stable")
    return _in_order(hashes[order], keys.take(order))


def _in_order(hashes: npt.NDArray[np.uint64], keys: BytesColumn) -> KeySet:
    """Build the set of keys that are in the order of their hashes."""
    starts = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
    lengths = np.diff(np.concatenate([[0], starts, [len(hashes)]]))
    return KeySet(hashes, keys, int(lengths.max(initial=0)))


def overlays(changed: pa.Table) -> dict[int, dict[int, KeySet]]:
    """Build the sets of changed keys by node and group; `changed` has node, group and key, each key once."""
    result: dict[int, dict[int, KeySet]] = {}
    node, group = (np.asarray(changed[name].to_numpy()) for name in ("node", "group"))
    keys = column_of(changed["key"]) if len(changed) else from_list([])
    hashes = xxhash64(keys)
    # Sort once for all groups: there may be as many groups as keys.
    order = np.lexsort((hashes, group, node))
    node, group, hashes, keys = node[order], group[order], hashes[order], keys.take(order)
    for of_node in runs(node):
        sets = result.setdefault(int(node[of_node.start]), {})
        for one in runs(group[of_node]):
            rows = slice(of_node.start + one.start, of_node.start + one.stop)
            sets[int(group[rows.start])] = _in_order(hashes[rows], keys.part(rows))
    return result
