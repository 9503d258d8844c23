"""Bytes columns: byte strings in numpy arrays, with whole-column operations.

The layout is Arrow's: one data buffer and n + 1 offsets. Every operation makes a constant number of numpy calls per
column, except hashing, which makes one per 8 bytes of the longest value. Only long values are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from xxhash import xxh64_intdigest

from cutline.columns.arrow_numbers import to_arrow, to_flags

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]

# gather() writes its output in blocks, so that the index arrays stay in the CPU cache.
GATHER_BLOCK_BYTES = 1 << 20
# Hashing works in blocks of rows for the same reason.
HASH_BLOCK_ROWS = 1 << 13
STRIPE_BYTES, WORD_BYTES = 32, 8
# Longer values are hashed one by one without numpy, whose passes take 4 ns per byte: 500 bytes take 2.1 µs in a column,
# but 0.4 µs alone (measured), and a single row of a megabyte would take a second.
HASHED_BY_COLUMN_BYTES_MAX = 1 << 7
# Larger columns are not copied to be hashed, because a value may be 1 GB.
COPIED_BYTES_MAX = 64 << 20
# Arrow's binary type has 32-bit offsets.
ARROW_BYTES_MAX = (1 << 31) - 1

_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
# Spark's seed: xxhash64(key) in Spark returns the same number.
HASH_SEED = np.uint64(42)


class BytesColumn(Struct, frozen=True):
    """n byte strings: value i is `data[offsets[i]:offsets[i + 1]]`."""

    data: Bytes
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """The length of every value in bytes."""
        return np.diff(self.offsets)

    def take(self, rows: Ints) -> BytesColumn:
        """Copy the values of these rows, in this order."""
        return from_arrow(self.to_large_arrow().take(to_arrow(rows)))

    def take_ascending(self, rows: Ints) -> BytesColumn:
        """Return the values of these rows, in ascending order; copy data only if a row between them has a value."""
        starts, ends = self.offsets[rows], self.offsets[rows + 1]
        if not len(rows) or (starts[1:] != ends[:-1]).any():
            return self.take(rows)
        return BytesColumn(self.data, np.append(starts, ends[-1]))

    def part(self, rows: slice) -> BytesColumn:
        """Return the values of a range of rows, without copying data."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return BytesColumn(self.data[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def equals(self, other: BytesColumn) -> Flags:
        """Compare two columns of the same length, value by value."""
        return to_flags(pc.equal(self.to_large_arrow(), other.to_large_arrow()))

    def to_large_arrow(self) -> pa.Array[Any]:
        """Return the column as Arrow large binary, without copying."""
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)

    def to_arrow(self) -> pa.Array[Any]:
        """Return the column as Arrow binary, without copying the data; raise OverflowError if it is 2 GiB or larger."""
        if int(self.offsets[-1]) > ARROW_BYTES_MAX:
            raise OverflowError(f"a column of {int(self.offsets[-1])} bytes is too large for one Arrow array")
        offsets = pa.py_buffer(self.offsets.astype(np.int32))
        return pa.Array.from_buffers(pa.binary(), len(self), [None, offsets, pa.py_buffer(self.data)])


def from_arrow(array: pa.Array[Any]) -> BytesColumn:
    """View an Arrow binary array without nulls as a column, without copying the data."""
    wide = pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()[-3:]
    count = len(array) + 1
    width = np.dtype(np.int64 if wide else np.int32)
    if offsets is None or len(array) == 0:
        return BytesColumn(np.empty(0, np.uint8), np.zeros(1, np.int64))
    start = array.offset * width.itemsize
    view = np.frombuffer(offsets, width, count, offset=start).astype(np.int64)
    return BytesColumn(np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8), view)


def column_of(values: pa.Array | pa.ChunkedArray) -> BytesColumn:
    """Convert an Arrow binary array or chunked array to one column."""
    if isinstance(values, pa.ChunkedArray):
        # combine_chunks() copies even a single chunk.
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
        if isinstance(values, pa.ChunkedArray) and values.num_chunks > 1:
            # The values take more than 2 GiB.
            values = values.cast(pa.large_binary()).combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = values.chunk(0)
    return from_arrow(values)


