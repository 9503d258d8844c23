"""Rows come out of buckets as they went in, and rows with equal hashes have one bucket."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutline.columns import buckets as module
from cutline.columns.buckets import BUCKETS_SCHEMA, RowBuckets, read_buckets

SCHEMA = pa.schema([("hash", pa.int64()), ("text", pa.binary())])
HASHES = [5, -1, 5, -(2**63), 2**63 - 1, 0, -1, 12]
ROWS = [{"hash": number, "text": None if number == 0 else str(at).encode()} for at, number in enumerate(HASHES)]


def batches(size: int) -> list[pa.RecordBatch]:
    return pa.Table.from_pylist(ROWS, SCHEMA).to_batches(size)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("held", [1, 4, 100])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_each_row_comes_back_once_in_the_bucket_of_its_hash(
    size: int, held: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_HELD", held)
    filled = list(RowBuckets(SCHEMA, "hash", count).fill(batches(size)))
    rows = [(row["bucket"], row) for batch in filled for row in batch.to_pylist()]
    assert all(batch.schema == BUCKETS_SCHEMA for batch in filled)
    found = []
    for number, row in rows:
        of_bucket = pa.Table.from_batches(read_buckets([pa.RecordBatch.from_pylist([row], BUCKETS_SCHEMA)])).to_pylist()
        # The hash is a number without a sign.
        assert {one["hash"] % 2**64 % count for one in of_bucket} == {number}
        found += of_bucket
    assert sorted(found, key=str) == sorted(ROWS, key=str)


def test_no_rows_fill_no_bucket() -> None:
    assert list(RowBuckets(SCHEMA, "hash", 3).fill([])) == []
    assert list(RowBuckets(SCHEMA, "hash", 3).fill(pa.Table.from_pylist([], SCHEMA).to_batches())) == []
