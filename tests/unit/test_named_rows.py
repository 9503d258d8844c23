"""Which rows differ between copies, by the rows and changes that an object has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cutline.check.named_rows import BASE_LSN, IDENTITY_SCHEMA, _differing, _outvoted, _state
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, UPSERT


def table(*rows: tuple[int, int, int, int]) -> pa.Table:
    """Rows of identity, entry, lsn and op; the seq is the row's number."""
    columns = {
        "group": 1, "partition": 0, "identity": [row[0] for row in rows], "entry": [row[1] for row in rows],
        "lsn": [row[2] for row in rows], "seq": list(range(len(rows))), "op": [row[3] for row in rows],
    }  # fmt: skip
    filled = {name: [value] * len(rows) if isinstance(value, int) else value for name, value in columns.items()}
    return pa.table(filled, schema=IDENTITY_SCHEMA)


def state(*rows: tuple[int, int, int, int], is_multiset: bool = False) -> pa.Table:
    return _state(table(*rows), is_multiset=is_multiset)


def test_the_state_has_the_last_image_of_every_key_that_is_not_deleted() -> None:
    rows = [
        (1, 10, BASE_LSN, UPSERT),
        (2, 20, BASE_LSN, UPSERT),
        (3, 30, 5, UPSERT),
        (2, 0, 7, DELETE),
        (1, 11, 6, UPSERT),
    ]
    assert state(*rows).to_pylist() == [
        {"identity": 1, "entry": 11, "lsn": 6, "count": 1},
        {"identity": 3, "entry": 30, "lsn": 5, "count": 1},
    ]
    assert state().to_pylist() == []


def test_an_image_with_values_left_out_counts_with_those_before_it() -> None:
    base, partial = (1, 10, BASE_LSN, UPSERT), (1, 5, 8, PARTIAL)
    same, other = state(base, partial), state((1, 11, BASE_LSN, UPSERT), partial)
    assert _differing({"a": same, "b": state(base, partial)}).tolist() == []
    assert _differing({"a": same, "b": other}).tolist() == [1]
    # An earlier difference that a complete image hides is none.
    hidden = (1, 12, 9, UPSERT)
    assert _differing({"a": state(base, hidden), "b": state((1, 11, BASE_LSN, UPSERT), hidden)}).tolist() == []


def test_rows_without_a_key_are_counted() -> None:
    rows = [(1, 1, BASE_LSN, INSERT), (1, 1, BASE_LSN, INSERT), (2, 2, BASE_LSN, INSERT), (2, 2, 4, DELETE)]
    found = state(*rows, is_multiset=True)
    assert [(row["identity"], row["count"]) for row in found.to_pylist()] == [(1, 2)]
    assert _differing({"a": found, "b": state(*rows[1:], is_multiset=True)}).tolist() == [1]


def test_rows_that_are_equal_differ_by_their_writers() -> None:
    first, second = state((1, 10, 5, UPSERT), (2, 9, 5, UPSERT)), state((1, 10, 6, UPSERT), (2, 9, 5, UPSERT))
    assert _differing({"a": first, "b": second}).tolist() == [1]
    assert _differing({"a": first, "b": first}).dtype == np.uint64


def test_a_copy_is_outvoted_by_more_than_half() -> None:
    assert _outvoted({"a": (1, 1), "b": (2, 1)}) == ()
    assert _outvoted({"a": (1, 1), "b": (2, 1), "c": (1, 1)}) == ("b",)
    assert _outvoted({"a": (1, 1), "b": (0, 0), "c": (0, 0)}) == ("a",)
    assert _outvoted({"a": (1, 1), "b": (2, 1), "c": (3, 1)}) == ()
