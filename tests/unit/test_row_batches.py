from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutline.columns.row_batches as module
from cutline.columns.row_batches import row_batches


@given(sizes=st.lists(st.integers(0, 12), max_size=30), chunks=st.integers(1, 5))
def test_batches_contain_all_rows_in_order_and_are_bounded(sizes: list[int], chunks: int) -> None:
    rows = [{"key": b"k", "row": bytes([number]) * size} for number, size in enumerate(sizes)]
    schema = pa.schema([("key", pa.binary()), ("row", pa.binary())])
    table = pa.concat_tables([pa.Table.from_pylist(rows[start::chunks], schema) for start in range(chunks)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_BYTES", 10)
        patch.setattr(module, "BATCH_ROWS", 4)
        found = [batch.to_pylist() for batch in row_batches(table)]
    assert [row for batch in found for row in batch] == table.to_pylist()
    for batch in found:
        assert len(batch) <= 4
        assert len(batch) == 1 or sum(len(row["key"] + row["row"]) for row in batch) <= 10
