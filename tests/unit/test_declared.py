"""What an object declares is compared with its commit before any of its rows are read."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.sources import Source, check_footer, counting_groups, read_tables
from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import (
    ROW_GROUP_ROWS_MAX,
    SEGMENT_SCHEMA,
    expand_global_ids,
    open_parquet,
    parquet_options,
)


def rows(count: int, group: int = 1) -> pa.Table:
    values = [[group] * count, [0] * count, [b"k"] * count, [b"k\n"] * count]
    return pa.table([pa.array(one, field.type) for one, field in zip(values, BASE_SCHEMA, strict=True)], BASE_SCHEMA)


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **(parquet_options(table.schema) | options))
    return sink.getvalue()


def footer(body: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(body))


def test_an_object_with_the_rows_of_its_commit_is_read() -> None:
    check_footer(footer(parquet(rows(3), row_group_size=2)), BASE_SCHEMA, 3)


def test_an_object_that_declares_other_rows_or_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="declares 3 rows instead of 2"):
        check_footer(footer(parquet(rows(3))), BASE_SCHEMA, 2)
    with pytest.raises(ValueError, match="columns"):
        check_footer(footer(parquet(rows(3).drop_columns(["key"]))), BASE_SCHEMA, 3)


def test_a_row_group_of_millions_of_rows_is_refused_though_the_commit_has_as_many() -> None:
    """60 million equal rows are a few kilobytes as stored."""
    count = ROW_GROUP_ROWS_MAX + 1
    numbers = pa.array([1], pa.int32()).take(pa.array([0] * count))
    constant = pa.array([b""], pa.binary()).take(pa.array([0] * count))
    body = parquet(pa.table([numbers, numbers, constant, constant], BASE_SCHEMA), row_group_size=count)
    assert footer(body).num_row_groups == 1
    with pytest.raises(ValueError, match="more than Cutline writes"):
        open_parquet(pa.BufferReader(body))


def test_rows_of_other_groups_than_the_commit_has_are_refused_when_all_are_read() -> None:
    body = parquet(pa.concat_tables([rows(2), rows(1, group=2)]))
    store = InMemoryStore("memory://declared")
    store.create("a", body)

    def read(expected: dict[int, int]) -> int:
        source = Source("a", "s1", 0, len(body), digest(body), expected)
        return sum(len(table) for table in read_tables(store, source, BASE_SCHEMA))

    assert read({1: 2, 2: 1, 3: 0}) == 3
    with pytest.raises(ObjectDamagedError) as refused:
        read({1: 1, 2: 2})
    assert (refused.value.kind, refused.value.exit_code) == ("rows", 3)
    assert len(list(counting_groups(iter([rows(1)]), {1: 1}))) == 1


@pytest.mark.parametrize("options", [{"use_dictionary": ["row"]}, {"column_encoding": {"row": "DELTA_BYTE_ARRAY"}}])
def test_a_value_that_is_stored_once_for_many_rows_is_refused(options: dict[str, Any]) -> None:
    """A hundred equal lines of 1 MB are a few kilobytes in both encodings."""
    table = rows(1).set_column(3, BASE_SCHEMA.field("row"), pa.array([b"x" * 1_000_000], pa.binary()))
    body = parquet(table.take(pa.array([0] * 100)), **options)
    assert len(body) < 10_000
    with pytest.raises(ValueError, match="column row has an encoding that Cutline does not write"):
        open_parquet(pa.BufferReader(body))


@pytest.mark.parametrize(("length", "is_refused"), [(199, False), (1_000_000, True)])
def test_a_global_id_is_bounded_before_it_is_expanded(length: int, is_refused: bool) -> None:  # noqa: FBT001  # a parameter of the case
    empty = pa.Table.from_batches([], SEGMENT_SCHEMA)
    values = [None if one.type == pa.string() else b"" if one.type == pa.binary() else 0 for one in SEGMENT_SCHEMA]
    row = pa.table(
        [pa.array([value], one.type) for value, one in zip(values, SEGMENT_SCHEMA, strict=True)], SEGMENT_SCHEMA
    )
    row = row.set_column(4, SEGMENT_SCHEMA.field(4), pa.array(["x" * length]))
    table = pa.concat_tables([empty, row]).take(pa.array([0] * 100))
    file = open_parquet(pa.BufferReader(parquet(table)))
    read = file.read()
    if is_refused:
        with pytest.raises(ValueError, match="1000000 bytes"):
            expand_global_ids(read)
    else:
        assert expand_global_ids(read)["global_id"].to_pylist() == ["x" * length] * 100