def from_list(values: Sequence[bytes | memoryview]) -> BytesColumn:
    """Return a column of the given values."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return BytesColumn(np.frombuffer(b"".join(values), np.uint8), offsets_of(lengths))


def texts_array(values: Iterable[str]) -> pa.Array[Any]:
    """Return an Arrow string array of the given texts."""
    return from_list([value.encode() for value in values]).to_arrow().cast(pa.string())


def runs(values: npt.NDArray[Any]) -> Iterator[slice]:
    """Yield the slice of every run of adjacent equal values."""
    starts = np.flatnonzero(values[1:] != values[:-1]) + 1
    bounds = [0, *starts.tolist(), len(values)] if len(values) else []
    yield from (slice(low, high) for low, high in pairwise(bounds))


def offsets_of(lengths: Ints) -> Ints:
    """Return the n + 1 offsets of consecutive values with these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather(data: Bytes, starts: Ints, lengths: Ints) -> BytesColumn:
    """Copy the ranges `data[starts[i]:starts[i] + lengths[i]]` into one column."""
    offsets = offsets_of(lengths)
    out = np.empty(int(offsets[-1]), np.uint8)
    first = 0
    while first < len(lengths):
        last = int(np.searchsorted(offsets, offsets[first] + GATHER_BLOCK_BYTES, side="right")) - 1
        last = min(max(last, first + 1), len(lengths))
        low, high = int(offsets[first]), int(offsets[last])
        if last == first + 1:  # one value larger than a block
            out[low:high] = data[starts[first] : starts[first] + lengths[first]]
        else:
            index = np.arange(high - low)
            index += np.repeat(starts[first:last] - (offsets[first:last] - low), lengths[first:last])
            np.take(data, index, out=out[low:high], mode="clip")
        first = last
    return BytesColumn(out, offsets)


def copy_ranges(data: Bytes, starts: Ints, ends: Ints) -> BytesColumn:
    """Copy the ranges `data[starts[i]:ends[i]]`, which are in order and do not overlap, faster than gather()."""
    # The array contains the ranges and, between them, the gaps; take() copies only the ranges.
    bounds = np.stack([starts, ends], axis=1).reshape(-1)
    if not len(bounds):
        return BytesColumn(np.empty(0, np.uint8), np.zeros(1, np.int64))
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    parts = pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
    return from_arrow(parts.take(to_arrow(np.arange(0, len(bounds), 2))))


def xxhash64(column: BytesColumn, seeds: Hashes | None = None) -> Hashes:
    """Return the XXH64 of every value, with Spark's seed: what Spark's xxhash64() returns for a binary column.

    With the hashes of another column as `seeds`, the result is what Spark's xxhash64() returns for both columns.
    """
    if seeds is None:
        seeds = np.full(len(column), HASH_SEED, np.uint64)
    lengths, (low, high) = column.lengths, column.offsets[[0, -1]].tolist()
    is_short = lengths <= HASHED_BY_COLUMN_BYTES_MAX
    if is_short.all():
        return _hash_short(column.data[low:high], column.offsets[:-1] - low, lengths, seeds)
    result = np.empty(len(column), np.uint64)
    short, long = np.flatnonzero(is_short), np.flatnonzero(~is_short)
    if len(short) and high - low <= COPIED_BYTES_MAX:
        starts = column.offsets[short] - low
        result[short] = _hash_short(column.data[low:high], starts, lengths[short], seeds[short])
    elif len(short):
        values = gather(column.data, column.offsets[short], lengths[short])
        result[short] = _hash_short(values.data, values.offsets[:-1], values.lengths, seeds[short])
    view = column.data.data
    ranges = zip(column.offsets[long].tolist(), column.offsets[long + 1].tolist(), seeds[long].tolist(), strict=True)
    result[long] = np.array([xxh64_intdigest(view[start:end], seed) for start, end, seed in ranges], np.uint64)
    return result


