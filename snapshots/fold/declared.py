"""What an object declares of itself, compared with its commit before any of its rows are read.

A file of a few kilobytes can declare millions of rows. Its footer says how many it has, in which row groups, and how
large they are once expanded; a segment's metadata says which it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_numpy
from cutline.fleet.record import from_json
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import FORMAT, METADATA_KEY, SegmentMetadata

# What a segment's metadata and its entry in a commit both say.
DECLARED = ("node", "operation", "after", "through", "open", "changes", "events", "partials", "truncates")


def check_footer(footer: Any, schema: pa.Schema, rows: int) -> None:
    """Raise ValueError unless the object has the columns of `schema`, and this number of rows."""
    if footer.schema.to_arrow_schema().names != schema.names:
        raise ValueError(f"it has columns {', '.join(footer.schema.names)[:200]} instead of {', '.join(schema.names)}")
    if footer.num_rows != rows:
        raise ValueError(f"it declares {footer.num_rows} rows instead of {rows}")
    if sum(footer.row_group(number).num_rows for number in range(footer.num_row_groups)) != rows:
        raise ValueError("its row groups declare another number of rows than its footer")


def check_segment(footer: Any, segment: Segment) -> None:
    """Raise ValueError unless the metadata of the object says what the commit says of the segment."""
    body = (footer.metadata or {}).get(METADATA_KEY, b"")
    # Segments of earlier formats had other metadata.
    if f'"{FORMAT}"'.encode() not in body:
        return
    try:
        declared: SegmentMetadata = from_json(body, SegmentMetadata)
    except msgspec.DecodeError as error:
        raise ValueError(f"its metadata is damaged: {error}") from error
    for name in DECLARED:
        found, expected = getattr(declared, name), getattr(segment, name)
        if found != expected:
            raise ValueError(f"its metadata says {name} {found}, its commit {expected}")


def counting_groups(tables: Iterator[pa.Table], rows: Mapping[int, int]) -> Iterator[pa.Table]:
    """Yield the tables; at their end raise ValueError unless they had `rows` by group number."""
    counted: dict[int, int] = {}
    for table in tables:
        groups, counts = np.unique(to_numpy(table["group"]), return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            counted[group] = counted.get(group, 0) + count
        yield table
    if counted != {group: count for group, count in rows.items() if count}:
        raise ValueError(f"it has rows {counted} instead of {dict(rows)}")
