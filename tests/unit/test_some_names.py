"""Long lists in messages are cut, and say how many names are missing."""

from __future__ import annotations

from cutline.fleet.messages import join_some, list_some


def test_the_first_names_are_listed_and_the_others_counted() -> None:
    assert [list_some(names, 2) for names in ((), "a", "ab", "abc", "abcde")] == [
        "", "a", "a, b", "a, b and 1 more", "a, b and 3 more",
    ]  # fmt: skip
    assert [join_some(texts, 2) for texts in ((), "a", "ab", "abcde")] == ["", "a", "a; b", "a; b; and 3 more"]
