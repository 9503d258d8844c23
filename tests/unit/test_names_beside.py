"""The names of databases beside a node's own."""

from __future__ import annotations

import pytest

from fleet.nodes.beside import ASIDE, LOADING, is_beside, name_beside

# Two long names that end differently, in ASCII and in characters of two and three bytes.
LONG = [(f"{part * (60 // len(part.encode()))}1", f"{part * (60 // len(part.encode()))}2") for part in ("a", "ä", "数")]


@pytest.mark.parametrize("middle", [ASIDE, LOADING])
@pytest.mark.parametrize(("first", "second"), [("bank", "bank2"), *LONG])
def test_no_database_has_those_of_another(first: str, second: str, middle: str) -> None:
    """What was put aside of one would be dropped with that of the other."""
    names = [name_beside(one, middle, "0123456789") for one in (first, second)]
    # PostgreSQL would cut longer ones.
    assert [len(name.encode()) <= 63 for name in names] == [True, True]
    assert [is_beside(names[0], one, middle) for one in (first, second)] == [True, False]
    assert [is_beside(names[1], one, middle) for one in (first, second)] == [False, True]
