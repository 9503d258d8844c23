"""Lines: build and split rows in COPY's text format, whole columns at a time.

A stored line is the output of COPY … TO STDOUT (text format) for a row, including the newline, with the key columns
first. Two marks can replace a value: COPY's mark for NULL, and a mark that COPY never prints, for a TOASTed value that
an UPDATE left unchanged. Source: PostgreSQL manual, COPY, "Text Format".
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from cutline.columns.bytes_column import WORD_BYTES, Bytes, BytesColumn, Flags, Ints, copy_ranges, gather, offsets_of

TAB, NEWLINE, BACKSLASH = 9, 10, 92
# Block size for operations that need several bytes of memory per byte of data.
BLOCK_BYTES = 1 << 20
# If a line has no tab in its first WORDS_MAX words, all bytes are searched.
WORDS_MAX = 16
_TABS, _ONES, _HIGHS = (np.uint64(byte * 0x0101010101010101) for byte in (TAB, 0x01, 0x80))
NULL_MARK = b"\\N"
UNCHANGED_MARK = b"\\u"

# Appended to a source buffer, so that a line's separators and marks can be gathered like its values.
CONSTANTS = NULL_MARK + UNCHANGED_MARK + b"\t\n"
_NULL, _UNCHANGED, _TAB, _NEWLINE = 0, 2, 4, 5
_END = np.frombuffer(CONSTANTS + bytes(8), np.uint8)

# The characters that COPY escapes with a backslash, and the letters that it writes for them.
ESCAPES = {8: b"b", 9: b"t", 10: b"n", 11: b"v", 12: b"f", 13: b"r", 92: b"\\"}
_IS_SPECIAL = np.zeros(256, np.bool_)
_LETTER = np.arange(256, dtype=np.uint8)
for _byte, _letter in ESCAPES.items():
    _IS_SPECIAL[_byte] = True
    _LETTER[_byte] = _letter[0]


class Values(Struct, frozen=True):
    """One column of n values inside a source buffer: the kind, start and length of each.

    `kinds` holds pgoutput's letters: t (text), n (null), u (unchanged TOAST).
    """

    kinds: Bytes
    starts: Ints
    lengths: Ints

    def take(self, rows: Ints | Flags) -> Values:
        """Return the values of the given rows."""
        return Values(self.kinds[rows], self.starts[rows], self.lengths[rows])

    def fill_unchanged(self, other: Values) -> Values:
        """Replace unchanged values with the values in `other`."""
        unchanged = self.kinds == ord("u")
        return Values(
            np.where(unchanged, other.kinds, self.kinds),
            np.where(unchanged, other.starts, self.starts),
            np.where(unchanged, other.lengths, self.lengths),
        )


def with_constants(data: Bytes) -> Bytes:
    """Append the separators, the marks and padding to `data`, for `lines_of`."""
    return np.concatenate([data, _END])


def lines_of(source: Bytes, data_bytes: int, columns: list[Values], rows: int) -> BytesColumn:
    """Build the COPY lines of `rows` rows whose values are in `source`.

    `source` is `with_constants(data)`, and `data_bytes` is the length of `data`.
    """
    lines = _join(source, data_bytes, columns, rows)
    marks = sum(int(np.count_nonzero(column.kinds != ord("t"))) for column in columns)
    expected = rows * max(len(columns), 1) + marks
    if _count_special(lines.data) == expected:
        return lines
    # A row may take 1 GB, so release the lines as early as possible.
    del lines
    values = gather(source, _interleave([c.starts for c in columns]), _interleave([_text_lengths(c) for c in columns]))
    escaped, offsets = _escape(values, BLOCK_BYTES)
    del values
    width, lengths = len(columns), np.diff(offsets)
    escaped_columns = [
        Values(column.kinds, offsets[number:-1:width], lengths[number::width]) for number, column in enumerate(columns)
    ]
    return _join(escaped, int(offsets[-1]), escaped_columns, rows)


def keys_of(lines: BytesColumn, key_width: int, column_count: int) -> BytesColumn:
    """Extract the first `key_width` fields in every line, without the separator that follows."""
    if key_width == 0:
        return BytesColumn(np.empty(0, np.uint8), np.zeros(len(lines) + 1, np.int64))
    starts = lines.offsets[:-1]
    if key_width == column_count:
        return copy_ranges(lines.data, starts, lines.offsets[1:] - 1)
    ends = find_tabs(lines.data, starts)
    for _ in range(1, key_width):
        ends = find_tabs(lines.data, ends + 1)
    return copy_ranges(lines.data, starts, ends)


def find_tabs(data: Bytes, starts: Ints) -> Ints:
    """Return the offset of the first tab at or after each start; there must be one.

    It reads eight bytes of each line at a time, and stops at the tab.
    """
    if len(data) < WORD_BYTES:
        data = np.concatenate([data, np.zeros(WORD_BYTES, np.uint8)])
    last = len(data) - WORD_BYTES
    words = np.ndarray((last + 1,), np.dtype("<u8"), data, strides=(1,))
    found, rows, places = np.empty_like(starts), np.arange(len(starts)), starts
    for _ in range(WORDS_MAX):
        # The data's last word, without its first bytes, stands for words that would end after the data.
        read = np.minimum(places, last)
        found_words = words[read] >> ((places - read) * 8).astype(np.uint64)
        # Bytes that are tabs become zero, and the first zero byte is the lowest that keeps its highest bit.
        mixed = found_words ^ _TABS
        marks = (mixed - _ONES) & ~mixed & _HIGHS
        has_tab = marks != 0
        first = marks & (~marks + np.uint64(1))
        # The exponent of a power of two is exact.
        bits = np.frexp(first.astype(np.float64))[1] - 1
        if has_tab.all():
            found[rows] = places + (bits >> 3)
            return found
        found[rows[has_tab]] = (places + (bits >> 3))[has_tab]
        rows, places = rows[~has_tab], places[~has_tab] + WORD_BYTES
    tabs = find_byte(data, TAB)
    found[rows] = tabs[np.searchsorted(tabs, places)]
    return found


def find_byte(data: Bytes, byte: int) -> Ints:
    """Return the offsets of the byte in the data."""
    blocks = range(0, len(data), BLOCK_BYTES)
    return np.concatenate(
        [np.empty(0, np.int64), *(low + np.flatnonzero(data[low : low + BLOCK_BYTES] == byte) for low in blocks)]
    )


def count_byte(data: Bytes, byte: int) -> int:
    """Return how often the byte is in the data."""
    blocks = range(0, len(data), BLOCK_BYTES)
    return sum(int(np.count_nonzero(data[low : low + BLOCK_BYTES] == byte)) for low in blocks)


def key_lines(source: Bytes, data_bytes: int, columns: list[Values], rows: int) -> BytesColumn:
    """Build the keys of rows from their key columns, as lines without the newline."""
    lines = lines_of(source, data_bytes, columns, rows)
    return copy_ranges(lines.data, lines.offsets[:-1], lines.offsets[1:] - 1)


def escape(values: BytesColumn, block_bytes: int = BLOCK_BYTES) -> BytesColumn:
    """Escape every value with backslashes, as COPY does.

    Works in blocks, so the additional memory does not depend on the size of the values.
    """
    escaped, offsets = _escape(values, block_bytes)
    return BytesColumn(escaped[: int(offsets[-1])], offsets)


def _escape(values: BytesColumn, block_bytes: int) -> tuple[Bytes, Ints]:
    """Return the escaped values and their offsets; the constants are already appended, which saves a copy."""
    count = len(values.data)
    size = count + _count_special(values.data)
    out = np.empty(size + len(_END), np.uint8)
    out[size:] = _END
    offsets = np.empty_like(values.offsets)
    offsets[values.offsets == count] = size
    escapes = 0
    for low in range(0, count, block_bytes):
        block = values.data[low : low + block_bytes]
        special = _IS_SPECIAL[block]
        added = np.concatenate([[0], np.cumsum(special)])
        place = np.arange(low + escapes, low + escapes + len(block)) + added[1:]
        out[place] = _LETTER[block]
        out[place[special] - 1] = BACKSLASH
        first, last = np.searchsorted(values.offsets, [low, low + len(block)])
        here = values.offsets[first:last]
        offsets[first:last] = here + escapes + added[here - low]
        escapes += int(added[-1])
    return out, offsets


def _count_special(data: Bytes) -> int:
    blocks = range(0, len(data), BLOCK_BYTES)
    return sum(int(np.count_nonzero(_IS_SPECIAL[data[low : low + BLOCK_BYTES]])) for low in blocks)


def _text_lengths(column: Values) -> Ints:
    return np.where(column.kinds == ord("t"), column.lengths, 0)


def _join(source: Bytes, data_bytes: int, columns: list[Values], rows: int) -> BytesColumn:
    starts: list[Ints] = []
    lengths: list[Ints] = []
    separator_lengths = np.ones(rows, np.int64)
    for number, column in enumerate(columns):
        is_null, is_unchanged = column.kinds == ord("n"), column.kinds == ord("u")
        mark = np.where(is_null, data_bytes + _NULL, data_bytes + _UNCHANGED)
        is_mark = is_null | is_unchanged
        starts.append(np.where(is_mark, mark, column.starts))
        lengths.append(np.where(is_mark, len(NULL_MARK), column.lengths))
        last = number == len(columns) - 1
        starts.append(separator_lengths * (data_bytes + (_NEWLINE if last else _TAB)))
        lengths.append(separator_lengths)
    if not columns:
        starts, lengths = [separator_lengths * (data_bytes + _NEWLINE)], [separator_lengths]
    width = len(starts)
    pieces = gather(source, _interleave(starts), _interleave(lengths))
    return BytesColumn(pieces.data, np.ascontiguousarray(pieces.offsets[::width]))


def _interleave(columns: list[Ints]) -> Ints:
    return np.stack(columns, axis=1).reshape(-1)


def concatenate(columns: list[BytesColumn]) -> BytesColumn:
    """Concatenate the values of all columns."""
    if len(columns) == 1:
        return columns[0]
    if not columns:
        return BytesColumn(np.empty(0, np.uint8), np.zeros(1, np.int64))
    data = np.concatenate([column.data[column.offsets[0] : column.offsets[-1]] for column in columns])
    return BytesColumn(data, offsets_of(np.concatenate([column.lengths for column in columns])))
