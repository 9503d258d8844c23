from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutline.snapshots.fold.changed_keys as module
from cutline.columns.bytes_column import BytesColumn, column_of, from_list, xxhash64
from cutline.snapshots.fold.changed_keys import overlays
from tests.unit.made_keys import key_set

KEYS = st.lists(st.binary(max_size=12), min_size=1, max_size=30)


def colliding(column: BytesColumn) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Map all keys to only three hashes."""
    return xxhash64(column) % np.uint64(3)


@pytest.mark.parametrize("hashes", [xxhash64, colliding])
@given(known=KEYS, wanted=KEYS)
def test_a_key_is_found_if_and_only_if_it_is_in_the_set(
    hashes: object, known: list[bytes], wanted: list[bytes]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "xxhash64", hashes)
        keys = list(dict.fromkeys(known))
        found = key_set(keys)
        places = found.find(from_list(wanted + keys))
        held = found.keys.to_arrow().to_pylist()
    assert [place >= 0 for place in places] == [key in keys for key in wanted + keys]
    assert [held[place] for place in places if place >= 0] == [key for key in wanted + keys if key in keys]


@pytest.mark.parametrize("searched", [0, 16], ids=["by search", "in slots"])
@pytest.mark.parametrize("bits", [1, 22])
def test_keys_are_found_in_slots_of_any_size_and_without(
    monkeypatch: pytest.MonkeyPatch, searched: int, bits: int
) -> None:
    """Half of the keys are in the set. With one bit, a slot has hundreds of keys, which have different hashes."""
    monkeypatch.setattr(module, "SEARCHED_KEYS", searched)
    monkeypatch.setattr(module, "SLOT_BITS_MAX", bits)
    count = 20_000 if bits > 1 else 2_000
    keys = [b"key %d" % number for number in range(count)]
    known = key_set(keys[::2])
    for _ in range(2):
        assert known.contains(from_list(keys)).tolist() == [True, False] * (count // 2)
        assert (known._slots is None) == (searched == 0)
    assert known.keys.take(known.find(from_list(keys[::2]))).to_arrow().to_pylist() == keys[::2]


def test_overlays_are_by_node_and_group() -> None:
    rows = [(0, 1, b"a"), (0, 1, b"b"), (0, 2, b"a"), (1, 1, b"c")]
    schema = pa.schema([("node", pa.int32()), ("group", pa.int32()), ("key", pa.binary())])
    names = ("node", "group", "key")
    parts = [pa.Table.from_pylist([dict(zip(names, row, strict=True))], schema) for row in rows]
    found = overlays(pa.concat_tables(parts))
    assert {(node, group) for node, groups in found.items() for group in groups} == {(0, 1), (0, 2), (1, 1)}
    wanted = from_list([b"a", b"b", b"c"])
    assert found[0][1].contains(wanted).tolist() == [True, True, False]
    assert found[0][2].contains(wanted).tolist() == [True, False, False]
    assert found[1][1].contains(wanted).tolist() == [False, False, True]
    assert overlays(schema.empty_table()) == {}


def test_chunks_become_one_column() -> None:
    column = column_of(pa.chunked_array([[b"a"], [], [b"bc"]], pa.binary()))
    assert column.to_arrow().to_pylist() == [b"a", b"bc"]
    assert len(column_of(pa.chunked_array([], pa.binary()))) == 0
