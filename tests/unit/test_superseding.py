from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cutline.columns.bytes_column import from_list
from cutline.snapshots.fold.changes import last_of_every_key

CHANGES = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([b"", b"a", b"b", b"ab"]), st.integers(0, 4)), max_size=40
)


@given(CHANGES, st.randoms())
def test_exactly_the_last_change_of_every_group_and_key_is_kept(
    changes: list[tuple[int, bytes, int]], random: np.random.Generator
) -> None:
    numbered = [(group, key, lsn, seq) for seq, (group, key, lsn) in enumerate(changes)]
    random.shuffle(numbered)  # type: ignore[arg-type]
    last = {(group, key): (lsn, seq) for group, key, lsn, seq in sorted(numbered, key=lambda one: one[2:])}
    columns = [np.array([one[place] for one in numbered], np.int64) for place in (0, 2, 3)]
    kept = last_of_every_key(columns[0], from_list([one[1] for one in numbered]), columns[1], columns[2])
    assert [last[one[0], one[1]] == one[2:] for one in numbered] == kept.tolist()


@given(CHANGES, st.data())
def test_the_row_before_one_that_continues_it_is_kept_too(
    changes: list[tuple[int, bytes, int]], data: st.DataObject
) -> None:
    continues = data.draw(st.lists(st.booleans(), min_size=len(changes), max_size=len(changes)))
    at = sorted(range(len(changes)), key=lambda row: (changes[row][2], row))
    before: dict[int, int] = {}
    last: dict[tuple[int, bytes], int] = {}
    for row in at:
        if (earlier := last.get(changes[row][:2])) is not None:
            before[row] = earlier
        last[changes[row][:2]] = row
    groups, lsn = (np.array([one[place] for one in changes], np.int64) for place in (0, 2))
    keys = from_list([one[1] for one in changes])
    kept = last_of_every_key(groups, keys, lsn, np.arange(len(changes)), np.array(continues, np.bool_))
    expected = {*last.values(), *(earlier for row, earlier in before.items() if continues[row])}
    assert set(np.flatnonzero(kept).tolist()) == expected
