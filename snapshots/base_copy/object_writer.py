"""Write the Parquet objects of a base copy task, one after the other, each of bounded size."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cutline.snapshots.records.stored_object import StoredObject
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.parquet_objects import parquet_options


@dataclass(slots=True)
class ObjectWriter:
    """Writes objects of `schema`, of one `kind` and node, whose keys begin with `beginning`.

    An object is full at `object_bytes` as stored, or at `object_raw_bytes` before compression. `objects` are those
    stored, with the rows counted for each.
    """

    store: ObjectStore
    schema: pa.Schema
    kind: str
    node: str
    beginning: str
    object_bytes: int
    object_raw_bytes: int
    objects: list[StoredObject] = field(default_factory=list)
    _sink: Any = field(default=None, init=False)
    _writer: Any = field(default=None, init=False)
    _raw_bytes: int = field(default=0, init=False)
    _rows: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def is_full(self) -> bool:
        """Whether the current object has reached its size and should be closed."""
        is_large = self._sink is not None and self._sink.tell() > self.object_bytes
        return is_large or self._raw_bytes > self.object_raw_bytes

    def count(self, number: int, rows: int, raw_bytes: int) -> None:
        """Count rows of the group `number` in the current object, and their bytes before compression."""
        self._rows[number] = self._rows.get(number, 0) + rows
        self._raw_bytes += raw_bytes

    def write(self, table: pa.Table) -> None:
        """Write the table to the current object, in new row groups."""
        if self._writer is None:
            self._sink = pa.BufferOutputStream()
            self._writer = pq.ParquetWriter(self._sink, self.schema, **parquet_options(self.schema))
        self._writer.write_table(table)

    def close(self) -> None:
        """Store the current object, if anything was written to it; the next write begins another."""
        if self._writer is None:
            return
        self._writer.close()
        body = self._sink.getvalue().to_pybytes()
        # A row may have 1 GB: what holds as much ends before the body is encrypted and stored.
        self._sink = self._writer = None
        # The random part distinguishes the attempts of a task that Spark repeats.
        key = f"{self.beginning}-{len(self.objects):06d}-{secrets.token_hex(4)}.parquet"
        digest = create_or_find(self.store, key, body)
        self.objects.append(StoredObject(key, self.kind, self.node, len(body), digest, self._rows))
        self._raw_bytes, self._rows = 0, {}
