"""Hash rows at a cut that changes have produced, by partition."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from msgspec import Struct, field

from cutline.check.copies import Copies
from cutline.check.hashing import Sums, combine_all, combine_hashes
from cutline.check.sequence_values import KeyExtremes, add_extremes, fed_by_node, keys_of
from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import BytesColumn, column_of, xxhash64
from cutline.snapshots.fold.changes import ENTRY


class PartitionHashes(Struct, frozen=True):
    """Combined hashes of rows and of row versions, keyed by (node number, group, partition).

    A row's version is the commit position of its last writer. It is known only for rows written after all base copies
    were taken. `extremes` are the smallest and largest keys of the groups in `Copies.fed`.
    """

    rows: Sums
    versions: Sums
    extremes: KeyExtremes = field(default_factory=dict)

    @classmethod
    def none(cls) -> PartitionHashes:
        """Return the hashes of no rows."""
        return cls(combine_all([], 3), combine_all([], 3))


def hash_local(images: pa.Table, copies: Copies) -> PartitionHashes:
    """Hash rows that the driver folded, and their versions; the hashes are those of `hash_folded`."""
    numbers = ("node", "group", "partition", "lsn")
    node, group, partition, lsn = (to_numpy(images[name]).astype(np.int64) for name in numbers)
    hashed = xxhash64(column_of(images["key"]))
    has_entries = ENTRY in images.column_names
    entries = to_numpy(images[ENTRY]).view(np.uint64) if has_entries else xxhash64(column_of(images["row"]), hashed)
    positions = BytesColumn(np.ascontiguousarray(lsn).view(np.uint8), np.arange(len(lsn) + 1, dtype=np.int64) * 8)
    is_compared = np.zeros(len(lsn), np.bool_)
    extremes, fed = KeyExtremes(), fed_by_node(copies)
    # Most slices contain rows from only one node. Computing the positions of all nodes takes seconds in a large fleet.
    for number in np.unique(node).tolist():
        name, of_node = copies.nodes[number], node == number
        is_compared |= of_node & (lsn >= copies.since(name))
        for recopied, position in copies.recopied_since(name).items():
            of_group = of_node & (group == recopied)
            is_compared[of_group] = lsn[of_group] >= position
        if number in fed:
            add_extremes(extremes, number, group, keys_of(images), fed[number], of_node)
    keys = np.stack([node, group, partition], axis=1)
    rows = combine_hashes(keys, entries)
    versions = combine_hashes(keys[is_compared], xxhash64(positions, hashed)[is_compared])
    return PartitionHashes(rows, versions, extremes)
