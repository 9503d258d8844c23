"""Write rows that are already in the form of base copies to new objects of a node."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from msgspec import Struct, field

from cutline.columns.arrow_numbers import to_numpy
from cutline.snapshots.base_copy.copy_ranges import (
    BASE_SCHEMA,
    CHUNK_BYTES,
    OBJECT_BYTES,
    OBJECT_RAW_BYTES,
    ObjectWriter,
)
from cutline.snapshots.records.commit import BASE, StoredObject
from cutline.storage.location import StoreLocation


class RowWriter(Struct):
    """Collects rows until there are enough for a row group of the current object."""

    objects: ObjectWriter
    waiting: list[pa.Table] = field(default_factory=list)

    @classmethod
    def of(cls, location: StoreLocation, node: str, beginning: str) -> RowWriter:
        """Collect rows for objects of the node, under keys that begin with `beginning`."""
        store = location.open()
        return cls(ObjectWriter(store, BASE_SCHEMA, BASE, node, beginning, OBJECT_BYTES, OBJECT_RAW_BYTES))

    @property
    def stored(self) -> tuple[StoredObject, ...]:
        """The objects that are stored."""
        return tuple(self.objects.objects)

    def add(self, table: pa.Table) -> None:
        """Add rows (BASE_SCHEMA)."""
        groups, counts = np.unique(to_numpy(table["group"]), return_counts=True)
        for number, count in zip(groups.tolist(), counts.tolist(), strict=True):
            self.objects.count(number, count, table.nbytes * count // len(table))
        self.waiting.append(table)
        if sum(one.nbytes for one in self.waiting) > CHUNK_BYTES:
            self.flush()
        if self.objects.is_full:
            self.close()

    def flush(self) -> None:
        """Write the rows as a row group."""
        if self.waiting:
            self.objects.write(pa.concat_tables(self.waiting))
            self.waiting = []

    def close(self) -> None:
        """Store the object if it has rows."""
        self.flush()
        self.objects.close()
