"""Extract the fields of one column from many lines, and convert them to values.

A field is in the text format that COPY TO writes (PostgreSQL manual, COPY, "Text Format").
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, gather, offsets_of
from cutline.columns.lines import BACKSLASH, ESCAPES, NEWLINE, NULL_MARK, TAB, find_byte

UUID_CHARACTERS, UUID_BYTES = 36, 16
_BYTE = np.arange(256, dtype=np.uint8)
for _byte, _letter in ESCAPES.items():
    _BYTE[_letter[0]] = _byte
_HEX = np.zeros(256, np.uint8)
for _digit in b"0123456789abcdef":
    _HEX[_digit] = int(chr(_digit), 16)


def field_of(lines: BytesColumn, width: int, field: int) -> BytesColumn:
    """Extract the field with this index from lines of `width` fields, which may end with a newline.

    Raises ValueError if the lines have a different number of fields.
    """
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    data, offsets = lines.data[first:last], lines.offsets - first
    tabs = find_byte(data, TAB)
    if len(tabs) != len(lines) * (width - 1):
        raise ValueError(f"the table has {width} columns, but some of its rows have more or fewer")
    tabs = tabs.reshape(len(lines), width - 1)
    starts = offsets[:-1] if field == 0 else tabs[:, field - 1] + 1
    if field < width - 1:
        ends = tabs[:, field]
    else:
        # Values contain no newline. An empty line is an empty value without a newline.
        ends = offsets[1:].copy()
        filled = np.flatnonzero(ends > offsets[:-1])
        ends[filled] -= data[ends[filled] - 1] == NEWLINE
    return gather(data, starts, ends - starts)


def find_nulls(fields: BytesColumn) -> Flags:
    """Return a flag for every field, true if the field is NULL."""
    mark = np.frombuffer(NULL_MARK, np.uint8)
    short = np.flatnonzero(fields.lengths == len(mark))
    nulls = np.zeros(len(fields), np.bool_)
    starts = fields.offsets[:-1][short]
    nulls[short] = (fields.data[starts] == mark[0]) & (fields.data[starts + 1] == mark[1])
    return nulls


def read_texts(fields: BytesColumn) -> BytesColumn:
    """Remove COPY's backslash escapes from fields, none of which may be NULL."""
    first, last = int(fields.offsets[0]), int(fields.offsets[-1])
    data, offsets = fields.data[first:last], fields.offsets - first
    slashes = np.flatnonzero(data == BACKSLASH)
    if len(slashes) == 0:
        return BytesColumn(data, offsets)
    # In a run of backslashes, the first, third, … escape the byte that follows. No field ends within an escape.
    begins = np.concatenate([[True], np.diff(slashes) > 1])
    run = np.maximum.accumulate(np.where(begins, np.arange(len(slashes)), 0))
    escapes = slashes[(np.arange(len(slashes)) - run) % 2 == 0]
    data = data.copy()
    data[escapes + 1] = _BYTE[data[escapes + 1]]
    kept = np.ones(len(data), np.bool_)
    kept[escapes] = False
    return BytesColumn(data[kept], offsets - np.searchsorted(escapes, offsets))


def read_integers(fields: BytesColumn) -> Ints:
    """Convert integer fields, none of which may be NULL; raise ValueError if a field is not a 64-bit integer."""
    try:
        return to_numpy(pc.cast(pc.cast(fields.to_large_arrow(), pa.large_string()), pa.int64()))
    except pa.ArrowInvalid as error:
        raise ValueError(str(error)) from error


def read_uuids(fields: BytesColumn) -> BytesColumn:
    """Return the 16 bytes of each uuid; no field may be NULL. Raises ValueError if a field's length is wrong."""
    if (fields.lengths != UUID_CHARACTERS).any():
        raise ValueError("a value is not a valid uuid")
    first, last = int(fields.offsets[0]), int(fields.offsets[-1])
    characters = fields.data[first:last].reshape(len(fields), UUID_CHARACTERS)
    digits = _HEX[np.delete(characters, [8, 13, 18, 23], axis=1)]
    values = (digits[:, 0::2] << 4) | digits[:, 1::2]
    return BytesColumn(
        values.reshape(-1).astype(np.uint8, copy=False), offsets_of(np.full(len(fields), UUID_BYTES, np.int64))
    )
