"""Which rows differ between copies, by the rows and changes that their objects have."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutline.check.named_rows import BASE_LSN, HASH_SCHEMA, _differing, _outvoted, _State
from cutline.fleet.lsn import Lsn
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, UPSERT

# From here on, copies have the same changes.
SINCE = Lsn(3)


def state(*rows: tuple[int, int, int, int], is_multiset: bool = False) -> _State:
    """Fold rows of identity, entry, lsn and op; the seq is the row's number."""
    columns = {
        "group": [1] * len(rows), "partition": [0] * len(rows), "identity": [row[0] for row in rows],
        "entry": [row[1] for row in rows], "lsn": [row[2] for row in rows], "seq": list(range(len(rows))),
        "op": [row[3] for row in rows],
    }  # fmt: skip
    return _State.of(pa.table(columns, schema=HASH_SCHEMA), SINCE, is_multiset=is_multiset)


def differing(first: _State, second: _State) -> list[int]:
    return [int(identity) for identity in _differing(first, second)]


def writers(of: _State) -> dict[int, int]:
    """The position of the last writer of each row."""
    return dict(zip(of.identity.tolist(), of.lsn.tolist(), strict=True))


def test_the_state_has_the_last_image_of_every_key_that_is_not_deleted() -> None:
    base = [(1, 10, BASE_LSN, UPSERT), (2, 20, BASE_LSN, UPSERT)]
    found = state(*base, (3, 30, 5, UPSERT), (2, 0, 7, DELETE), (1, 11, 6, UPSERT))
    assert (found.value(1), found.value(2), found.value(3)) == ((11, 1), None, (30, 1))
    assert writers(found) == {1: 6, 3: 5}
    assert found.value(4) is None
    assert state().value(1) is None


def test_rows_that_differ_or_are_lacking_are_found() -> None:
    first = state((1, 10, BASE_LSN, UPSERT), (2, 20, BASE_LSN, UPSERT), (3, 30, BASE_LSN, UPSERT))
    second = state((1, 10, BASE_LSN, UPSERT), (2, 21, BASE_LSN, UPSERT), (4, 40, BASE_LSN, UPSERT))
    assert differing(first, second) == [2, 3, 4]
    assert differing(first, first) == []


def test_an_image_with_values_left_out_counts_with_those_before_it() -> None:
    base, other, partial = (1, 10, BASE_LSN, UPSERT), (1, 11, BASE_LSN, UPSERT), (1, 5, 8, PARTIAL)
    assert differing(state(base, partial), state(base, partial)) == []
    assert differing(state(base, partial), state(other, partial)) == [1]
    # A complete image hides an earlier difference.
    hidden = (1, 12, 9, UPSERT)
    assert differing(state(base, hidden), state(other, hidden)) == []


def test_a_change_before_the_last_base_copy_makes_no_difference() -> None:
    """One copy has it as a change, and the other in its base row."""
    changed, copied = state((1, 10, BASE_LSN, UPSERT), (1, 11, 2, UPSERT)), state((1, 11, BASE_LSN, UPSERT))
    assert differing(changed, copied) == []
    assert changed.value(1) == copied.value(1) == (11, 1)
    assert writers(changed) == writers(copied) == {1: BASE_LSN}
    # If values were left out, the entries can't be compared.
    assert differing(state((1, 10, BASE_LSN, UPSERT), (1, 5, 2, PARTIAL)), copied) == []


def test_rows_without_a_key_are_counted() -> None:
    rows = [(1, 1, BASE_LSN, INSERT), (1, 1, BASE_LSN, INSERT), (2, 2, BASE_LSN, INSERT), (2, 2, 4, DELETE)]
    found = state(*rows, is_multiset=True)
    assert (found.value(1), found.value(2)) == ((1, 2), None)
    assert writers(found) == {1: BASE_LSN}
    assert differing(found, state(*rows[1:], is_multiset=True)) == [1]


def test_rows_that_are_equal_differ_by_their_writers() -> None:
    first, second = state((1, 10, 5, UPSERT), (2, 9, 5, UPSERT)), state((1, 10, 6, UPSERT), (2, 9, 5, UPSERT))
    assert differing(first, second) == [1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": (1, 1), "b": (2, 1)}, ()),
        ({"a": (1, 1), "b": (2, 1), "c": (1, 1)}, ("b",)),
        ({"a": (1, 1), "b": None, "c": None}, ("a",)),
        ({"a": (1, 1), "b": (2, 1), "c": (3, 1)}, ()),
    ],
)
def test_a_copy_is_outvoted_by_more_than_half(
    values: dict[str, tuple[int, int] | None], expected: tuple[str, ...]
) -> None:
    assert _outvoted(values) == expected
