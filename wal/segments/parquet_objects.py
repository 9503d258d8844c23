"""How Cutline's Parquet objects are written, and what must hold of one before its rows are expanded.

A few kilobytes can hold gigabytes: a value that is stored once in a dictionary, for every row. Cutline writes keys,
rows and the data of large objects as they are, so their size is that of the pages; only columns of short values have
dictionaries.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# Arrow writes no row group with more rows, and a line of COPY has at most 1 GB, besides its key.
ROW_GROUP_ROWS_MAX, ROW_GROUP_BYTES_MAX = 1 << 20, 4 << 30
INCREASING = frozenset({"lsn", "end_lsn", "seq", "xid"})
REPEATED = frozenset({"group", "partition", "op", "global_id"})
# The only texts with a dictionary. PostgreSQL's own have less than 200 bytes, before they are escaped.
GLOBAL_ID, GLOBAL_ID_BYTES_MAX = "global_id", 4096
BYTES = "BYTE_ARRAY"
# RLE and BIT_PACKED are for what says which values are missing.
PLAIN = frozenset({"PLAIN", "RLE", "BIT_PACKED"})


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """The encoding of all our Parquet objects: zstd; increasing numbers as differences, repeated values as runs."""
    names = frozenset(schema.names)
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": sorted(names & REPEATED),
        "column_encoding": dict.fromkeys(sorted(names & INCREASING), "DELTA_BINARY_PACKED"),
        "write_statistics": False,
        # Of a page of version 1 Arrow makes one more copy before it compresses it.
        "data_page_version": "2.0",
        "store_schema": False,
    }


def open_parquet(source: Any) -> pq.ParquetFile:
    """Open an object whose footer declares no more than Cutline writes; raise ValueError, or a pa.ArrowException."""
    file = pq.ParquetFile(source)
    footer = file.metadata
    if GLOBAL_ID in footer.schema.names:
        file = pq.ParquetFile(source, metadata=footer, read_dictionary=[GLOBAL_ID])
    for group in map(footer.row_group, range(footer.num_row_groups)):
        if not 0 <= group.num_rows <= ROW_GROUP_ROWS_MAX or not 0 <= group.total_byte_size <= ROW_GROUP_BYTES_MAX:
            declared = f"{group.num_rows} rows and {group.total_byte_size} bytes"
            raise ValueError(f"a row group declares {declared}, more than Cutline writes")
        for column in map(group.column, range(group.num_columns)):
            is_text = column.physical_type == BYTES and column.path_in_schema != GLOBAL_ID
            if is_text and not PLAIN.issuperset(column.encodings):
                raise ValueError(f"column {column.path_in_schema} is encoded as Cutline writes none")
    return file


def expand_global_ids(table: pa.Table) -> pa.Table:
    """Replace the dictionary of a table's global ids by the texts; raise ValueError if one is longer than any is."""
    place = table.schema.get_field_index(GLOBAL_ID)
    if place < 0 or not pa.types.is_dictionary(table.schema.field(place).type):
        return table
    column = table.column(place)
    lengths = [pc.max(pc.binary_length(chunk.dictionary)).as_py() or 0 for chunk in column.chunks]
    if max(lengths, default=0) > GLOBAL_ID_BYTES_MAX:
        raise ValueError(f"a global id has {max(lengths)} bytes, more than PostgreSQL takes")
    return table.set_column(place, pa.field(GLOBAL_ID, pa.string()), column.cast(pa.string()))
