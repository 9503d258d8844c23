from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cutline.check.hashing import combine, combine_all, combine_hashes

# Keys of three small numbers, so that many entries share a key.
ENTRIES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2**64 - 1)), max_size=60
)


def combine_entries(entries: list[tuple[int, ...]]) -> Any:
    keys = np.array([entry[:3] for entry in entries], np.int64).reshape(-1, 3)
    return combine_hashes(keys, np.array([entry[3] for entry in entries], np.uint64))


@given(ENTRIES, st.randoms(use_true_random=False), st.integers(1, 5))
def test_neither_order_nor_parts_matter(entries: list[tuple[int, ...]], chance: random.Random, parts: int) -> None:
    shuffled = list(entries)
    chance.shuffle(shuffled)
    pieces = [combine_entries(shuffled[number::parts]) for number in range(parts)]
    assert combine_all(pieces, 3).as_dict() == combine_entries(entries).as_dict()


@given(ENTRIES)
def test_each_key_has_a_count_an_exclusive_or_and_two_sums(entries: list[tuple[int, ...]]) -> None:
    expected: dict[tuple[int, ...], tuple[int, ...]] = {}
    for *key, value in entries:
        count, xor, low, high = expected.get(tuple(key), (0, 0, 0, 0))
        signed = value - (1 << 64) if value >> 63 else value
        expected[tuple(key)] = (count + 1, xor ^ signed, low + (value & 0xFFFFFFFF), high + (value >> 32))
    assert combine_entries(entries).as_dict() == expected


@given(ENTRIES.filter(bool), st.data())
def test_any_single_change_changes_the_hashes(entries: list[tuple[int, ...]], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(entries) - 1))
    without = entries[:place] + entries[place + 1 :]
    twice = [*entries, entries[place]]
    *key, value = entries[place]
    other = [*without, (*key, value ^ (1 << data.draw(st.integers(0, 63))))]
    assert len({str(sorted(combine_entries(one).as_dict().items())) for one in (entries, without, twice, other)}) == 4


def test_two_changes_that_cancel_in_the_exclusive_or_show_in_the_sums() -> None:
    same = [(0, 1, 0, 5), (0, 1, 0, 5)]
    gone = [(0, 1, 0, 9), (0, 1, 0, 9)]
    assert combine_entries(same).as_dict() != combine_entries(gone).as_dict()


def test_nothing_combines_to_nothing() -> None:
    assert combine_all([], 3).as_dict() == {}
    assert combine(np.empty((0, 3), np.int64), np.empty((0, 4), np.int64)).as_dict() == {}
