"""Dead rows: rows of a base object that are no longer part of the state, although a merge carries the object.

A merge that had to write every object again in which a row has changed would write most of a large table for a few
scattered changes. So it lists an object with few dead rows again, together with a small object that has their numbers,
in ascending order: rows are numbered from 0, in the order in which the object stores them. An object of dead rows
belongs to one base object in one or several merges, and without it, the rows of that object can't be told from the dead
ones. Rows of base objects are read by `sources.read_row_group`, which drops the dead ones; only a merge reads all rows
(`sources.read_all_rows`), because it has to number them.
"""

from __future__ import annotations

import secrets

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cutline.columns.arrow_numbers import to_arrow, to_numpy
from cutline.columns.bytes_column import Ints
from cutline.snapshots.records.commit import DeadRows
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.segments import open_parquet, parquet_options, reading_parquet

NUMBER = "number"
DEAD_SCHEMA = pa.schema([pa.field(NUMBER, pa.int32(), nullable=False)])


def store_dead_rows(store: ObjectStore, beginning: str, numbers: Ints) -> DeadRows:
    """Store the numbers of an object's dead rows, in ascending order, under a key that begins with `beginning`."""
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays([to_arrow(numbers.astype(np.int32))], schema=DEAD_SCHEMA)
    options = parquet_options(DEAD_SCHEMA) | {"column_encoding": {NUMBER: "DELTA_BINARY_PACKED"}}
    pq.write_table(table, sink, **options)
    body = sink.getvalue().to_pybytes()
    # Spark may repeat a task: the random part distinguishes the keys of its attempts.
    key = f"{beginning}-{secrets.token_hex(4)}.parquet"
    return DeadRows(key, len(body), create_or_find(store, key, body), len(numbers))


def read_dead_rows(store: ObjectStore, node: str, dead: DeadRows, rows: int) -> Ints:
    """Return the numbers of the dead rows of an object with this many rows, ascending; raise ObjectDamagedError."""
    body = read_listed(store, node, dead.key, (dead.size, dead.digest))
    with reading_parquet(dead.key, node):
        file = open_parquet(pa.BufferReader(body))
        if (file.schema_arrow.names, file.metadata.num_rows) != (DEAD_SCHEMA.names, dead.rows):
            detail = f"it does not contain the numbers of {dead.rows} dead rows"
            raise ObjectDamagedError(key=dead.key, kind="rows", node=node, detail=detail)
        numbers = to_numpy(file.read(use_threads=False).cast(DEAD_SCHEMA)[NUMBER]).astype(np.int64)
    if not (np.diff(numbers) > 0).all() or not 0 <= numbers[0] <= numbers[-1] < rows:
        detail = f"it contains numbers that are not those of dead rows among {rows}"
        raise ObjectDamagedError(key=dead.key, kind="rows", node=node, detail=detail)
    return numbers
