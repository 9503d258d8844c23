"""The names of databases beside a node's own."""

from __future__ import annotations

import pytest

from cutline.nodes.other_databases import ASIDE, LOADING, is_beside, name_beside

# Two long names that end differently, in ASCII and in characters of two and three bytes.
LONG = [(f"{part * (60 // len(part.encode()))}1", f"{part * (60 // len(part.encode()))}2") for part in ("a", "ä", "数")]


def test_a_copy_that_is_named_by_the_date_is_none_that_a_restore_put_aside() -> None:
    assert not is_beside("bank_before_2026112310", "bank", ASIDE)
    assert is_beside("bank_before_202611231a", "bank", ASIDE)


@pytest.mark.parametrize("middle", [ASIDE, LOADING])
@pytest.mark.parametrize(("first", "second"), [("bank", "bank2"), *LONG])
def test_no_database_has_those_of_another(first: str, second: str, middle: str) -> None:
    """What was set aside of one would be dropped with that of the other."""
    names = [name_beside(one, middle, "012345678a") for one in (first, second)]
    # PostgreSQL would cut longer ones.
    assert [len(name.encode()) <= 63 for name in names] == [True, True]
    assert [is_beside(names[0], one, middle) for one in (first, second)] == [True, False]
    assert [is_beside(names[1], one, middle) for one in (first, second)] == [False, True]