def _hash_short(data: Bytes, starts: Ints, lengths: Ints, seeds: Hashes) -> Hashes:
    """Return the XXH64 of ranges of `data` that are at most HASHED_BY_COLUMN_BYTES_MAX long."""
    # The hash reads only the values, but numpy needs at least one word for a view of the data as words.
    padded = data if len(data) >= WORD_BYTES else np.concatenate([data, np.zeros(WORD_BYTES, np.uint8)])
    result = np.empty(len(starts), np.uint64)
    with np.errstate(over="ignore"):
        for first in range(0, len(starts), HASH_BLOCK_ROWS):
            block = slice(first, first + HASH_BLOCK_ROWS)
            result[block] = _hash(padded, starts[block], lengths[block], seeds[block])
    return result


def partition_of(keys: BytesColumn, partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition of every key, the lowest bits of its hash; `partitions` must be a power of two."""
    if partitions == 1:
        return np.zeros(len(keys), np.int32)
    return (xxhash64(keys) & np.uint64(partitions - 1)).astype(np.int32)


def _hash(data: Bytes, starts: Ints, lengths: Ints, seeds: Hashes) -> Hashes:
    """Return the XXH64 of ranges of `data`, which must have at least 8 bytes."""
    words = np.ndarray((len(data) - 7,), np.dtype("<u8"), data, strides=(1,))
    halves = np.ndarray((len(data) - 3,), np.dtype("<u4"), data, strides=(1,))
    state: Hashes = seeds + _P5
    long = lengths >= STRIPE_BYTES
    if long.any():
        rows = _rows(long)
        state[rows] = _stripes(words, starts[rows], lengths[rows] // STRIPE_BYTES, seeds[rows])
    state += lengths.astype(np.uint64)
    position = starts + lengths // STRIPE_BYTES * STRIPE_BYTES
    end = starts + lengths
    while (more := position + 8 <= end).any():
        rows = _rows(more)
        state[rows] = _rotate(state[rows] ^ _round(None, words[position[rows]]), 27) * _P1 + _P4
        position[rows] += 8
    if (more := position + 4 <= end).any():
        rows = _rows(more)
        mixed = state[rows] ^ (halves[position[rows]].astype(np.uint64) * _P1)
        state[rows] = _rotate(mixed, 23) * _P2 + _P3
        position[rows] += 4
    while (more := position < end).any():
        rows = _rows(more)
        state[rows] = _rotate(state[rows] ^ (data[position[rows]].astype(np.uint64) * _P5), 11) * _P1
        position[rows] += 1
    state ^= state >> np.uint64(33)
    state *= _P2
    state ^= state >> np.uint64(29)
    state *= _P3
    state ^= state >> np.uint64(32)
    return state


def _stripes(words: Any, starts: Ints, counts: Ints, seeds: Hashes) -> Hashes:
    """Return the state of each value after its whole stripes (`counts`); every value has at least one."""
    order: Any = slice(None)
    if counts.min() < counts.max():
        # Values with the most stripes come first, so that those with stripes left are always at the front.
        order = np.argsort(counts.max() - counts, kind="stable")
        starts, counts, seeds = starts[order], counts[order], seeds[order]
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for stripe in range(int(counts.max())):
        active = int(np.count_nonzero(counts > stripe))
        place = starts[:active] + stripe * STRIPE_BYTES
        for number, lane in enumerate(lanes):
            lane[:active] = _round(lane[:active], words[place + 8 * number])
    merged: Hashes = _rotate(lanes[0], 1) + _rotate(lanes[1], 7) + _rotate(lanes[2], 12) + _rotate(lanes[3], 18)
    for lane in lanes:
        merged = (merged ^ _round(None, lane)) * _P1 + _P4
    state = np.empty_like(merged)
    state[order] = merged
    return state


def _rows(chosen: Flags) -> Any:
    """Return an index of the chosen rows; if all rows are chosen, a slice, which copies nothing."""
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _round(state: Any, word: Any) -> Any:
    """Mix a word into a state; None stands for a state of zero."""
    mixed = word * _P2
    if state is not None:
        mixed += state
    high = mixed >> np.uint64(33)
    mixed <<= np.uint64(31)
    mixed |= high
    mixed *= _P1
    return mixed


def _rotate(value: Any, bits: int) -> Any:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))
