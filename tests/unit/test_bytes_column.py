from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import cutline.columns.bytes_column as module
from cutline.columns.bytes_column import (
    BytesColumn,
    from_arrow,
    from_list,
    gather,
    offsets_of,
    partition_of,
    xxhash64,
)

# Lengths on both sides of XXH64's steps of 1, 4, 8 and 32 bytes.
VALUES = st.lists(
    st.one_of(
        st.binary(max_size=80),
        st.integers(0, 300).map(lambda size: bytes(range(256))[: size % 256] * 2),
    ),
    max_size=20,
)


def values_of(column: BytesColumn) -> list[bytes]:
    return [column.data[low:high].tobytes() for low, high in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


@given(VALUES)
def test_a_column_keeps_its_values_through_arrow_and_back(values: list[bytes]) -> None:
    column = from_list(values)
    assert len(column) == len(values)
    assert values_of(column) == values
    assert column.to_arrow().to_pylist() == values
    assert values_of(from_arrow(column.to_arrow())) == values
    assert values_of(from_arrow(pa.array(values, pa.large_binary()))) == values


@given(VALUES, st.integers(0, 20), st.integers(0, 20))
def test_a_slice_of_an_arrow_array_is_a_column_of_its_values(values: list[bytes], start: int, size: int) -> None:
    part = pa.array(values, pa.binary()).slice(min(start, len(values)), size)
    assert values_of(from_arrow(part)) == part.to_pylist()


@given(st.lists(st.binary(max_size=3), max_size=12), st.data())
def test_ascending_rows_are_taken_whether_values_lie_between_them_or_not(
    values: list[bytes], data: st.DataObject
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(values) - 1)))) if values else []
    column = from_list(values)
    taken = column.take_ascending(np.array(rows, np.int64))
    assert values_of(taken) == [values[row] for row in rows]
    if rows and not any(values[row] for row in range(rows[0], rows[-1]) if row not in rows):
        assert taken.data is column.data


@given(VALUES, st.data(), st.sampled_from([1, 7, 64, 1 << 20]))
def test_gather_copies_ranges_at_any_block_size(values: list[bytes], data: st.DataObject, block: int) -> None:
    column = from_list(values)
    rows = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=30)) if values else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GATHER_BLOCK_BYTES", block)
        gathered = gather(column.data, column.offsets[:-1][rows], column.lengths[rows])
    assert values_of(gathered) == [values[row] for row in rows]


@given(VALUES)
def test_hashes_are_those_of_the_xxhash_library_with_sparks_seed(values: list[bytes]) -> None:
    assert xxhash64(from_list(values)).tolist() == [xxhash.xxh64_intdigest(one, 42) for one in values]


@given(st.lists(st.tuples(st.binary(max_size=80), st.integers(0, 2**64 - 1)), max_size=20))
def test_every_row_is_hashed_with_its_own_seed(rows: list[tuple[bytes, int]]) -> None:
    column = from_list([value for value, _ in rows])
    seeds = np.array([seed for _, seed in rows], np.uint64)
    assert xxhash64(column, seeds).tolist() == [xxhash.xxh64_intdigest(value, seed) for value, seed in rows]


@given(VALUES, st.integers(0, 19))
def test_a_column_within_a_larger_buffer_is_hashed_by_its_own_values(values: list[bytes], skip: int) -> None:
    column = from_list(values)
    skip = min(skip, len(values))
    part = BytesColumn(column.data, column.offsets[skip:])
    assert xxhash64(part).tolist() == [xxhash.xxh64_intdigest(one, 42) for one in values[skip:]]


def test_values_of_every_length_and_very_long_ones_are_hashed_correctly() -> None:
    values = [bytes((7 * place + size) % 256 for place in range(size)) for size in range(200)]
    # Too long to be hashed by column: each is hashed alone, with its own seed.
    values[50:50] = [b"x" * 5000, b"y" * 4096, b"z" * 4097, b"\xff" * 100_001]
    seeds = np.arange(len(values), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = [xxhash.xxh64_intdigest(one, int(seed)) for one, seed in zip(values, seeds, strict=True)]
    column = from_list(values)
    assert xxhash64(column, seeds).tolist() == expected
    # Within a larger buffer.
    assert xxhash64(BytesColumn(column.data, column.offsets[40:-40]), seeds[40:-40]).tolist() == expected[40:-40]
    assert xxhash64(from_list([])).tolist() == []


@given(VALUES, st.sampled_from([1, 2, 64, 1024]))
def test_a_partition_is_the_lowest_bits_of_the_hash(values: list[bytes], partitions: int) -> None:
    found = partition_of(from_list(values), partitions)
    assert found.dtype == np.int32
    assert found.tolist() == [xxhash.xxh64_intdigest(one, 42) % partitions for one in values]


def test_a_column_too_large_for_arrow_is_refused_instead_of_wrapped_around() -> None:
    huge = BytesColumn(np.empty(0, np.uint8), offsets_of(np.array([1 << 30, 1 << 30])))
    with pytest.raises(OverflowError):
        huge.to_arrow()
