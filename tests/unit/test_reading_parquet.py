"""An object that can't be read is damaged, but not if memory is short."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import reading_parquet


@pytest.mark.parametrize(
    "error", [pa.ArrowInvalid("Corrupt snappy data"), OSError("Unexpected end"), ValueError("rows")]
)
def test_what_is_not_parquet_is_damaged(error: Exception) -> None:
    said = "object a/b of node s1: it can't be read as Parquet: "
    with pytest.raises(ObjectDamagedError, match=said), reading_parquet("a/b", "s1"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowMemoryError("in words that nobody knows"),
        OSError("malloc of size 21200896 failed"),
        MemoryError(),
        OSError("ZSTD decompression failed: Allocation error : not enough memory"),
    ],
)
def test_too_little_memory_is_no_damage(error: Exception) -> None:
    with pytest.raises(MemoryError), reading_parquet("a/b", "s1"):
        raise error
